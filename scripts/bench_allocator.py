"""Time the block allocator on its own, beside a NumPy version of the same operations.

    python scripts/bench_allocator.py [--rows 256] [--columns 256] [--blocks 65536] [--json FILE]

Rows are filled to random lengths, up to half of the pool in all. "call" is one jitted call with a donated
state, its dispatch included; "inside" is the cost inside a larger program, as in the engine's step: a loop of
that operation on the device, divided by its length. NumPy works in place on the same arrays on the host.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_tools import make_parser, print_table, save_json, time_calls
from jax import lax

from jpaged.allocator import (
    BlockPool,
    BlockTables,
    copy_on_write,
    fork,
    grow,
    init_pool,
    init_tables,
    open_rows,
    release,
    share,
)
from jpaged.audit import audit, check

BLOCK_SIZE = 16
INSIDE = 200  # operations in the loop that measures the cost inside a program
HEADER = ("operation", "call ms", "inside ms", "numpy ms")

State = tuple[BlockPool, BlockTables]


class NumpyAllocator:
    """The same operations as a host would write them: whole arrays, in place, no checks."""

    def __init__(self, state: State) -> None:
        (free, num_free, refcount), (blocks, length) = jax.tree.map(np.array, state)
        self.free, self.num_free, self.refcount = free, int(num_free), refcount
        self.blocks, self.length = blocks, length

    def pop(self, count: int) -> np.ndarray:
        self.num_free -= count
        ids = self.free[self.num_free : self.num_free + count][::-1]
        self.refcount[ids] = 1
        return ids

    def grow_by_one(self, active: np.ndarray) -> None:
        rows = np.flatnonzero(active & (self.length % BLOCK_SIZE == 0))
        self.blocks[rows, self.length[rows] // BLOCK_SIZE] = self.pop(rows.size)
        self.length += active

    def live(self, rows: np.ndarray) -> np.ndarray:
        needed = -(-self.length[rows] // BLOCK_SIZE)
        return self.blocks[rows][np.arange(self.blocks.shape[1]) < needed[:, None]]

    def release(self, mask: np.ndarray) -> None:
        rows = np.flatnonzero(mask)
        if rows.size:
            ids = self.live(rows)
            np.subtract.at(self.refcount, ids, 1)
            freed = np.unique(ids[self.refcount[ids] == 0])
            self.free[self.num_free : self.num_free + freed.size] = freed
            self.num_free += freed.size
            self.blocks[rows], self.length[rows] = 0, 0

    def fork(self, parent: np.ndarray) -> None:
        rows = np.flatnonzero(parent >= 0)
        self.blocks[rows], self.length[rows] = self.blocks[parent[rows]], self.length[parent[rows]]
        np.add.at(self.refcount, self.live(rows), 1)

    def share(self, rows: np.ndarray, columns: np.ndarray, ids: np.ndarray) -> None:
        np.maximum.at(self.length, rows, (columns + 1) * BLOCK_SIZE)
        self.blocks[rows, columns] = ids
        np.add.at(self.refcount, ids, 1)

    def copy_on_write(self, mask: np.ndarray) -> None:
        rows = np.flatnonzero(mask & (self.length % BLOCK_SIZE != 0))
        columns = self.length[rows] // BLOCK_SIZE
        ids = self.blocks[rows, columns]
        shared = self.refcount[ids] > 1
        rows, columns, ids = rows[shared], columns[shared], ids[shared]
        if rows.size:
            _, first, back, writers = np.unique(ids, return_index=True, return_inverse=True, return_counts=True)
            keeps = (writers[back] == self.refcount[ids]) & (first[back] == np.arange(rows.size))
            rows, columns, ids = rows[~keeps], columns[~keeps], ids[~keeps]
            np.subtract.at(self.refcount, ids, 1)
            self.blocks[rows, columns] = self.pop(rows.size)


def filled(rows: int, columns: int, blocks: int, seed: int = 0) -> State:
    """Three rows of four hold sequences of random lengths, about half of the pool; the others are empty."""
    length = np.random.default_rng(seed).integers(1, columns * BLOCK_SIZE - INSIDE, rows)
    length[rows * 3 // 4 :] = 0
    room = (blocks // 2) * BLOCK_SIZE
    length = (length * min(1.0, room / length.sum())).astype(np.int32)
    run = jax.jit(functools.partial(grow, block_size=BLOCK_SIZE, max_new_blocks=columns))
    pool, tables, ok = run(init_pool(blocks), init_tables(rows, columns), length)
    if not ok:
        raise SystemExit("the pool is too small for these rows")
    return pool, tables


def median_ms(run: Callable[..., Any], repeats: int, prepare: Callable[[], Any]) -> float:
    """Milliseconds of a call of `run` on what `prepare` makes."""
    return 1e3 * statistics.median(time_calls(run, repeats, lambda: (prepare(),)))


def operations(state: State) -> dict[str, tuple[Callable, Callable, bool]]:
    """Name -> (on the device: state -> state, on the host: NumpyAllocator -> None, can be repeated)."""
    rows = state[1].blocks.shape[0]
    row = np.arange(rows)
    active = row < rows * 3 // 4
    empty = np.flatnonzero(~active)
    parent = np.full(rows, -1, np.int32)
    parent[empty] = empty % max(1, rows // 8)
    # Eight rows (or all that are empty) with a prefix hit of up to 16 blocks: those of as many others.
    hit = range(min(8, empty.size))
    full = np.minimum(np.asarray(state[1].length[:8]) // BLOCK_SIZE, 16)
    hits = np.array([(empty[s], column) for s in hit for column in range(full[s])], np.int32).reshape(-1, 2).T
    hit_blocks = np.concatenate([state[1].blocks[s, : full[s]] for s in hit])
    size = {"block_size": BLOCK_SIZE}

    def grow_one(s: State) -> State:
        return grow(*s, s[1].length + active, max_new_blocks=1, **size)[:2]

    def release_rows(count: int) -> tuple[Callable, Callable, bool]:
        mask = row < count
        return lambda s: release(*s, mask, **size), lambda n: n.release(mask), count == 0

    def share_rows(s: State) -> State:
        tables = open_rows(s[1], *hits, **size)[0]
        return share(s[0], tables, *hits, hit_blocks, **size)[:2]

    def fork_rows(s: State) -> State:
        return fork(*s, jnp.asarray(parent), **size)[:2]

    def fork_and_write(s: State) -> State:
        pool, tables, *_ = copy_on_write(*fork_rows(s), jnp.ones(rows, bool), **size)
        return pool, tables

    def numpy_fork_and_write(n: NumpyAllocator) -> None:
        n.fork(parent)
        n.copy_on_write(np.ones(rows, bool))

    def decode_step(s: State) -> State:
        s = release(*s, s[1].length < 0, **size)
        s = copy_on_write(*s, jnp.asarray(active), **size)[:2]
        return grow_one(s)

    def numpy_decode_step(n: NumpyAllocator) -> None:
        n.release(np.zeros(rows, bool))
        n.copy_on_write(active)
        n.grow_by_one(active)

    return {
        "decode step: release none, copy-on-write, grow 1": (decode_step, numpy_decode_step, True),
        "grow by one token": (grow_one, lambda n: n.grow_by_one(active), True),
        "copy-on-write, nothing shared": (
            lambda s: copy_on_write(*s, jnp.asarray(active), **size)[:2],
            lambda n: n.copy_on_write(active),
            True,
        ),
        "release 0 rows": release_rows(0),
        "release 1 row": release_rows(1),
        "release 8 rows": release_rows(8),
        f"release {rows} rows": release_rows(rows),
        f"share with {len(hit)} rows": (share_rows, lambda n: n.share(*hits, hit_blocks), False),
        f"fork {empty.size} rows": (fork_rows, lambda n: n.fork(parent), False),
        f"fork {empty.size} rows and write": (fork_and_write, numpy_fork_and_write, False),
    }


def measure(rows: int, columns: int, blocks: int, repeats: int) -> list[tuple[Any, ...]]:
    """Rows of HEADER; "-" where a thing is not measured."""
    state = filled(rows, columns, blocks)
    copy = jax.jit(lambda s: jax.tree.map(jnp.copy, s))
    run_audit = jax.jit(functools.partial(audit, block_size=BLOCK_SIZE))
    table: list[tuple[Any, ...]] = []
    for name, (device, host, again) in operations(state).items():
        once = jax.jit(device, donate_argnums=0)
        check(run_audit(*once(copy(state))))
        call = median_ms(once, repeats, lambda: copy(state))
        inside: float | str = "-"
        if again:
            many = jax.jit(lambda s, f=device: lax.fori_loop(0, INSIDE, lambda _, s: f(s), s), donate_argnums=0)
            inside = median_ms(many, max(3, repeats // 5), lambda: copy(state)) / INSIDE
        table.append((name, call, inside, median_ms(host, repeats, lambda: NumpyAllocator(state))))
    table.append(("audit", median_ms(lambda s: run_audit(*s), repeats, lambda: state), "-", "-"))
    return table


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=256, help="rows of the block table (sequence slots)")
    parser.add_argument("--columns", type=int, default=256, help="most blocks of a row")
    parser.add_argument("--blocks", type=int, default=65_536, help="blocks in the pool")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    if args.rows < 4:
        parser.error(f"--rows must be at least 4 (a quarter of them is empty), got {args.rows}")

    table = measure(args.rows, args.columns, args.blocks, args.repeats)
    print(f"{args.rows} rows x {args.columns} blocks, pool of {args.blocks}; medians in ms")
    print_table(HEADER, table)
    save_json(args.json, [dict(zip(HEADER, row, strict=True)) for row in table])


if __name__ == "__main__":
    main()
