"""The engine on a tiny model: the same tokens alone, in any batch, in any chunking, through any preemption."""

from importlib.util import find_spec

import jax
import numpy as np
import pytest
from ascii_model import ascii_model
from tiny import finish, greedy_reference, make_prompts, preempt, run_all, tiny_config, tiny_engine, tiny_model

from jpaged import Engine, SamplingParams
from jpaged.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SHORT_OF_MEMORY = dict(num_blocks=34, watermark=0.0)  # about four of the sequences below fit


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(10, 40)


@pytest.fixture(scope="module")
def expected(prompts):
    return [greedy_reference(prompt, 20) for prompt in prompts]


def test_equals_a_plain_forward_pass(prompts, expected):
    assert run_all(tiny_engine(), prompts, GREEDY) == expected


@pytest.mark.parametrize(
    "changes",
    [
        dict(max_num_seqs=1),  # alone
        dict(max_num_batched_tokens=8),  # chunks of at most 8
        dict(async_scheduling=False, decode_steps=1),
        dict(async_scheduling=False),
        dict(decode_steps=3, block_size=1, num_blocks=300),
        dict(block_size=16, num_blocks=40),
    ],
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()),
)
def test_same_tokens_in_any_batch_and_chunking(prompts, expected, changes):
    assert run_all(tiny_engine(**changes), prompts, GREEDY) == expected


def test_same_tokens_when_memory_is_short(prompts, expected):
    engine = tiny_engine(**SHORT_OF_MEMORY)
    assert run_all(engine, prompts, GREEDY) == expected
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_same_tokens_with_preemption_at_random_steps(prompts, expected, monkeypatch, async_scheduling):
    rng = np.random.default_rng(1)
    pick_decode = Scheduler._pick_decode

    def preempt_sometimes(scheduler, plan):
        if rng.random() < 0.3:
            scheduler._preempt_last(plan)
        pick_decode(scheduler, plan)

    monkeypatch.setattr(Scheduler, "_pick_decode", preempt_sometimes)
    engine = tiny_engine(async_scheduling=async_scheduling)
    assert run_all(engine, prompts, GREEDY) == expected
    assert engine.scheduler.num_preemptions >= 2


def test_more_requests_than_memory():
    """KV for four sequences, 200 requests of mixed length: every one right, all blocks free at the end."""
    prompts = make_prompts(200, 24, seed=5)
    rng = np.random.default_rng(6)
    params = [SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True) for n in rng.integers(1, 16, 200)]
    engine = tiny_engine(**SHORT_OF_MEMORY)
    outputs = run_all(engine, prompts, params)
    for prompt, each, output in list(zip(prompts, params, outputs, strict=True))[::9]:
        assert output == greedy_reference(prompt, each.max_tokens)
    assert [len(output) for output in outputs] == [each.max_tokens for each in params]
    stats = engine.stats()
    assert stats.finished == 200 and stats.blocks.free + stats.blocks.cached == stats.blocks.total == 33


def test_nothing_compiles_after_warm_up():
    """Requests of all kinds after warm_up: not one compilation, neither of a step nor of a stray operation."""
    sizes = dict(max_num_seqs=16, max_num_batched_tokens=48, num_blocks=66)
    engine = Engine(ascii_model(), tiny_config(**sizes, preemption="swap"))
    before = jax.device_get((engine.runner.state.pool, engine.runner.state.tables, engine.runner.state.slots.left))
    engine.warm_up()
    after = jax.device_get((engine.runner.state.pool, engine.runner.state.tables, engine.runner.state.slots.left))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if "compile" in event else None
    )
    rng = np.random.default_rng(2)
    controls = [
        {},
        dict(repetition_penalty=1.5, logit_bias={5: 1.0}, min_tokens=1),
        dict(logprobs=3, prompt_logprobs=2),
        dict(bad_words=["ab", "c"], allowed_token_ids=range(60), stop=["xy"]),
        dict(structured_outputs={"regex": "[a-z]{3,9}"}) if find_spec("llguidance") else {},
    ]
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
            min_p=float(rng.choice([0.0, 0.05])),
            max_tokens=int(rng.integers(1, 20)),
            stop_token_ids=(int(rng.integers(97)),),
            **controls[i % len(controls)],
        )
        for i in range(60)
    ]
    requests = []
    for i, (prompt, each) in enumerate(zip(make_prompts(60, 60, seed=3), params, strict=True)):
        requests.append(engine.add_request(f"r{i}", prompt, each))
        for _ in range(int(rng.integers(0, 3))):
            engine.step()
        if i % 10 == 3:
            engine.abort(f"r{rng.integers(i + 1)}")
        if i % 10 == 7:
            preempt(engine, evict=8)
    finish(engine)
    assert engine.stats().swap.restored_blocks > 0
    assert all(request.finished for request in requests)
    jax.monitoring.clear_event_listeners()
    assert compiled == []


def test_seed_gives_the_same_tokens_in_any_company(prompts):
    """A seeded request beside others, in another slot, through preemption, at another step count: equal."""
    seeded = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True)
    alone = run_all(tiny_engine(max_num_seqs=1), prompts[:1], seeded)[0]
    others = [SamplingParams(temperature=0.9, top_k=7, max_tokens=25)] * 9
    mixed = run_all(tiny_engine(**SHORT_OF_MEMORY), prompts[1:] + prompts[:1], [*others, seeded])
    assert mixed[-1] == alone
    assert run_all(tiny_engine(), prompts[:1], SamplingParams(temperature=1.0, seed=12, max_tokens=20))[0] != alone


def test_unseeded_requests_follow_the_engine_seed(prompts):
    warm = SamplingParams(temperature=1.0, max_tokens=8)

    def run(seed):
        return run_all(Engine(tiny_model(), tiny_config(), seed=seed), prompts[:3], warm)

    assert run(0) == run(0) != run(1)
    first, second, _ = run_all(Engine(tiny_model(), tiny_config()), [prompts[0]] * 3, warm)
    assert first != second


def test_stops(prompts):
    """EOS, a stop token and max_tokens each end a request, with the reason vLLM gives."""
    prompt = prompts[0]
    path = greedy_reference(prompt, 20)
    stop = path[4]
    engine = tiny_engine()
    engine.eos_token_ids = frozenset({path[6]})
    by_stop = engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(stop,)))
    by_eos = engine.add_request("b", prompt, SamplingParams(temperature=0, max_tokens=20))
    by_length = engine.add_request("c", prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    many = tuple(t for t in range(97) if t not in path)[:30]
    by_late_stop = engine.add_request(
        "d", prompt, SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(*many, stop))
    )
    finish(engine)
    assert (by_stop.finish_reason, by_stop.stop_reason) == ("stop", stop)
    assert by_stop.output_token_ids == path[: path.index(stop) + 1]
    assert (by_eos.finish_reason, by_eos.stop_reason) == ("stop", None)
    assert by_eos.output_token_ids == path[: path.index(path[6]) + 1]
    assert (by_length.finish_reason, by_length.output_token_ids) == ("length", path)
    assert by_late_stop.output_token_ids == by_stop.output_token_ids
    assert by_late_stop.stop_reason == stop


def test_max_tokens_none_goes_to_the_model_length():
    engine = tiny_engine()
    request = engine.add_request("a", [5] * 100, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    finish(engine)
    assert len(request.output_token_ids) == 28 and request.finish_reason == "length"


def test_abort_at_any_time(prompts, expected):
    """Aborting waiting, prefilling, decoding and finished requests frees all and harms nobody else."""
    for when in range(8):
        engine = tiny_engine()
        requests = [engine.add_request(f"r{i}", p, GREEDY) for i, p in enumerate(prompts)]
        for _ in range(when):
            engine.step()
        for i in (0, 2, 9):
            engine.abort(f"r{i}")
        engine.abort("unknown")
        finish(engine)
        for i, request in enumerate(requests):
            if request.finish_reason == "abort":
                assert request.output_token_ids == expected[i][: len(request.output_token_ids)]
            else:
                assert request.output_token_ids == expected[i]
        assert not engine.requests


def test_request_ids_are_unique_while_they_live(prompts):
    engine = tiny_engine()
    engine.add_request("a", prompts[0], GREEDY)
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request("a", prompts[1], GREEDY)
    finish(engine)
    engine.add_request("a", prompts[1], GREEDY)
    finish(engine)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "at least one token"),
        ([97], "outside the model's vocabulary: ids are 0 to 96"),
        ([3, -1], "token id -1 is outside"),
        ([1.5], "integer token ids"),
        ([[1, 2]], "one dimension"),
        ([3] * 128, "at most 127 are allowed"),
    ],
)
def test_bad_prompts_are_refused_and_harm_nobody(prompts, expected, prompt, message):
    engine = tiny_engine()
    good = engine.add_request("good", prompts[0], GREEDY)
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", prompt, GREEDY)
    finish(engine)
    assert good.output_token_ids == expected[0]


def test_stop_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="stop_token_ids: 97 is outside"):
        tiny_engine().add_request("a", [5], SamplingParams(stop_token_ids=(97,)))


def test_stats_add_up(prompts):
    engine, prompts = tiny_engine(), prompts[:4]
    run_all(engine, prompts, GREEDY)
    stats = engine.stats()
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.generation_tokens == 80 and stats.finished == 4
    assert stats.running == stats.waiting == 0 and stats.utilization == 1.0
    assert 0.5 < stats.mean_utilization <= 1.0 and 0 < stats.peak_blocks.used <= 64
    cached = sum((len(prompt) + 19) // 4 for prompt in prompts)  # the last token of an output is not in the cache
    assert 0 < cached < 64
    assert stats.as_dict()["blocks"] == dict(total=64, used=0, cached=cached, shared=0, free=64 - cached, saved=0)


def test_stats_while_running():
    engine = tiny_engine(async_scheduling=False, decode_steps=1)
    engine.add_request("a", [5] * 6, GREEDY)
    engine.step()
    stats = engine.stats()
    assert (stats.blocks.used, stats.kv_tokens, stats.waste_tokens) == (2, 6, 2)
    assert stats.utilization == 0.75 and stats.running == 1
    engine.abort("a")
    finish(engine)
