"""Working ahead: order, errors and how many results there are at a time."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jpaged_models.ahead import map_ahead


@given(st.lists(st.integers(), max_size=20), st.integers(1, 5))
def test_results_come_in_order(items: list[int], threads: int) -> None:
    assert list(map_ahead(lambda item: item * 2, items, threads)) == [item * 2 for item in items]


@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_than_threads_results_wait(threads: int) -> None:
    started: list[int] = []
    results = map_ahead(lambda item: started.append(item) or item, range(20), threads)  # type: ignore[func-returns-value]
    for given_out, _ in enumerate(results):
        # The one given out, and as many as there are threads.
        assert len(started) <= given_out + 1 + threads


def test_items_are_worked_on_at_the_same_time() -> None:
    met = threading.Barrier(2, timeout=20)
    assert len([*map_ahead(lambda _: met.wait(), range(4), 2)]) == 4


def test_an_error_is_raised_in_its_place_and_nothing_goes_on() -> None:
    done = []

    def divide(item: int) -> float:
        done.append(item)
        return 1 / item

    results = map_ahead(divide, [2, 0, *range(1, 100)], 2)
    assert next(results) == 0.5
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert len(done) < 10
