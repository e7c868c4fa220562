"""What a cost model is told of a step: counts of work, no content. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jpaged.config import EngineConfig, pick_bucket
from jpaged.schedule import Schedule


@dataclass(slots=True)
class StepShape:
    """The work of one dispatched step, or of one iteration of a system that is not ours."""

    mixed: bool  # whether it computes prompts
    iterations: int  # times the weights are read
    rows: int  # sequences that decode
    decoded: int  # tokens that decoding sequences computed, over all iterations
    prefill: int  # tokens of prompts
    chunks: int  # prompts, or parts of them
    sampled: int  # tokens drawn
    context: int  # tokens in the cache that decoding rows read, summed over rows and iterations
    attended: int  # likewise for every token of a prompt
    size: int = 0  # rows or tokens that the program was compiled for
    copied: int = 0  # blocks copied on write
    moved: int = 0  # blocks copied to the host and back
    block_size: int = 0  # tokens of one of them
    requests: int = 0  # that rows and chunks belong to; several outputs of a prompt are one

    @property
    def tokens(self) -> int:
        return self.decoded + self.prefill


def measure_step(
    plan: Schedule, config: EngineConfig, counts: np.ndarray, lengths: np.ndarray, iterations: int
) -> StepShape:
    """The shape of a step that ran.

    counts   i64[D]: tokens that each decoding row computed
    lengths  i64[D]: tokens that each had in the cache before
    """
    if plan.prefill:
        size = pick_bucket(config.token_buckets, plan.size)
    else:
        size = pick_bucket(config.decode_buckets, max(len(plan.decode), 1))
    prefill = sum(chunk.length for chunk in plan.prefill)
    drawn = sum(chunk.last for chunk in plan.prefill)
    return StepShape(
        mixed=bool(plan.prefill),
        iterations=max(iterations, 1),
        rows=len(plan.decode),
        decoded=int(counts.sum()),
        prefill=prefill,
        chunks=len(plan.prefill),
        sampled=int(counts.sum()) + drawn,
        context=int((counts * lengths + counts * (counts + 1) // 2).sum()),
        attended=sum(chunk.length * chunk.start + chunk.length * (chunk.length + 1) // 2 for chunk in plan.prefill),
        size=size,
        moved=len(plan.save) + len(plan.load),
        block_size=config.block_size,
        requests=len({each.request_id for each in [*plan.decode, *(chunk.request for chunk in plan.prefill)]}),
    )
