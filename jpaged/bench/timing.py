"""Wall time, measured in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def seconds(run: Callable[..., Any], *arguments: Any) -> float:
    """Wall time of one call whose result is waited for."""
    start = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return time.perf_counter() - start


def median_of_turns(measures: Mapping[str, Callable[[], float]], turns: int) -> dict[str, float]:
    """Median of what each measures, in turns, so that a slow moment hits all alike."""
    times = [{name: measure() for name, measure in measures.items()} for _ in range(turns)]
    return {name: statistics.median(each[name] for each in times) for name in measures}
