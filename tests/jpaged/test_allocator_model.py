"""The allocator against a naive model: Python lists and sets that know nothing of stacks or counts.

Operations name blocks by where they are found (a table entry, a cache slot, the free stack), never by
physical id, so the model foresees every result and learns the ids from the device, one operation late, like
the engine's host side. Two drivers share the model: a seeded stream of 100,000 operations, run by `lax.scan`,
and a hypothesis state machine, which shrinks what it finds. Checked after every operation: `audit`, tables,
counts, `ok`, that nothing changed where it is False, and that every row reads its own tokens back from pages
that are really written and copied.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from jpaged.allocator import (
    BlockPool,
    BlockTables,
    copy_on_write,
    drop,
    fork,
    grow,
    hold,
    init_pool,
    init_tables,
    release,
    share,
)
from jpaged.audit import INVARIANTS, audit

ROWS, COLUMNS, BLOCKS, SIZE, SLOTS, MAX_NEW = 10, 5, 30, 4, 6, 3
GROW, RELEASE, SHARE, FORK, WRITE, HOLD, DROP = range(7)
# Places where a block id can be read: table entries, cache slots, the free stack, and constants.
SLOT_AT = ROWS * COLUMNS
FREE_AT = SLOT_AT + SLOTS
NONE = FREE_AT + BLOCKS  # reads 0
BAD = (NONE + 1, NONE + 2, NONE + 3, NONE + 4)  # read -1, BLOCKS, 2**31 - 1, -2**31


class Op(NamedTuple):
    code: int
    rows: np.ndarray  # i32[ROWS]: new lengths, parents, or a mask
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
    return Device(init_pool(BLOCKS), init_tables(ROWS, COLUMNS), zeros(SLOTS), zeros(BLOCKS))


def apply(device: Device, op: Op) -> tuple[Device, Seen]:
    """One operation on the device, then the audit. Traceable."""
    pool, tables, slots, holds = device
    constants = jnp.array([0, -1, BLOCKS, 2**31 - 1, -(2**31)], jnp.int32)
    free = jnp.where(jnp.arange(BLOCKS) < pool.num_free, pool.free, -1)
    ids = jnp.concatenate([tables.blocks.reshape(-1), slots, free, constants])[op.places]
    cache_ids, picked = ids[:SLOTS], op.places[:SLOTS] != NONE
    no_copies, yes, mask = jnp.zeros((2, ROWS), jnp.int32), jnp.asarray(True), op.rows != 0

    def do_grow():
        new_pool, new_tables, ok = grow(pool, tables, op.rows, block_size=SIZE, max_new_blocks=MAX_NEW)
        return Device(new_pool, new_tables, slots, holds), ok, no_copies

    def do_release():
        return Device(*release(pool, tables, mask, block_size=SIZE), slots, holds), yes, no_copies

    def do_share():
        blocks = ids.reshape(ROWS, COLUMNS)
        new_pool, new_tables, ok = share(pool, tables, op.mask, blocks, op.rows, block_size=SIZE)
        return Device(new_pool, new_tables, slots, holds), ok, no_copies

    def do_fork():
        new_pool, new_tables, ok = fork(pool, tables, op.rows, block_size=SIZE)
        return Device(new_pool, new_tables, slots, holds), ok, no_copies

    def do_write():
        new_pool, new_tables, src, dst, ok = copy_on_write(pool, tables, mask, block_size=SIZE)
        return Device(new_pool, new_tables, slots, holds), ok, jnp.stack([src, dst])

    def do_hold():
        new_pool, ok = hold(pool, cache_ids)
        new_slots = jnp.where(picked & ok, cache_ids, slots)
        new_holds = holds.at[jnp.where(picked & ok, cache_ids, BLOCKS)].add(1, mode="drop")
        return Device(new_pool, tables, new_slots, new_holds), ok, no_copies

    def do_drop():
        new_pool, ok = drop(pool, cache_ids)
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
        return (
            BLOCKS - 1 - len({b for row in self.rows for b in row} | {b for b in self.slots if b is not None})
        )

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
            length = int(op.rows[s])
            if self.rows[s] or not 0 <= length <= COLUMNS * SIZE:
                return False
            blocks = [self.at(place) for place in op.places.reshape(ROWS, COLUMNS)[s, : needed(length)]]
            if None in blocks or len(set(blocks)) != len(blocks):
                return False
            taken[s] = blocks
        for s, blocks in taken.items():
            self.rows[s], self.length[s] = blocks, int(op.rows[s])
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


class Mirror:
    """The model beside the device: learns physical ids, writes pages like an engine would, compares."""

    def __init__(self) -> None:
        self.physical: dict[int, int] = {}
        self.pages = np.zeros((BLOCKS, SIZE), np.int64)
        self.tokens = np.full(
            (ROWS, COLUMNS * SIZE), -1
        )  # what each row has written or inherited; -1 past it
        self.stamp = 0
        self.count = np.zeros((7, 2), int)  # operations by code, refused and done

    def compare(self, op: Op, ok: bool, model: Model, seen: Seen) -> None:
        """Check what the device did with `op`, which left `model` as it is and gave `ok`."""
        pool, tables, slots, _ = seen.device
        self.count[op.code, int(ok)] += 1
        assert bool(seen.ok) == ok
        assert not seen.violations.any(), dict(zip(INVARIANTS, seen.violations.tolist(), strict=True))
        assert ok or not seen.changed
        assert int(pool.num_free) == model.free()
        assert tables.length.tolist() == model.length

        live: dict[int, int] = {}
        for blocks, found in zip(model.rows, tables.blocks.tolist(), strict=True):
            for block, physical in zip(blocks, found, strict=False):
                assert live.setdefault(block, physical) == physical
        for block, physical in zip(model.slots, slots.tolist(), strict=True):
            assert physical == 0 if block is None else live.setdefault(block, physical) == physical
        assert len(set(live.values())) == len(live)  # two blocks of the model are never one on the device
        for block, physical in live.items():
            assert self.physical.get(block, physical) == physical  # and a block never moves
        self.physical = live
        if ok:
            self.read_back(op, np.asarray(tables.blocks), np.asarray(tables.length), np.asarray(seen.copies))

    def read_back(self, op: Op, table: np.ndarray, length: np.ndarray, copies: np.ndarray) -> None:
        """Write what a sequence would write now; then every row must find its own tokens in its blocks."""
        position = np.arange(COLUMNS * SIZE)
        inside = position < length[:, None]
        slot = table[:, position // SIZE], np.broadcast_to(position % SIZE, inside.shape)
        if op.code == WRITE:
            self.pages[copies[1]] = self.pages[copies[0]]
        elif op.code == FORK:
            self.tokens = np.where((op.rows != -1)[:, None], self.tokens[op.rows], self.tokens)
        elif op.code == SHARE:  # a prefix hit: what others wrote is taken as it is
            self.tokens = np.where(op.mask[:, None], self.pages[slot], self.tokens)
        elif op.code == GROW:
            new = inside & (self.tokens == -1)
            self.tokens[new] = self.stamp + np.arange(1, new.sum() + 1)
            self.stamp += int(new.sum())
            self.pages[slot[0][new], slot[1][new]] = self.tokens[new]
        self.tokens[~inside] = -1
        np.testing.assert_array_equal(np.where(inside, self.pages[slot], -1), self.tokens)


def make_op(
    code: int, *, rows: object = 0, places: dict[int, int] | None = None, mask: np.ndarray | None = None
) -> Op:
    full = np.full(SLOT_AT, NONE, np.int32)
    for at, place in (places or {}).items():
        full[at] = place
    rows = np.broadcast_to(np.asarray(rows, np.int32), ROWS).copy()
    return Op(np.int32(code), rows, full, np.zeros(ROWS, bool) if mask is None else mask)


def pick_op(model: Model, code: int, rng: np.random.Generator) -> Op:
    """A random operation that mostly makes sense for the model's state, and sometimes none at all."""
    odd = rng.random() < 0.05  # ask for something invalid
    some = rng.random(ROWS) < rng.choice([0.1, 0.4, 1.0])
    empty = np.array([not row for row in model.rows])
    full = np.flatnonzero(~empty)
    if code == GROW:
        # Only rows that may write: their last block is full, or their own (others copy_on_write first).
        own = [
            n % SIZE == 0 or model.owners(row[-1]) == 1
            for n, row in zip(model.length, model.rows, strict=True)
        ]
        most = rng.choice([1, SIZE, MAX_NEW * SIZE])
        gain = np.where(some & own, rng.integers(0, most + 1, ROWS), 0)
        length = np.minimum(np.array(model.length) + gain, COLUMNS * SIZE)
        if odd:
            length[rng.integers(ROWS)] = rng.choice([-1, 0, COLUMNS * SIZE + 1, 2**31 - 1, -(2**31)])
        return make_op(GROW, rows=length)
    if code == SHARE:
        mask, rows, places = some & empty, np.zeros(ROWS, int), {}
        if odd:
            mask[rng.integers(ROWS)] = True
        for s in np.flatnonzero(mask):
            # A prefix of another row, the cache's blocks, or (odd) anything from anywhere.
            choices = [h for h, block in enumerate(model.slots) if block is not None]
            sources = [SLOT_AT + h for h in rng.permutation(choices)]
            if len(full) and rng.random() < 0.7:
                parent = rng.choice(full)
                sources = [int(parent) * COLUMNS + j for j in range(len(model.rows[parent]))]
            if odd:
                sources = list(rng.integers(0, BAD[-1] + 1, COLUMNS))
            sources = sources[:COLUMNS]
            rows[s] = rng.integers(0, len(sources) * SIZE + 1)
            places |= {int(s) * COLUMNS + j: int(place) for j, place in enumerate(sources)}
            if odd and rng.random() < 0.2:
                rows[s] = rng.choice([-1, COLUMNS * SIZE + 1, 2**31 - 1, -(2**31)])
        return make_op(SHARE, rows=rows, places=places, mask=mask)
    if code == FORK:
        parent = np.full(ROWS, -1)
        if len(full):
            parent = np.where(some & empty, rng.choice(full, ROWS), -1)
        if odd:
            parent[rng.integers(ROWS)] = rng.choice([-2, ROWS, 0, ROWS - 1, 2**31 - 1, -(2**31)])
        return make_op(FORK, rows=parent)
    if code == HOLD:
        vacant = [h for h in range(SLOTS) if model.slots[h] is None]
        places = {}
        for h in vacant:
            if len(full) and rng.random() < 0.3:
                row = int(rng.choice(full))
                places[h] = row * COLUMNS + int(rng.integers(len(model.rows[row])))
        if odd and vacant:
            places[vacant[0]] = int(rng.choice([FREE_AT, *BAD]))
        return make_op(HOLD, places=places)
    if code == DROP:
        places = {h: SLOT_AT + h for h in range(SLOTS) if model.slots[h] is not None and rng.random() < 0.5}
        if odd:  # more than there are references to
            place = int(rng.choice([FREE_AT, *BAD, *(SLOT_AT + h for h in places)]))
            places = dict.fromkeys(range(SLOTS), place)
            block = model.at(place)
            if block is not None and model.owners(block) >= SLOTS:
                places = {}
        return make_op(DROP, places=places)
    return make_op(code, rows=some)


def run_stream(seed: int, chunks: int, ops_per_chunk: int) -> tuple[Mirror, Device]:
    """Chunks of random operations: foreseen by the model, run in one `lax.scan`, then compared one by one."""
    rng = np.random.default_rng(seed)
    model, mirror, device = Model(), Mirror(), start()
    share_of = np.array([8, 2, 2, 2, 4, 1.5, 1.5]) / 21
    for _ in range(chunks):
        ops, foreseen = [], []
        for code in rng.choice(7, ops_per_chunk, p=share_of):
            ops.append(pick_op(model, int(code), rng))
            ok = model.step(ops[-1])
            foreseen.append((ok, model.copy()))
        device, seen = apply_many(device, jax.tree.map(lambda *parts: np.stack(parts), *ops))
        seen = jax.tree.map(np.asarray, seen)
        for at, (op, (ok, after)) in enumerate(zip(ops, foreseen, strict=True)):
            mirror.compare(op, ok, after, jax.tree.map(lambda x, at=at: x[at], seen))
    return mirror, device


def test_stream_of_100_000_operations() -> None:
    mirror, device = run_stream(seed=0, chunks=20, ops_per_chunk=5000)
    assert mirror.count.sum() == 100_000
    assert (
        mirror.count[:, 1] > 1000
    ).all()  # every kind was done, and refused, often enough to mean something
    assert (np.delete(mirror.count[:, 0], RELEASE) > 30).all(), mirror.count

    # And after all that nothing has leaked: let go of everything, and every block is free.
    device, _ = apply_one(device, make_op(RELEASE, rows=1))
    held = np.asarray(device.slots)
    device, seen = apply_one(device, make_op(DROP, places={h: SLOT_AT + h for h in np.flatnonzero(held)}))
    assert bool(seen.ok) and not np.asarray(seen.violations).any()
    assert int(device.pool.num_free) == BLOCKS - 1
    assert sorted(np.asarray(device.pool.free)[: BLOCKS - 1]) == list(range(1, BLOCKS))


class AllocatorMachine(RuleBasedStateMachine):
    """The same operations, one at a time, chosen and shrunk by hypothesis."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.mirror, self.device = Model(), Mirror(), start()

    @rule(code=st.integers(0, 6), seed=st.integers(0, 2**16))
    def any_operation(self, code: int, seed: int) -> None:
        self.run(pick_op(self.model, code, np.random.default_rng(seed)))

    @rule(row=st.integers(0, ROWS - 1), gain=st.integers(1, MAX_NEW * SIZE))
    def append(self, row: int, gain: int) -> None:
        """What an engine does to append to one row: copy on write, then grow."""
        self.run(make_op(WRITE, rows=np.arange(ROWS) == row))
        own = self.model.length[row] % SIZE == 0 or self.model.owners(self.model.rows[row][-1]) == 1
        if own:
            length = np.array(self.model.length)
            length[row] += gain
            self.run(make_op(GROW, rows=length))

    @rule(parent=st.integers(0, ROWS - 1))
    def fork_everywhere_and_write(self, parent: int) -> None:
        """All empty rows become copies of one, then all write at once."""
        empty = np.array([not row for row in self.model.rows])
        self.run(make_op(FORK, rows=np.where(empty, parent, -1)))
        self.run(make_op(WRITE, rows=1))

    @rule(mask=st.integers(0, 2**ROWS - 1))
    def release(self, mask: int) -> None:
        self.run(make_op(RELEASE, rows=[mask >> s & 1 for s in range(ROWS)]))

    def run(self, op: Op) -> None:
        ok = self.model.step(op)
        self.device, seen = apply_one(self.device, op)
        self.mirror.compare(op, ok, self.model, jax.tree.map(np.asarray, seen))


AllocatorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAllocatorMachine = AllocatorMachine.TestCase
