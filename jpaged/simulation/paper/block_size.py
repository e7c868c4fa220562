"""Fig. 18b: latency by block size. Memory is simulated; how much slower the kernel is with small blocks is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jpaged.simulation.paper.cores import map_cores
from jpaged.simulation.paper.setting import draw, paper_cost, serve

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Requests a second that a block size of 16 just sustains.
RATES = {"sharegpt": 2.0, "alpaca": 30.0}
SECONDS = {"sharegpt": 300.0, "alpaca": 60.0}
PAPER = {"sharegpt": (16, 128), "alpaca": (16, 32)}  # section 7.2: the block sizes that do best


def latencies(slowdown: Mapping[int, float]) -> list[dict[str, Any]]:
    """A row for each workload and block size, with the kernel as fast for all and with `slowdown` by block size."""
    cases = [(name, size, factor) for name in RATES for size in BLOCK_SIZES for factor in (1.0, slowdown[size])]
    results = iter(map_cores(_latency, cases))
    return [
        {
            "lengths": name,
            "block size": size,
            "rate": RATES[name],
            "memory only": next(results),
            "latency": next(results),
        }
        for name in RATES
        for size in BLOCK_SIZES
    ]


def _latency(name: str, size: int, slowdown: float) -> float:
    cost = paper_cost(attention_slowdown=slowdown)
    return serve("jpaged", draw(name, RATES[name], SECONDS[name]), block_size=size, cost=cost).normalized_latency
