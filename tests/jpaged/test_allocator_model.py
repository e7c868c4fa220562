"""The allocator against a naive model: Python lists and sets that know nothing of stacks or counts.

The model (allocator_model.py) foresees every result and learns physical ids from the device, one operation
late, like the engine's host side. Two drivers share it: a seeded stream of 100,000 operations, run by
`lax.scan`, and a hypothesis state machine, which shrinks what it finds. Checked after every operation:
`audit`, tables, counts, `ok`, that nothing changed where it is False, and that every row reads its own tokens
back from pages that are really written and copied.
"""

from __future__ import annotations

import jax
import numpy as np
from allocator_model import (
    BAD,
    BLOCKS,
    COLUMNS,
    DROP,
    FORK,
    FREE_AT,
    GROW,
    HOLD,
    MAX_NEW,
    RELEASE,
    ROWS,
    SHARE,
    SIZE,
    SLOT_AT,
    SLOTS,
    WRITE,
    Device,
    Model,
    Op,
    Seen,
    apply_many,
    apply_one,
    make_op,
    start,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from jpaged.audit import INVARIANTS


class Mirror:
    """The model beside the device: learns physical ids, writes pages like an engine would, compares."""

    def __init__(self) -> None:
        self.physical: dict[int, int] = {}
        self.pages = np.zeros((BLOCKS, SIZE), np.int64)
        self.tokens = np.full((ROWS, COLUMNS * SIZE), -1)  # what each row has written or inherited; -1 past it
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
            shared = op.mask & (op.rows > 0)
            self.tokens = np.where(shared[:, None], self.pages[slot], self.tokens)
        elif op.code == GROW:
            new = inside & (self.tokens == -1)
            self.tokens[new] = self.stamp + np.arange(1, new.sum() + 1)
            self.stamp += int(new.sum())
            self.pages[slot[0][new], slot[1][new]] = self.tokens[new]
        self.tokens[~inside] = -1
        np.testing.assert_array_equal(np.where(inside, self.pages[slot], -1), self.tokens)


def pick_op(model: Model, code: int, rng: np.random.Generator) -> Op:
    """A random operation that mostly makes sense for the model's state, and sometimes none at all."""
    odd = rng.random() < 0.05  # ask for something invalid
    some = rng.random(ROWS) < rng.choice([0.1, 0.4, 1.0])
    empty = np.array([not row for row in model.rows])
    full = np.flatnonzero(~empty)
    if code == GROW:
        # Only rows that may write: their last block is full, or their own (others copy_on_write first).
        own = [n % SIZE == 0 or model.owners(row[-1]) == 1 for n, row in zip(model.length, model.rows, strict=True)]
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
            rows[s] = rng.integers(0, len(sources) + 1)
            places |= {int(s) * COLUMNS + j: int(place) for j, place in enumerate(sources)}
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
    assert (mirror.count[:, 1] > 1000).all()  # every kind was done, and refused, often enough to mean something
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
