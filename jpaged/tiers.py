"""Blocks of the KV cache that are not on the device: kept in host memory, by content. Plain Python and NumPy.

A block has the key that the prefix index knows it by (see prefix_index.py), so whoever asks for the same beginning
finds it, on the device, here, or not at all. Two budgets, both in whole blocks:

    swap    blocks of preempted requests, from the moment of the preemption: the room is theirs although a block may
            still be on the device, and never need the journey
    cache   blocks that the device evicted and nobody waits for; the longest unused goes first

The content of a block arrives some time after its place was taken (`data` is None until then): the copy from the device
is under way, and nobody waits for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True, eq=False)
class StoredBlock:
    """A block on the host. data: u8[block_bytes], None while it is on its way."""

    key: bytes
    data: np.ndarray | None = None


class HostStore:
    """Blocks in host memory. Cost of each operation: constant for each block."""

    def __init__(self, block_bytes: int, swap_bytes: int = 0, cache_bytes: int = 0) -> None:
        self.block_bytes = block_bytes
        self.swap_blocks = swap_bytes // block_bytes
        self.cache_blocks = cache_bytes // block_bytes
        self.blocks: dict[bytes, StoredBlock] = {}
        self.holds: dict[bytes, int] = {}  # key -> preempted requests that come back to it
        self.unheld: OrderedDict[bytes, StoredBlock] = OrderedDict()  # of the blocks, the longest unused first

    @property
    def in_use(self) -> bool:
        """Whether there is room for anything."""
        return self.swap_blocks > 0 or self.cache_blocks > 0

    def hold(self, keys: Sequence[bytes]) -> int:
        """Keep room for the blocks a preempted request comes back to. Returns how many, from the first on, have it."""
        for count, key in enumerate(keys):
            if key not in self.holds:
                if len(self.holds) >= self.swap_blocks:
                    return count
                self.unheld.pop(key, None)
            self.holds[key] = self.holds.get(key, 0) + 1
        return len(keys)

    def let_go(self, keys: Sequence[bytes]) -> None:
        """Undo a `hold`: the request runs again or has ended. The blocks stay as far as the cache's budget goes."""
        for key in reversed(keys):  # a beginning is of more use than what follows it
            self.holds[key] -= 1
            if not self.holds[key]:
                del self.holds[key]
                if key in self.blocks:
                    self.unheld[key] = self.blocks[key]
        self._shrink()

    def put(self, key: bytes) -> StoredBlock | None:
        """The device gives up a block. Returns its place, to be filled (`arrive`); None if it is here or not wanted."""
        if key in self.unheld:
            self.unheld.move_to_end(key)
        if key in self.blocks or not (key in self.holds or self.cache_blocks):
            return None
        block = self.blocks[key] = StoredBlock(key)
        if key not in self.holds:
            self.unheld[key] = block
            self._shrink()
        return block

    def arrive(self, block: StoredBlock, data: np.ndarray) -> None:
        """The content of a block is here, u8[block_bytes], nobody else's."""
        block.data = data
        self._shrink()

    def match(self, keys: Sequence[bytes]) -> int:
        """How many blocks of the beginning of `keys` are here."""
        return next((count for count, key in enumerate(keys) if key not in self.blocks), len(keys))

    def fetch(self, keys: Sequence[bytes]) -> list[StoredBlock]:
        """The blocks of the longest beginning of `keys` that is here."""
        found = [self.blocks[key] for key in keys[: self.match(keys)]]
        for block in reversed(found):
            if block.key in self.unheld:
                self.unheld.move_to_end(block.key)
        return found

    def clear(self) -> None:
        """Forget all blocks; the room that preempted requests have stays theirs."""
        self.blocks.clear()
        self.unheld.clear()

    def _shrink(self) -> None:
        """Keep the cache within its budget, but for blocks on their way."""
        while len(self.unheld) > self.cache_blocks:
            oldest = next((block for block in self.unheld.values() if block.data is not None), None)
            if oldest is None:
                return
            del self.unheld[oldest.key], self.blocks[oldest.key]
