"""Contiguous memory: the buddy allocator against its definition, and the systems that use it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.simulation import ContiguousSystem, Job
from jpaged.simulation.buddy import BuddyAllocator
from jpaged.simulation.shape import StepShape


class OneSecond:
    def seconds(self, shape: StepShape) -> float:
        return 1.0


@settings(max_examples=60, deadline=None)
@given(slots=st.integers(1, 200), steps=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 5)), max_size=60))
def test_pieces_never_overlap_and_come_back_whole(slots, steps):
    memory = BuddyAllocator(slots)
    begin = {length: set(starts) for length, starts in memory.free.items() if starts}
    held: dict[int, int] = {}
    for count, choice in steps:
        start = memory.take(count)
        if start is not None:
            held[start] = count
        if choice > 2 and held:
            victim = sorted(held)[choice % len(held)]
            memory.give_back(victim)
            del held[victim]
        owned = [start + i for start, count in held.items() for i in range(1 << (count - 1).bit_length())]
        free = [start + i for length, starts in memory.free.items() for start in starts for i in range(length)]
        assert sorted(owned + free) == list(range(slots))
        for start, count in held.items():
            length = 1 << (count - 1).bit_length()
            top = max(each for each in memory.tops if each <= start)
            assert (start - top) % length == 0
    for start in list(held):
        memory.give_back(start)
    assert {length: starts for length, starts in memory.free.items() if starts} == begin


def test_max_runs_as_many_as_fit():
    """15,728 slots hold 7 times 2,048: the paper's 7.00 batched requests."""
    jobs = [Job(0.0, 100, 50 + i) for i in range(40)]
    report = ContiguousSystem("max", 15_728, OneSecond()).run(jobs)
    assert report.peak_batch == 7 and report.finished == 40
    assert report.external >= 1 - 7 * 2048 / 15_728 - 1e-9


@pytest.mark.parametrize("reservation", ["max", "pow2", "oracle"])
def test_memory_adds_up(reservation):
    jobs = [Job(i / 3, 10 + i % 7, 1 + i % 33, outputs=1 + i % 2) for i in range(50)]
    report = ContiguousSystem(reservation, 512, OneSecond(), longest=64).run(jobs)
    assert report.token_states + report.reserved + report.internal + report.external == pytest.approx(1)
    assert (report.internal == 0) == (reservation == "oracle")
    assert report.finished == 50


def test_static_batches_wait_for_their_longest():
    jobs = [Job(0.0, 5, output) for output in (2, 10, 3, 4)]
    static = ContiguousSystem("oracle", 1024, OneSecond(), static=True, batch=2).run(jobs)
    continuous = ContiguousSystem("oracle", 1024, OneSecond(), batch=2).run(jobs)
    assert static.seconds == 10 + 4
    assert continuous.seconds == 10  # 2 + 3 + 4 beside 10


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="do not fit"):
        ContiguousSystem("max", 1024, OneSecond()).run([Job(0.0, 5, 5)])
    with pytest.raises(ValueError, match="longer than 2048"):
        ContiguousSystem("oracle", 4096, OneSecond()).run([Job(0.0, 2000, 100)])
    with pytest.raises(ValueError, match="reservation must be one of max, pow2, oracle"):
        ContiguousSystem("half", 4096, OneSecond())
