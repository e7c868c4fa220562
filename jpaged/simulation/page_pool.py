"""The block pool and block tables of a device in NumPy: the allocator's rules, for block counts without a device.

The same semantics as `jpaged/allocator.py` and `named_blocks.py`, which run on the device: a block is the null block,
free, or referenced by tables and names; running out is an error. Content is not kept, only how many tokens there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jpaged.config import EngineConfig
from jpaged.stats import BlockCounts


class PagePool:
    """Blocks, tables i32[S, M] and names of one engine, with the counts that a device makes (`state.count_blocks`)."""

    def __init__(self, config: EngineConfig) -> None:
        slots, blocks = config.max_num_seqs, config.num_blocks
        self.block_size = config.block_size
        self.free = np.arange(blocks - 1, 0, -1, dtype=np.int32)  # a stack: the first num_free are free
        self.num_free = blocks - 1
        self.table_refs = np.zeros(blocks, np.int32)
        self.name_refs = np.zeros(blocks, np.int32)
        self.tables = np.zeros((slots, config.max_blocks_per_seq), np.int32)
        self.columns = np.zeros(slots, np.int64)  # entries of each table, given up ones included
        self.first = np.zeros(slots, np.int64)  # columns given up because a window left them behind, or never had
        self.length = np.zeros(slots, np.int64)  # tokens in the cache
        self.named = np.zeros(config.num_names, np.int32)
        self.used = self.shared = self.entries = self.tokens = 0
        self.copies = 0  # blocks copied because a sequence was about to write to a shared one

    def counts(self) -> BlockCounts:
        total = len(self.table_refs) - 1
        cached = total - self.num_free - self.used
        return BlockCounts(self.used, cached, self.shared, self.num_free, self.entries, self.tokens)

    # ------------------------------------------------------------------ what a plan orders

    def name(self, slot: int, column: int, name: int) -> None:
        block = self.tables[slot, column]
        assert block and not self.named[name], "only blocks that are there get a name, and a name one block"
        self.named[name] = block
        self.name_refs[block] += 1

    def drop(self, name: int) -> None:
        block = int(self.named[name])
        assert block
        self.named[name] = 0
        self.name_refs[block] -= 1
        if not self.name_refs[block] and not self.table_refs[block]:
            self.free[self.num_free] = block
            self.num_free += 1

    def load(self, name: int) -> None:
        """A block from the host, which no sequence has yet."""
        assert not self.named[name]
        block = self._take(1)[0]
        self.named[name] = block
        self.name_refs[block] = 1

    def open_row(self, slot: int, first: int, end: int) -> None:
        """The slot will share the columns [first, end), all full; `share` says which blocks these are."""
        assert not self.columns[slot], "given to a sequence although its blocks were not released"
        self.first[slot], self.columns[slot] = first, end
        self.length[slot] = end * self.block_size
        self.entries += end - first

    def share(self, slot: int, column: int, name: int) -> None:
        block = self.named[name]
        assert block, "shared by a name that means nothing"
        self.tables[slot, column] = block
        owners = self.table_refs[block] = self.table_refs[block] + 1
        if owners == 1:
            self.used += 1
            self.tokens += self.block_size
        self.shared += owners == 2

    def fork(self, slot: int, parent: int) -> None:
        assert not self.columns[slot] and self.length[parent]
        for each in (self.tables, self.columns, self.first, self.length):
            each[slot] = each[parent]
        blocks = self.tables[slot, self.first[slot] : self.columns[slot]]
        self.entries += len(blocks)
        self.table_refs[blocks] += 1
        self.shared += int((self.table_refs[blocks] == 2).sum())

    def reorder(self, slots: np.ndarray, sources: np.ndarray) -> None:
        """Each of `slots` i64[R], all different, becomes what its source was, whose blocks it shares: beams that change
        places."""
        moved = slots != sources
        slots, sources = slots[moved], sources[moved]
        if not len(slots):
            return
        taken, _ = self._entries(sources)
        left, filled = self._entries(slots)
        blocks, at = np.unique(np.concatenate([taken, left]), return_inverse=True)
        come, go = (np.bincount(each, minlength=len(blocks)) for each in (at[: len(taken)], at[len(taken) :]))
        before = self.table_refs[blocks]
        after = self.table_refs[blocks] = before + come - go
        assert (after >= 0).all()
        self.entries += len(taken) - len(left)
        self.shared += int((after > 1).sum()) - int((before > 1).sum())
        gone = after == 0
        self.used -= int(gone.sum())
        tokens = np.zeros(len(blocks), np.int64)
        tokens[at[len(taken) :]] = filled  # as many wherever a block stands
        self.tokens -= int(tokens[gone].sum())
        for each in (self.tables, self.columns, self.first, self.length):
            each[slots] = each[sources]
        self._free_unowned(blocks[gone])

    def slide(self, slot: int, first: int) -> None:
        """Give up the columns before `first`, as far as there are any."""
        first = min(first, int(self.columns[slot]))
        if first > self.first[slot]:
            self._let_go(slot, int(self.first[slot]), first)
            self.first[slot] = first

    def release(self, slot: int) -> None:
        self._let_go(slot, int(self.first[slot]), int(self.columns[slot]))
        self.tables[slot, : self.columns[slot]] = 0
        self.columns[slot] = self.first[slot] = self.length[slot] = 0

    def write(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Append `tokens` i64[R] to the rows of `slots` i64[R], all different, that have the blocks (`make_room`)."""
        self.length[slots] += tokens
        self.tokens += int(tokens.sum())

    def make_room(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Blocks of their own for `tokens` i64[R] more in each of `slots` i64[R], all different."""
        self._part(slots[tokens > 0])
        missing = -(-(self.length[slots] + tokens) // self.block_size) - self.columns[slots]
        needs = missing > 0
        slots, missing = slots[needs], missing[needs]
        total = int(missing.sum())
        if not total:
            return
        blocks = self._take(total)
        rows = np.repeat(slots, missing)
        ends = np.cumsum(missing)
        columns = np.arange(total) - np.repeat(ends - missing, missing) + np.repeat(self.columns[slots], missing)
        self.tables[rows, columns] = blocks
        self.columns[slots] += missing
        self.table_refs[blocks] = 1
        self.used += total
        self.entries += total

    # ------------------------------------------------------------------ the parts

    def _part(self, slots: np.ndarray) -> None:
        """Copy on write: where all owners of a block are about to write, the first of them keeps it."""
        if not self.shared:
            return
        slots = slots[self.length[slots] % self.block_size > 0]
        blocks = self.tables[slots, self.length[slots] // self.block_size]
        several = self.table_refs[blocks] > 1
        if not several.any():
            return
        order = np.argsort(slots[several])
        slots, blocks = slots[several][order], blocks[several][order]
        distinct, first, writers = np.unique(blocks, return_index=True, return_counts=True)
        copies = np.ones(len(blocks), bool)
        copies[first[writers == self.table_refs[distinct]]] = False
        slots, blocks = slots[copies], blocks[copies]
        own = self._take(len(slots))
        self.tables[slots, self.length[slots] // self.block_size] = own
        self.table_refs[own] = 1
        self.used += len(own)
        self.tokens += int((self.length[slots] % self.block_size).sum())
        for block in blocks.tolist():
            self.table_refs[block] -= 1
            self.shared -= self.table_refs[block] == 1
        self.copies += len(own)

    def _entries(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(blocks of the tables of `slots`, tokens in each)."""
        column = np.arange(int(self.columns[slots].max()))
        live = (column >= self.first[slots, None]) & (column < self.columns[slots, None])
        filled = np.minimum(self.length[slots, None] - column * self.block_size, self.block_size)
        return self.tables[slots, : len(column)][live], filled[live]

    def _let_go(self, slot: int, first: int, end: int) -> None:
        """The slot's references in columns [first, end) go."""
        blocks = self.tables[slot, first:end]
        self.table_refs[blocks] -= 1
        refs = self.table_refs[blocks]
        assert (refs >= 0).all()
        filled = np.minimum(self.length[slot] - np.arange(first, end) * self.block_size, self.block_size)
        gone = refs == 0
        self.used -= int(gone.sum())
        self.tokens -= int(filled[gone].sum())
        self.shared -= int((refs == 1).sum())
        self.entries -= end - first
        self._free_unowned(blocks)

    def _take(self, count: int) -> np.ndarray:
        if count > self.num_free:
            raise RuntimeError(
                f"{count} blocks are wanted and {self.num_free} are free, although the scheduler counts every block "
                "before it admits: a bug in jpaged"
            )
        self.num_free -= count
        return self.free[self.num_free : self.num_free + count][::-1].copy()

    def _free_unowned(self, blocks: Sequence[int] | np.ndarray) -> None:
        blocks = np.asarray(blocks)
        blocks = blocks[(self.table_refs[blocks] == 0) & (self.name_refs[blocks] == 0)]
        self.free[self.num_free : self.num_free + len(blocks)] = blocks
        self.num_free += len(blocks)
