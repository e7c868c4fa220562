"""Finding stop strings in text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Stop(NamedTuple):
    """The stop string found, and where in the text it lies."""

    string: str
    start: int
    end: int


def find_stop(text: str, new_from: int, stops: Sequence[str]) -> Stop | None:
    """The stop that is complete first among those that end behind `new_from`; of several that end together the longest.

    text[:new_from] has been searched before, or may not end a stop (min_tokens).
    """
    found = None
    for stop in stops:
        start = text.find(stop, max(new_from - len(stop) + 1, 0))
        if start >= 0:
            candidate = Stop(stop, start, start + len(stop))
            if found is None or (candidate.end, candidate.start) < (found.end, found.start):
                found = candidate
    return found


def count_held(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` with which some stop string begins: the most, so that none is shown too early."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
