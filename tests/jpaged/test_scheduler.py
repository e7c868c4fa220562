"""The scheduler against a device in plain Python: exact tokens, exact block counts, nothing lost or repeated."""

import gc
import sys

import numpy as np
import pytest
from fake_device import FakeDevice, expected_output
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.config import EngineConfig
from jpaged.policies import make_policy
from jpaged.request import Request
from jpaged.sampling_params import SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.tiers import HostStore


def make_config(**changes) -> EngineConfig:
    sizes = dict(num_blocks=33, max_model_len=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)
    return EngineConfig(**{**sizes, **changes})


def make_request(name, prompt_len=5, max_tokens=8, stop=(), eos=frozenset()) -> Request:
    prompt = [(13 * i + 7 * len(name) + hash_name(name)) % 97 for i in range(prompt_len)]
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop)
    return Request(name, prompt, params, max_tokens=max_tokens, seed=0, eos_token_ids=eos)


def hash_name(name: str) -> int:
    return sum(ord(letter) * (i + 1) for i, letter in enumerate(name))


class Loop:
    """The engine's loop without a device: the result of a step is read `delay` steps late."""

    def __init__(self, config: EngineConfig, policy=None, store: HostStore | None = None, pays=None) -> None:
        self.scheduler = Scheduler(config, policy, store=store, swap_pays=pays or (lambda blocks: True))
        self.device = FakeDevice(self.scheduler)
        self.pending = None
        self.plans = []

    def step(self):
        plan = self.scheduler.schedule()
        current = (plan, *self.device.run(plan)) if plan.has_work else None
        if plan.has_rows:
            self.plans.append(plan)
        done = current
        if self.scheduler.config.async_scheduling:
            done, self.pending = self.pending, current
        if done:
            self.device.finish_copies()
            self.scheduler.update(*done)
        else:
            assert self.pending or not self.scheduler.has_unfinished(), "nothing runs and nothing waits: stuck"
        # The host's count never says more is free than really is.
        counts, index = self.scheduler.counts, self.scheduler.index
        assert counts.private == (counts.reserved - counts.named).sum() and (counts.named >= 0).all()
        assert self.scheduler.free_blocks >= 0
        assert self.device.used_blocks <= counts.private + index.num_named
        assert len(self.device.named) == index.num_named - len(self.scheduler.to_name)
        locked = [block for each in self.scheduler.running.values() for block in each.chain[each.slid :]]
        assert all(block.locks == locked.count(block) for block in index.blocks.values() if not block.pins)
        assert index.num_evictable == sum(not block.locks for block in index.blocks.values())

    def run(self, limit=10_000):
        for _ in range(limit):
            if not (self.pending or self.scheduler.has_unfinished()):
                cached = len(self.scheduler.index.blocks)
                assert self.device.used_blocks == len(self.device.named) == cached == self.scheduler.index.num_named
                assert self.scheduler.available_blocks == self.scheduler.usable_blocks
                assert self.scheduler.free_blocks == self.scheduler.usable_blocks - cached
                assert not self.scheduler.counts.in_flight.any()
                assert len(self.scheduler.free_slots) == self.scheduler.config.max_num_seqs
                store = self.scheduler.store
                assert not store.holds and len(store.blocks) == len(store.unheld) <= store.cache_blocks
                return
            self.step()
        raise AssertionError("did not finish")


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("decode_steps", [1, 5])
def test_more_requests_than_memory(async_scheduling, decode_steps):
    """200 requests of mixed length, KV for about four: all right, none lost, preemption happens."""
    rng = np.random.default_rng(0)
    config = make_config(
        num_blocks=30,
        max_num_seqs=8,
        watermark=0.0,
        async_scheduling=async_scheduling,
        decode_steps=decode_steps,
    )
    loop = Loop(config)
    requests = [
        make_request(f"r{i}", int(rng.integers(1, 40)), int(rng.integers(1, 24)), eos=frozenset({3, 50}))
        for i in range(200)
    ]
    for request in requests:
        loop.scheduler.add(request)
    loop.run()
    for request in requests:
        assert request.output_token_ids == expected_output(request)
        assert request.finish_reason == ("stop" if request.output_token_ids[-1] in request.stop_ids else "length")
    assert loop.scheduler.num_preemptions > 0


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_traffic(data):
    """Arrivals, aborts, early stops and preemption in any order, for any sizes."""
    block_size = data.draw(st.sampled_from([1, 3, 8]))
    max_len = data.draw(st.integers(6, 48))
    window, budget = data.draw(st.sampled_from([None, None, 1, 4, 13])), data.draw(st.sampled_from([9, 33, 64]))
    sizes = dict(block_size=block_size, max_model_len=max_len, window=window, max_num_batched_tokens=budget)
    steps = data.draw(st.integers(1, 6))
    least = make_config(num_blocks=100, decode_steps=steps, **sizes).most_held_blocks
    blocks = least + data.draw(st.integers(0, 20))
    config = make_config(
        **sizes,
        num_blocks=blocks + 1,
        max_num_seqs=data.draw(st.integers(1, 9)),
        decode_steps=steps,
        watermark=data.draw(st.sampled_from([0.0, 0.1])),
        async_scheduling=data.draw(st.booleans()),
        max_stop_ids=data.draw(st.sampled_from([1, 4])),
        enable_prefix_caching=data.draw(st.sampled_from([True, True, False])),
    )
    alike = data.draw(st.booleans())  # prompts that begin like others
    policy = make_policy(data.draw(st.sampled_from(["fcfs", "fcfs", "priority", "fair"])))
    cache_blocks = data.draw(st.sampled_from([0, 0, 3, 30])) if config.enable_prefix_caching else 0
    store = HostStore(1, swap_bytes=data.draw(st.sampled_from([0, 4, 40])), cache_bytes=cache_blocks)
    pays = data.draw(st.sampled_from([lambda blocks: True, lambda blocks: blocks % 2 == 0]))
    loop, live = Loop(config, policy, store, pays), []
    for number in range(data.draw(st.integers(1, 25))):
        prompt_len = data.draw(st.integers(1, max_len - 1))
        stop = tuple(data.draw(st.lists(st.integers(0, 96), max_size=3)))
        name = data.draw(st.sampled_from("ab")) if alike else f"r{number}"
        request = make_request(name, prompt_len, data.draw(st.integers(1, max_len - prompt_len)), stop)
        if alike and live and data.draw(st.booleans()):  # the next turn of a conversation
            last = data.draw(st.sampled_from(live))
            request.prompt_token_ids = (last.prompt_token_ids + last.output_token_ids)[:prompt_len]
        request.priority, request.tenant = data.draw(st.integers(0, 2)), data.draw(st.sampled_from("xyz"))
        request.add_siblings(data.draw(st.sampled_from([1, 1, 1, 2, 5])))
        loop.scheduler.add(request)
        live += request.group
        for _ in range(data.draw(st.integers(0, 3))):
            loop.step()
        if data.draw(st.integers(0, 5)) == 0:
            for request in data.draw(st.sampled_from(live)).group:
                loop.scheduler.abort(request)
        if data.draw(st.integers(0, 9)) == 0:
            loop.scheduler.reset_prefix_cache()
    loop.run()
    for request in live:
        expected = expected_output(request, window)
        if request.finish_reason == "abort":
            assert request.output_token_ids == expected[: len(request.output_token_ids)]
        else:
            assert request.output_token_ids == expected


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("prompt_len", [1, 8, 11])
def test_forks_share_the_prompt(caching, prompt_len):
    """One computes the prompt, all its blocks are shared, and only a last one that is not full is copied."""
    loop = Loop(make_config(max_num_seqs=8, enable_prefix_caching=caching, async_scheduling=False))
    leader = make_request("a", prompt_len, 2)
    leader.add_siblings(8)
    loop.scheduler.add(leader)
    loop.step()
    full = prompt_len // 4
    assert loop.device.used_blocks == -(-prompt_len // 4)
    assert loop.scheduler.counts.private == (8 if prompt_len % 4 else 0)
    loop.step()
    assert loop.device.used_blocks == full + 8
    loop.run()
    assert loop.device.computed == prompt_len
    assert [request.output_token_ids for request in leader.group] == [expected_output(each) for each in leader.group]
    assert len({request.output_token_ids[0] for request in leader.group}) == 8


@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_or_a_batch_too_small_for_all_forks(caching):
    """Forks without a slot, or without blocks, run later."""
    for sizes in (dict(num_blocks=17), dict(max_num_seqs=3), dict(max_num_batched_tokens=20)):
        loop = Loop(make_config(**{"max_num_seqs": 8, **sizes}, enable_prefix_caching=caching))
        leader = make_request("a", 18, 20)
        leader.add_siblings(8)
        loop.scheduler.add(leader)
        loop.run()
        assert all(request.output_token_ids == expected_output(request) for request in leader.group)
        assert caching <= (loop.device.computed < 8 * 18)


def test_first_come_first_served():
    """Requests start in order of arrival, even where a later and shorter one would fit."""
    loop = Loop(make_config(num_blocks=17, watermark=0.0))
    sizes = [30, 40, 3, 3]
    requests = [make_request(f"r{i}", n, 8) for i, n in enumerate(sizes)]
    for request in requests:
        loop.scheduler.add(request)
    started = []
    while loop.scheduler.has_unfinished() or loop.pending:
        loop.step()
        started += [request for plan in loop.plans[-1:] for request in plan.admit if request not in started]
    assert started == requests


def test_preempted_runs_first_again():
    """The victim is the one that came last, and it goes before all who wait."""
    loop = Loop(make_config(num_blocks=17, max_num_seqs=2, watermark=0.0))
    first, second, third = (make_request(name, 20, 30) for name in "abc")
    for request in (first, second, third):
        loop.scheduler.add(request)
    while not loop.scheduler.num_preemptions:
        loop.step()
    assert loop.scheduler.waiting.first() is second
    loop.run()
    assert first.num_preemptions == 0
    assert [len(r.output_token_ids) for r in (first, second, third)] == [30, 30, 30]


def test_watermark_is_waived_when_idle():
    config = make_config(num_blocks=17, max_model_len=64, watermark=0.5)
    loop = Loop(config)
    request = make_request("big", 60, 4)
    loop.scheduler.add(request)
    loop.run()
    assert request.output_token_ids == expected_output(request)


def test_watermark_holds_back_admission():
    loop = Loop(make_config(num_blocks=17, watermark=0.5, max_num_seqs=4))
    for name in "abc":
        loop.scheduler.add(make_request(name, 16, 4))
    loop.step()
    assert len(loop.scheduler.running) == 2  # 4 + 4 of 16 blocks; a third would leave less than 8 free
    loop.run()


def test_prompt_that_never_fits_is_refused():
    scheduler = Scheduler(make_config())
    with pytest.raises(ValueError, match=r"64 tokens, .* at most 63"):
        scheduler.add(make_request("long", 64, 1))
    assert not scheduler.has_unfinished()


def test_chunks_mix_with_decode():
    """A long prompt enters in chunks while another sequence goes on decoding every step."""
    loop = Loop(make_config(max_num_batched_tokens=8, async_scheduling=False))
    short, long = make_request("s", 2, 30), make_request("l", 40, 2)
    loop.scheduler.add(short)
    loop.step()
    loop.scheduler.add(long)
    loop.run()
    mixed = [plan for plan in loop.plans if plan.prefill and plan.prefill[0].request is long]
    assert len(mixed) == 6 and all(plan.decode == [short] for plan in mixed)
    assert [chunk.length for plan in mixed for chunk in plan.prefill] == [7, 7, 7, 7, 7, 5]


def test_cost_does_not_grow_with_the_queue():
    """Bytecode lines executed by a step (not seconds): the same with 10, 1,000 and 100,000 waiting."""

    def lines(waiting: int) -> int:
        scheduler = Scheduler(make_config(async_scheduling=False))
        device = FakeDevice(scheduler)
        requests = [make_request(f"r{i}", 9, 9) for i in range(waiting)]
        for request in requests:
            scheduler.add(request)
        for _ in range(3):
            plan = scheduler.schedule()
            scheduler.update(plan, *device.run(plan))
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            count += event == "line"
            return trace

        gc.disable()  # a collection calls back into JAX, whose lines would count
        sys.settrace(trace)
        try:
            scheduler.abort(requests[-2])  # from the middle of the queue
            for _ in range(3):
                plan = scheduler.schedule()
                scheduler.update(plan, *device.run(plan))
        finally:
            sys.settrace(None)
            gc.enable()
        return count

    assert lines(1_000) == lines(10) == lines(100_000)


def test_preemption_in_the_middle_of_a_prompt_that_shares_blocks():
    """The victim owns blocks that another goes on using, and has computed a part of its own."""
    loop = Loop(make_config(max_num_batched_tokens=8, async_scheduling=False))
    first, second = make_request("a", 20, 8), make_request("a", 20, 8)
    second.prompt_token_ids = first.prompt_token_ids[:12] + [1] * 30
    loop.scheduler.add(first)
    for _ in range(3):
        loop.step()
    loop.scheduler.add(second)
    loop.step()
    assert len(second.chain) > 3 and second.prefilled < second.prefill_target
    shared = second.chain[:3]
    pick = loop.scheduler._pick_decode
    loop.scheduler._pick_decode = lambda plan: (loop.scheduler._preempt_last(plan), pick(plan))
    loop.step()
    loop.scheduler._pick_decode = pick
    assert second.num_preemptions == 1 and [block.locks for block in shared] == [2, 2, 2]  # it was admitted again
    loop.run()
    assert [r.output_token_ids for r in (first, second)] == [expected_output(r) for r in (first, second)]


def test_a_long_prompt_is_not_preempted_for_ever():
    """It keeps its place in the order of arrival: those who came after it cannot push it out again and again."""
    loop = Loop(make_config(num_blocks=17, max_num_seqs=4, max_num_batched_tokens=8, watermark=0.0))
    early = [make_request(f"e{i}", 3, 20) for i in range(2)]
    long = make_request("long", 40, 8)
    late = [make_request(f"l{i}", 3, 20) for i in range(30)]
    for request in (*early, long, *late):
        loop.scheduler.add(request)
    while not long.finished:
        loop.step()
    assert long.num_preemptions <= 2  # once for each of those before it, at most
    assert sum(request.finished for request in late) <= 2
    loop.run()
    assert all(r.output_token_ids == expected_output(r) for r in (*early, long, *late))
