"""Blocks that a sliding window has left behind, given back while their sequence runs. Imports no JAX.

Only where every layer has a window: a block stays as long as any layer may read it. The token at position p sees those
from p - window + 1 on, so of a sequence with n tokens in the cache nothing before n - window + 1 is read again.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jpaged.config import EngineConfig
from jpaged.prefix_index import PrefixIndex
from jpaged.request import Request
from jpaged.schedule import Schedule
from jpaged.slots import SlotCounts


def first_column(tokens: int, window: int | None, block_size: int) -> int:
    """The first block that is still read when a sequence has `tokens` in the cache."""
    return 0 if window is None else max(tokens - window + 1, 0) // block_size


class Sliding:
    """Orders to give up blocks, beside the index and the counts that know them."""

    def __init__(self, config: EngineConfig, index: PrefixIndex, counts: SlotCounts) -> None:
        self.window = config.window
        self.block_size = config.block_size
        self.index = index
        self.counts = counts

    def slide(self, plan: Schedule, running: dict[int, Request], prefilling: Iterable[Request]) -> None:
        """Let sequences give up what they certainly read no more: by what is known of how far they are.

        Beams keep all their blocks: they change places on the device.
        """
        if self.window is None:
            return
        slots = np.flatnonzero(self.counts.decoding)
        first = np.maximum(self.counts.kv_known[slots] - self.window + 1, 0) // self.block_size
        moved = first > self.counts.elsewhere[slots]
        for slot, column in zip(slots[moved].tolist(), first[moved].tolist(), strict=True):
            self._give_up(plan, running[slot], column)
        for request in prefilling:
            self._give_up(plan, request, first_column(request.prefilled, self.window, self.block_size))

    def _give_up(self, plan: Schedule, request: Request, column: int) -> None:
        """The columns before `column` go, unless they went before."""
        if column <= request.slid or request.beams is not None:
            return
        named = request.chain[request.slid : column]
        own = sum(request.slid + i not in request.foreign for i in range(len(named)))
        self.index.unlock(named, request.priority, request.admitted)
        self.counts.slide(request.slot, column - request.slid, own)
        request.slid = column
        plan.slide.append((request.slot, column, 0))
