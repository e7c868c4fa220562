"""The simulated device beside one that keeps every token, and the simulated engine's promises."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from fake_device import FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.config import EngineConfig
from jpaged.request import Request
from jpaged.sampling_params import SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.simulation import (
    Job,
    RecordedParents,
    Roofline,
    SimulatedEngine,
    fit_cost,
    make_config,
    poisson_jobs,
    recorded_parents,
    roofline,
    sharegpt_lengths,
)
from jpaged.simulation.costs import DECODE_TERMS, MIXED_TERMS, FittedCost
from jpaged.simulation.device import SimulatedDevice
from jpaged.simulation.jobs import fit_lengths, read_jobs, scale_lengths
from jpaged.simulation.shape import StepShape
from jpaged.tiers import HostStore

COST = roofline("h200", "llama-3.1-8b")
SIZES = dict(num_blocks=34, max_model_len=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)


class TwoDevices:
    """An engine's loop in which each plan is run by the device that keeps tokens and by the one that counts."""

    def __init__(self, config: EngineConfig, swap_blocks: int) -> None:
        store = HostStore(1, swap_blocks, swap_blocks)
        self.scheduler = Scheduler(config, store=store)
        self.real = FakeDevice(self.scheduler)
        self.counting = SimulatedDevice(config, HostStore(1), lambda request: request.max_tokens)
        self.pending = None

    def step(self) -> None:
        plan = self.scheduler.schedule()
        current = None
        if plan.has_work:
            tokens, left = self.real.run(plan)
            self.real.finish_copies()
            for save in plan.save:
                assert save.block.data is not None
            step = self.counting.run(plan)
            assert step.remaining.tolist() == left.tolist()
            assert (step.tokens >= 0).sum(0).tolist() == (tokens >= 0).sum(0).tolist()
            self.compare(step.counts)
            current = plan, tokens, left
        done = current
        if self.scheduler.config.async_scheduling:
            done, self.pending = self.pending, current
        if done:
            self.scheduler.update(*done)

    def compare(self, counts) -> None:
        real = self.real
        tables = [[block for block in table if block] for table in real.tables]
        entries = [block for table in tables for block in table]
        assert counts.free == len(real.free)
        assert counts.entries == len(entries)
        assert counts.used == len(set(entries))
        assert counts.shared == sum(entries.count(block) > 1 for block in set(entries))
        assert counts.tokens == sum(len(real.content[block]) for block in set(entries))
        assert counts.cached == len(set(real.named.values()) - set(entries))


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=12
    ),
    caching=st.booleans(),
    asynchronous=st.booleans(),
    window=st.sampled_from([None, 10]),
    swap_blocks=st.sampled_from([0, 20]),
)
def test_counts_as_a_device_that_keeps_every_token(requests, caching, asynchronous, window, swap_blocks):
    config = EngineConfig(
        **SIZES,
        watermark=0.0,
        window=window,
        enable_prefix_caching=caching,
        async_scheduling=asynchronous,
        preemption="swap" if swap_blocks else "recompute",
    )
    both = TwoDevices(config, swap_blocks)
    for number, (prompt, output, head, outputs) in enumerate(requests):
        tokens = [(11 * head + 3 * i) % 90 + 3 for i in range(prompt)]
        request = Request(str(number), tokens, SamplingParams(max_tokens=None), output, seed=number)
        if outputs > 1:
            request.add_siblings(outputs)
        both.scheduler.add(request)
        both.step()
    while both.pending or both.scheduler.has_unfinished():
        both.step()
    assert both.counting.pool.used == both.counting.pool.tokens == both.counting.pool.entries == 0


def jobs_of_all_kinds() -> list[Job]:
    some = poisson_jobs(sharegpt_lengths(), 50, 4, np.random.default_rng(1))
    return [dataclasses.replace(job, outputs=1 + (i % 7 == 0)) for i, job in enumerate(some)]


def test_a_run_is_complete_and_depends_on_its_jobs_alone():
    config = EngineConfig(num_blocks=2000, max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=1024)
    jobs = jobs_of_all_kinds()
    engine = SimulatedEngine(config, COST)
    report = engine.run(jobs)
    assert report == SimulatedEngine(config, COST).run(jobs)
    assert report.finished == len(jobs)
    total = sum(job.output * job.outputs for job in jobs)
    assert report.output_tokens_per_second * (report.seconds - jobs[0].arrival) == pytest.approx(total)
    assert 0.9 < report.utilization < 1
    assert sum([report.token_states, report.reserved, report.internal, report.external]) == pytest.approx(1)
    assert report.mean_saved > 0  # outputs of one prompt share it
    assert engine.device.pool.used == 0 and engine.scheduler.available_blocks == 1999


def test_one_request_takes_as_long_as_its_steps():
    """No queue, nothing in parallel: latency is the sum of what the cost model says, by hand."""

    class Counting:
        def seconds(self, shape: StepShape) -> float:
            return 100.0 if shape.mixed else float(shape.iterations)

    config = EngineConfig(num_blocks=100, max_model_len=256, decode_steps=4, async_scheduling=False)
    report = SimulatedEngine(config, Counting()).run([Job(5.0, prompt=20, output=10)])
    assert report.first_token_p50 == 100.0
    assert report.latency_p50 == 100.0 + 9  # the first token comes with the prompt
    assert report.seconds == 5.0 + 109.0


def test_a_prompt_known_from_a_trace_is_found():
    jobs = [Job(float(i), 1100, 3, prefix=(7, 8)) for i in range(3)] + [Job(4.0, 1100, 3, prefix=(7, 9))]
    config = EngineConfig(num_blocks=400, max_model_len=2048)
    report = SimulatedEngine(config, COST).run(jobs)
    assert report.hit_rate == pytest.approx((2 * 1024 + 512) / 4400)
    with pytest.raises(ValueError, match="block_size must divide"):
        SimulatedEngine(dataclasses.replace(config, block_size=24), COST).run(jobs)


def test_an_output_may_end_before_its_limit():
    config = EngineConfig(num_blocks=400, max_model_len=2048)
    engine = SimulatedEngine(config, COST)
    report = engine.run([Job(0.0, 10, 7, max_tokens=500), Job(0.0, 10, 9)])
    assert report.output_tokens_per_second * report.seconds == pytest.approx(16)


def test_a_run_stops_when_told_and_lets_only_so_many_wait():
    config = make_config(32_000, max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=1)
    assert (config.num_blocks, config.max_num_batched_tokens) == (2001, 16)
    config = dataclasses.replace(config, max_num_batched_tokens=512)
    jobs = [Job(0.0, 5 + i, 10 + 7 * i % 40) for i in range(60)]
    whole = SimulatedEngine(config, COST).run(jobs)
    part = SimulatedEngine(config, COST).run(jobs, stop_at=whole.seconds / 3)
    assert 0 < part.finished < whole.finished and part.seconds < whole.seconds / 2
    most = []
    engine = SimulatedEngine(config, COST, queue=3, watch=lambda *_: most.append(len(engine.scheduler.waiting)))
    assert engine.run(jobs).finished == len(jobs)
    assert 0 < max(most) <= 3


def test_beams_do_what_was_recorded():
    config = make_config(
        3200, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False
    )
    jobs = [Job(float(i) / 100, 20, 40, outputs=4, beams=True) for i in range(6)]

    def run(record: str) -> float:
        return SimulatedEngine(config, COST, parents=RecordedParents({4: [record]})).run(jobs).mean_saved

    # 20 tokens of a prompt are two blocks of up to four that each of four beams has: one is shared for good.
    apart, together = run("0000" + "0123" * 3), run("0000" * 2)
    assert 0.2 < apart < 0.4
    assert together == pytest.approx(0.75)  # the others go on from the first every time: none has a block of its own
    with pytest.raises(ValueError, match="no group of 4 beams was recorded; there are groups of 2"):
        SimulatedEngine(config, COST, parents=RecordedParents({2: ["0011"]})).run(jobs)
    with pytest.raises(ValueError, match="give it `parents`"):
        SimulatedEngine(config, COST).run(jobs)
    for record in ("00", "0012", "000"):
        with pytest.raises(ValueError, match="a record of 2 beams"):
            RecordedParents({2: [record]})
    with pytest.raises(ValueError, match="max_tokens must be None"):
        Job(0.0, 4, 4, outputs=2, beams=True, max_tokens=9)
    for width in (2, 4, 6):
        assert len(recorded_parents().groups[width]) >= 20


def test_what_cannot_be_run_is_refused():
    config = EngineConfig(num_blocks=400, max_model_len=2048)
    with pytest.raises(ValueError, match="order of arrival"):
        SimulatedEngine(config, COST).run([Job(1.0, 4, 4), Job(0.5, 4, 4)])
    with pytest.raises(ValueError, match="max_model_len is 2048"):
        SimulatedEngine(config, COST).run([Job(0.0, 4000, 4)])
    with pytest.raises(ValueError, match="no request finished"):
        SimulatedEngine(config, COST).run([])
    with pytest.raises(ValueError, match="chip must be one of a100, h200"):
        roofline("b200", "opt-13b")
    with pytest.raises(ValueError, match="efficiency"):
        roofline("a100", "opt-13b", efficiency=0.0)


def test_a_roofline_by_hand():
    cost = Roofline(COST.chip, COST.model)
    decode = StepShape(False, 4, 8, 32, 0, 0, 32, context=1000, attended=0)
    assert cost.seconds(decode) == pytest.approx((4 * 16.06e9 + 1000 * 131072) / 4.8e12)
    prefill = StepShape(True, 1, 0, 0, 4096, 1, 1, context=0, attended=4096 * 4097 // 2)
    products = 2 * 8.03e9 * 4096 + 4 * 32 * 4096 * (4096 * 4097 // 2)
    assert cost.seconds(prefill) == pytest.approx(products / 989e12)
    moved = dataclasses.replace(decode, copied=3, moved=5, block_size=16)
    block = 16 * 131072
    host = 5 * (block / 25e9 + 1e-5)
    swapping = dataclasses.replace(cost, transfer_seconds=1e-5)
    assert swapping.seconds(moved) - swapping.seconds(decode) == pytest.approx(2 * 3 * block / 4.8e12 + host)
    small = dataclasses.replace(cost, attention_slowdown=3.0)
    assert small.seconds(decode) - cost.seconds(decode) == pytest.approx(2 * 1000 * 131072 / 4.8e12)
    slow = dataclasses.replace(cost, efficiency=0.5, step_seconds=1.0, row_seconds=0.25)
    assert slow.seconds(decode) == pytest.approx(2 * cost.seconds(decode) + 4 + 32 * 0.25)


def test_a_fit_finds_what_made_the_times(tmp_path):
    rng = np.random.default_rng(0)
    true = FittedCost(
        dict(dispatch=2e-3, iteration=5e-3, row=1e-4, context=2e-7),
        dict(dispatch=3e-3, token=2e-4, size=0.0, sampled=1e-4, context=2e-7, attended=1e-8),
        {},
    )
    steps = []
    for _ in range(200):
        mixed, n = bool(rng.integers(2)), int(rng.integers(1, 9))
        rows, prefill = int(rng.integers(1, 33)), int(rng.integers(1, 500))
        context, attended = int(rng.integers(1, 50_000)), int(rng.integers(1, 100_000))
        decoded = rows if mixed else rows * n
        size = int(rng.integers(32, 600))
        shape = StepShape(mixed, 1 if mixed else n, rows, decoded, prefill * mixed, 1, decoded, context, attended, size)
        steps.append((shape, true.seconds(shape)))
    found = fit_cost(steps, {"machine": "none"})
    found.save(tmp_path / "cost.json")
    read = FittedCost.load(tmp_path / "cost.json")
    assert read == found
    for shape, seconds in steps:
        assert read.seconds(shape) == pytest.approx(seconds, rel=1e-3)
    with pytest.raises(ValueError, match="decode steps were measured"):
        fit_cost(steps[:1], {})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda data: data["decode"].pop("row"), "'decode' must have the terms"),
        (lambda data: data["mixed"].pop("size"), "'mixed' must have the terms"),
        (lambda data: data["mixed"].update(more=1.0), "'mixed' must have the terms"),
        (lambda data: data.pop("mixed"), "'mixed' must have the terms"),
        (lambda data: data["decode"].update(row="fast"), "decode row must be seconds"),
        (lambda data: data["mixed"].update(token=-1.0), "mixed token must be seconds"),
        (lambda data: data.update(about=3), "'about' must say"),
    ],
)
def test_a_cost_model_that_is_none_is_refused(tmp_path, change, message):
    path = tmp_path / "cost.json"
    FittedCost(dict.fromkeys(DECODE_TERMS, 1e-3), dict.fromkeys(MIXED_TERMS, 1e-3), {}).save(path)
    FittedCost.load(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        FittedCost.load(path)


def test_lengths_have_the_means_asked_for():
    lengths = sharegpt_lengths()
    assert lengths.shape == (7980, 2) and lengths.min() >= 1
    for changed in (scale_lengths(lengths, 161, 338), fit_lengths(lengths, (161, 159), (338, 598))):
        assert changed.mean(0) == pytest.approx([161, 338], rel=0.01)
        assert changed.sum(1).max() <= 2048
    output = fit_lengths(lengths, (161, 159), (338, 598))[:, 1]
    assert (output**2).sum() / output.sum() == pytest.approx(598, rel=0.02)


def test_traces_are_read_by_their_columns(tmp_path):
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_jobs(azure, speedup=2.0)
    assert (first.arrival, first.prompt, first.output) == (0.0, 374, 44)
    assert second.arrival == pytest.approx(4.314579 / 2) and second.prompt == 396
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text('{"timestamp": 3000, "input_length": 1030, "output_length": 5, "hash_ids": [4, 5, 6]}\n' * 2)
    assert read_jobs(mooncake, count=1) == [Job(3.0, 1030, 5, (4, 5))]
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no trace of a known format"):
        read_jobs(tmp_path / "other.csv")


def test_the_simulator_knows_nothing_of_jax():
    code = "import sys, jpaged.simulation.engine; sys.exit('jax' in sys.modules)"
    path = f"import sys; sys.path[:0] = {sys.path!r}; "
    package = "import types; sys.modules['jpaged'] = p = types.ModuleType('jpaged'); "
    root = [each for each in sys.path if each]
    assert root
    import jpaged

    done = subprocess.run([sys.executable, "-c", path + package + f"p.__path__ = {list(jpaged.__path__)!r}; " + code])
    assert done.returncode == 0
