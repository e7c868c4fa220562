"""The allocator's operations behind one traceable function, and a naive model that foresees their results.

An operation names blocks by where they are found (a table entry, a cache slot, the free stack), never by
physical id, so the model needs no ids to know what will happen.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import allocator
from jpaged.allocator import BlockPool, BlockTables
from jpaged.audit import audit

ROWS, COLUMNS, BLOCKS, SIZE, SLOTS, MAX_NEW = 10, 5, 30, 4, 6, 3
GROW, RELEASE, SHARE, FORK, WRITE, HOLD, DROP = range(7)
# Places where a block id can be read: table entries, cache slots, the free stack, and constants.
SLOT_AT = ROWS * COLUMNS
FREE_AT = SLOT_AT + SLOTS
NONE = FREE_AT + BLOCKS  # reads 0
BAD = (NONE + 1, NONE + 2, NONE + 3, NONE + 4)  # read -1, BLOCKS, 2**31 - 1, -2**31


class Op(NamedTuple):
    code: int
    rows: np.ndarray  # i32[ROWS]: new lengths, parents, counts of blocks to share, or a mask
    places: np.ndarray  # i32[ROWS * COLUMNS]: blocks to share; hold and drop use the first SLOTS
    mask: np.ndarray  # bool[ROWS]: rows to share to


class Device(NamedTuple):
    pool: BlockPool
    tables: BlockTables
    slots: jax.Array  # i32[SLOTS] ids that the cache holds, 0 = none
    holds: jax.Array  # i32[BLOCKS]


class Seen(NamedTuple):
    device: Device
    ok: jax.Array
    changed: jax.Array  # whether any bit of pool or tables did
    copies: jax.Array  # i32[2, ROWS] src and dst
    violations: jax.Array


def start() -> Device:
    zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
    return Device(allocator.init_pool(BLOCKS), allocator.init_tables(ROWS, COLUMNS), zeros(SLOTS), zeros(BLOCKS))


def apply(device: Device, op: Op) -> tuple[Device, Seen]:
    """One operation on the device, then the audit. Traceable."""
    pool, tables, slots, holds = device
    constants = jnp.array([0, -1, BLOCKS, 2**31 - 1, -(2**31)], jnp.int32)
    free = jnp.where(jnp.arange(BLOCKS) < pool.num_free, pool.free, -1)
    ids = jnp.concatenate([tables.blocks.reshape(-1), slots, free, constants])[op.places]
    cache_ids, picked = ids[:SLOTS], op.places[:SLOTS] != NONE
    no_copies, yes, mask = jnp.zeros((2, ROWS), jnp.int32), jnp.asarray(True), op.rows != 0

    def do_grow():
        new_pool, new_tables, ok = allocator.grow(pool, tables, op.rows, block_size=SIZE, max_new_blocks=MAX_NEW)
        return Device(new_pool, new_tables, slots, holds), ok, no_copies

    def do_release():
        return Device(*allocator.release(pool, tables, mask, block_size=SIZE), slots, holds), yes, no_copies

    def do_share():
        rows, columns = np.divmod(np.arange(ROWS * COLUMNS, dtype=np.int32), COLUMNS)
        rows = jnp.where(op.mask[rows] & (columns < op.rows[rows]), rows, ROWS)
        opened, open_ok = allocator.open_rows(tables, rows, columns, block_size=SIZE)
        new_pool, new_tables, ok = allocator.share(pool, opened, rows, columns, ids[: ROWS * COLUMNS], block_size=SIZE)
        ok = ok & open_ok
        new = Device(new_pool, new_tables, slots, holds)
        # Both or neither, as in a step, whose result is thrown away where one of its parts fails.
        return jax.tree.map(lambda now, old: jnp.where(ok, now, old), new, device), ok, no_copies

    def do_fork():
        new_pool, new_tables, ok = allocator.fork(pool, tables, op.rows, block_size=SIZE)
        return Device(new_pool, new_tables, slots, holds), ok, no_copies

    def do_write():
        new_pool, new_tables, src, dst, ok = allocator.copy_on_write(pool, tables, mask, block_size=SIZE)
        return Device(new_pool, new_tables, slots, holds), ok, jnp.stack([src, dst])

    def do_hold():
        new_pool, ok = allocator.hold(pool, cache_ids)
        new_slots = jnp.where(picked & ok, cache_ids, slots)
        new_holds = holds.at[jnp.where(picked & ok, cache_ids, BLOCKS)].add(1, mode="drop")
        return Device(new_pool, tables, new_slots, new_holds), ok, no_copies

    def do_drop():
        new_pool, ok = allocator.drop(pool, cache_ids)
        new_holds = holds.at[jnp.where(picked & ok, cache_ids, BLOCKS)].add(-1, mode="drop")
        return Device(new_pool, tables, jnp.where(picked & ok, 0, slots), new_holds), ok, no_copies

    branches = (do_grow, do_release, do_share, do_fork, do_write, do_hold, do_drop)
    new, ok, copies = jax.lax.switch(op.code, branches)
    writing = mask & (op.code == WRITE) & ok
    violations = audit(new.pool, new.tables, new.holds, block_size=SIZE, writing=writing)
    pairs = zip(jax.tree.leaves(device[:2]), jax.tree.leaves(new[:2]), strict=True)
    changed = jnp.any(jnp.stack([jnp.any(old != now) for old, now in pairs]))
    return new, Seen(new, ok, changed, copies, violations)


apply_one = jax.jit(apply)
apply_many = jax.jit(lambda device, ops: jax.lax.scan(apply, device, ops))


def needed(length: int) -> int:
    return len(range(0, length, SIZE))


class Model:
    """Who owns what, in plain Python. Blocks are numbered as they are made; a number is never used again."""

    def __init__(self) -> None:
        self.made = 0
        self.rows: list[list[int]] = [[] for _ in range(ROWS)]
        self.length = [0] * ROWS
        self.slots: list[int | None] = [None] * SLOTS

    def copy(self) -> Model:
        other = Model()
        other.rows = [list(row) for row in self.rows]
        other.length, other.slots = list(self.length), list(self.slots)
        return other

    def owners(self, block: int) -> int:
        return sum(row.count(block) for row in self.rows) + self.slots.count(block)

    def free(self) -> int:
        return BLOCKS - 1 - len({b for row in self.rows for b in row} | {b for b in self.slots if b is not None})

    def new_block(self) -> int:
        self.made += 1
        return self.made

    def at(self, place: int) -> int | None:
        """The live block at a place; None where there is none (free, null, or out of range)."""
        if place < SLOT_AT:
            row, column = divmod(place, COLUMNS)
            return self.rows[row][column] if column < len(self.rows[row]) else None
        return self.slots[place - SLOT_AT] if place < FREE_AT else None

    def step(self, op: Op) -> bool:
        """Do `op` if it can be done in full; returns whether."""
        run = (self.grow, self.release, self.share, self.fork, self.write, self.hold, self.drop)[op.code]
        return run(op)

    def grow(self, op: Op) -> bool:
        gains = []
        for row, old, length in zip(self.rows, self.length, op.rows.tolist(), strict=True):
            if length < old or needed(length) > COLUMNS:
                return False
            gains.append(needed(length) - len(row))
        if max(gains) > MAX_NEW or sum(gains) > self.free():
            return False
        for row, gain in zip(self.rows, gains, strict=True):
            row += [self.new_block() for _ in range(gain)]
        self.length = op.rows.tolist()
        return True

    def release(self, op: Op) -> bool:
        for s in np.flatnonzero(op.rows):
            self.rows[s], self.length[s] = [], 0
        return True

    def share(self, op: Op) -> bool:
        taken = {}
        for s in np.flatnonzero(op.mask):
            count = int(op.rows[s])
            blocks = [self.at(place) for place in op.places.reshape(ROWS, COLUMNS)[s, :count]]
            if blocks and (self.rows[s] or None in blocks or len(set(blocks)) != len(blocks)):
                return False
            taken[s] = blocks
        for s, blocks in taken.items():
            if blocks:
                self.rows[s], self.length[s] = blocks, len(blocks) * SIZE
        return True

    def fork(self, op: Op) -> bool:
        for s, parent in enumerate(op.rows.tolist()):
            if parent != -1 and (not 0 <= parent < ROWS or not self.rows[parent] or self.rows[s]):
                return False
        for s, parent in enumerate(op.rows.tolist()):
            if parent != -1:
                self.rows[s], self.length[s] = list(self.rows[parent]), self.length[parent]
        return True

    def write(self, op: Op) -> bool:
        before = [list(row) for row in self.rows]
        budget = self.free()
        # From the last row to the first: who comes when nobody else owns the block any more keeps it.
        for s in reversed(np.flatnonzero(op.rows)):
            if self.length[s] % SIZE and self.owners(self.rows[s][-1]) > 1:
                self.rows[s][-1] = self.new_block()
                budget -= 1
        if budget < 0:
            self.rows = before
        return budget >= 0

    def hold(self, op: Op) -> bool:
        picked = {h: self.at(place) for h, place in enumerate(op.places[:SLOTS]) if place != NONE}
        if None in picked.values():
            return False
        for h, block in picked.items():
            self.slots[h] = block
        return True

    def drop(self, op: Op) -> bool:
        picked = [self.at(place) for place in op.places[:SLOTS] if place != NONE]
        if any(block is None or picked.count(block) > self.owners(block) for block in picked):
            return False
        for h, place in enumerate(op.places[:SLOTS]):
            if place != NONE:
                self.slots[h] = None
        return True


def make_op(code: int, *, rows: object = 0, places: dict[int, int] | None = None, mask: np.ndarray | None = None) -> Op:
    full = np.full(SLOT_AT, NONE, np.int32)
    for at, place in (places or {}).items():
        full[at] = place
    rows = np.broadcast_to(np.asarray(rows, np.int32), ROWS).copy()
    return Op(np.int32(code), rows, full, np.zeros(ROWS, bool) if mask is None else mask)
