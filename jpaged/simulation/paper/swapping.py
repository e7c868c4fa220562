"""Fig. 19: swapping a preempted sequence's blocks to the host and back, against computing them again. Simulated.

Copies go over PCIe 4.0 at 25 GB/s, as vLLM of the paper copied: one transfer for each block, layer and of keys and
values. TRANSFER is what each of these takes besides its bytes; the paper does not tell it, and it is this that makes
small blocks slow.
"""

from __future__ import annotations

from typing import Any

from jpaged.simulation.costs import Roofline
from jpaged.simulation.paper.cores import map_cores
from jpaged.simulation.paper.setting import draw, paper_cost, serve
from jpaged.simulation.shape import StepShape

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TRANSFER = 5e-6  # s
TOKENS = 256  # of a sequence that makes way
RATE, SECONDS = 2.3, 200.0  # ShareGPT requests that find too little memory


def overheads() -> list[dict[str, Any]]:
    """Milliseconds to bring TOKENS tokens out, back, and to compute them again; and latencies under preemption."""
    cost = swap_cost()
    recompute = StepShape(True, 1, 0, 0, TOKENS, 1, 1, 0, TOKENS * (TOKENS + 1) // 2)
    cases = [(size, mode) for size in BLOCK_SIZES for mode in ("swap", "recompute")]
    results = iter(map_cores(_serve, cases))
    rows = []
    for size in BLOCK_SIZES:
        (swapped, preempted), (computed, _) = next(results), next(results)
        rows.append(
            {
                "block size": size,
                "one way ms": 1e3 * (TOKENS // size) * _copy_seconds(size),
                "compute ms": 1e3 * (cost.seconds(recompute) - cost.step_seconds - cost.row_seconds),
                "latency, swap": swapped,
                "latency, recompute": computed,
                "preemptions": preempted,
            }
        )
    return rows


def swap_cost() -> Roofline:
    """The paper's server with the cost of transfers: 80 for a block of OPT-13B, keys and values of 40 layers."""
    base = paper_cost()
    return paper_cost(transfer_seconds=2 * base.model.layers * TRANSFER)


def _copy_seconds(size: int) -> float:
    cost = swap_cost()
    return size * cost.model.kv_bytes / cost.host_bandwidth + cost.transfer_seconds


def _serve(size: int, mode: str) -> tuple[float, int]:
    jobs = draw("sharegpt", RATE, SECONDS)
    report = serve("jpaged", jobs, block_size=size, preemption=mode, cost=swap_cost())
    return report.normalized_latency, report.preemptions
