"""The allocator case by case: exhaustion, limits, adversarial sharing, and arguments that are refused."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimised import compile_optimised

from jpaged.allocator import (
    BlockPool,
    BlockTables,
    blocks_needed,
    copy_on_write,
    drop,
    fork,
    grow,
    hold,
    init_pool,
    init_tables,
    open_rows,
    release,
    reorder,
    share,
    slide,
)
from jpaged.audit import audit

SIZE, ROWS, COLUMNS, BLOCKS = 4, 4, 4, 12


def jitted(operation: Callable) -> Callable:
    static = ["block_size", *(["max_new_blocks"] if operation is grow else [])]
    return functools.partial(jax.jit(operation, static_argnames=static), block_size=SIZE)


do_grow = functools.partial(jitted(grow), max_new_blocks=COLUMNS)
do_release, do_share, do_fork, do_write = map(jitted, (release, share, fork, copy_on_write))
do_open, do_reorder, do_slide = jitted(open_rows), jitted(reorder), jitted(slide)
do_audit, do_hold, do_drop = jitted(audit), jax.jit(hold), jax.jit(drop)


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def rows(*chosen: int) -> jax.Array:
    return jnp.isin(jnp.arange(ROWS), jnp.array(chosen))


def begin(*lengths: int, blocks: int = BLOCKS) -> tuple[BlockPool, BlockTables]:
    pool, tables, ok = do_grow(init_pool(blocks), init_tables(ROWS, COLUMNS), ints(*lengths))
    assert ok
    return pool, tables


def sound(pool: BlockPool, tables: BlockTables, holds: tuple[int, ...] = ()) -> bool:
    counts = np.bincount(np.array(holds, int), minlength=pool.refcount.shape[0]).astype(np.int32)
    return not np.asarray(do_audit(pool, tables, jnp.asarray(counts))).any()


def same(left: object, right: object) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), left, right)))


def test_blocks_needed_does_not_overflow() -> None:
    lengths = ints(0, 1, SIZE, SIZE + 1, 2**31 - 1)
    assert blocks_needed(lengths, SIZE).tolist() == [0, 1, 1, 2, 2**29]


def test_blocks_come_in_order_and_the_null_block_never() -> None:
    pool, tables = begin(1, SIZE + 1, 0, 3 * SIZE)
    assert tables.blocks.tolist() == [[1, 0, 0, 0], [2, 3, 0, 0], [0] * 4, [4, 5, 6, 0]]
    assert pool.num_free == BLOCKS - 1 - 6
    assert sound(pool, tables)


def test_grow_to_exactly_full_then_one_more() -> None:
    pool, tables = begin(4 * SIZE, 4 * SIZE, 3 * SIZE, 0)  # 11 blocks: all there are
    assert pool.num_free == 0 and sound(pool, tables)
    # Inside the last blocks nothing is needed; a row of length 0 needs one more.
    new = do_grow(pool, tables, ints(4 * SIZE, 4 * SIZE, 3 * SIZE, 1))
    assert not new[2] and same(new[:2], (pool, tables))
    pool, tables = do_release(pool, tables, rows(0, 1, 2))
    assert pool.num_free == BLOCKS - 1 and sound(pool, tables)


@pytest.mark.parametrize(
    ("lengths", "why"),
    [
        ((2, 4 * SIZE + 1, 0, 0), "more than M blocks"),
        ((2, SIZE - 1, 0, 0), "shrinks"),
        ((-1, SIZE, 0, 0), "negative"),
        ((2, 2**31 - 1, 0, 0), "far more than M blocks"),
        ((2**31 - 1,) * 4, "sums past 2**31"),
        ((4 * SIZE, 4 * SIZE, 4 * SIZE, 0), "more blocks than there are"),
        ((4 * SIZE, -(2**31), 0, 0), "the most negative length"),
    ],
)
def test_grow_is_all_or_nothing(lengths: tuple[int, ...], why: str) -> None:
    pool, tables = begin(2, SIZE, 0, 0)
    new_pool, new_tables, ok = do_grow(pool, tables, ints(*lengths))
    assert not ok, why
    assert same((new_pool, new_tables), (pool, tables)), why


def test_grow_by_more_than_max_new_blocks_is_refused() -> None:
    decode = functools.partial(jitted(grow), max_new_blocks=1)
    pool, tables = begin(SIZE, SIZE, 0, 0)
    new_pool, new_tables, ok = decode(pool, tables, ints(2 * SIZE, 2 * SIZE + 1, 0, 0))
    assert not ok and same((new_pool, new_tables), (pool, tables))
    new_pool, new_tables, ok = decode(pool, tables, ints(2 * SIZE, SIZE + 1, 1, 0))
    assert ok and new_tables.blocks[:, :2].tolist() == [[1, 3], [2, 4], [5, 0], [0, 0]]
    # The same request gives the same blocks however many it might have asked for.
    assert same((new_pool, new_tables), do_grow(pool, tables, ints(2 * SIZE, SIZE + 1, 1, 0))[:2])


def test_the_smallest_pool() -> None:
    pool, tables = begin(0, SIZE, 0, 0, blocks=2)
    assert tables.blocks[1, 0] == 1 and pool.num_free == 0
    refused = do_grow(pool, tables, ints(1, SIZE, 0, 0))
    assert not refused[2] and same(refused[:2], (pool, tables))
    pool, tables = do_release(pool, tables, rows(0, 1, 2, 3))
    assert pool.num_free == 1 and sound(pool, tables)


def test_release_of_a_block_that_several_released_rows_own() -> None:
    pool, tables = begin(2 * SIZE + 1, 0, 0, SIZE)
    pool, tables, ok = do_fork(pool, tables, ints(-1, 0, 0, -1))
    assert ok and pool.refcount[1:5].tolist() == [3, 3, 3, 1]
    pool, tables = do_release(pool, tables, rows(1))
    assert pool.num_free == BLOCKS - 1 - 4 and sound(pool, tables)
    pool, tables = do_release(pool, tables, rows(0, 2))  # all its owners at once: freed, and freed once
    assert pool.num_free == BLOCKS - 1 - 1 and sound(pool, tables)


def test_release_of_many_rows_that_share_across_tiles() -> None:
    """40 rows that all own the same two blocks (and one of their own), released in two calls."""
    many = 40
    pool, tables = init_pool(100), init_tables(many, 3)
    pool, tables, ok = do_grow(pool, tables, jnp.zeros(many, jnp.int32).at[5].set(2 * SIZE))
    pool, tables, ok = do_fork(pool, tables, jnp.full(many, 5, jnp.int32).at[5].set(-1))
    assert ok and pool.refcount[1:3].tolist() == [many, many]
    pool, tables, ok = do_grow(pool, tables, jnp.full(many, 2 * SIZE + 1, jnp.int32))
    assert ok and pool.num_free == 99 - 2 - many
    first = jnp.arange(many) % 3 == 0
    pool, tables = do_release(pool, tables, first)
    assert not do_audit(pool, tables).any()
    assert pool.refcount[1] == many - int(first.sum())
    pool, tables = do_release(pool, tables, ~first)
    assert not do_audit(pool, tables).any()
    assert pool.num_free == 99


def test_all_forks_write_at_once_and_one_keeps_the_block() -> None:
    pool, tables = begin(SIZE + 1, 0, 0, 0)
    pool, tables, _ = do_fork(pool, tables, ints(-1, 0, 0, 0))
    pool, tables, src, dst, ok = do_write(pool, tables, rows(0, 1, 2, 3))
    assert ok
    assert (src.tolist(), dst.tolist()) == ([0, 2, 2, 2], [0, 3, 4, 5])
    assert pool.refcount[:6].tolist() == [0, 4, 1, 1, 1, 1]
    assert sound(pool, tables)


def test_writers_copy_while_somebody_else_owns_the_block() -> None:
    pool, tables = begin(SIZE + 1, 0, 0, 0)
    pool, tables, _ = do_fork(pool, tables, ints(-1, 0, 0, 0))
    pool, ok = do_hold(pool, ints(2))
    pool, tables, src, dst, ok = do_write(pool, tables, rows(0, 1, 2, 3))
    assert ok and src.tolist() == [2] * 4 and dst.tolist() == [3, 4, 5, 6]
    assert pool.refcount[2] == 1 and sound(pool, tables, (2,))


def test_copy_on_write_without_room_changes_nothing() -> None:
    pool, tables = begin(SIZE + 1, 0, 0, 0, blocks=4)  # one free block
    pool, tables, _ = do_fork(pool, tables, ints(-1, 0, 0, 0))
    new_pool, new_tables, src, dst, ok = do_write(pool, tables, rows(0, 1, 2, 3))
    assert not ok and not src.any() and not dst.any()
    assert same((new_pool, new_tables), (pool, tables))
    *_, ok = do_write(pool, tables, rows(1))
    assert ok


def test_no_copy_at_a_block_boundary_or_for_a_sole_owner() -> None:
    pool, tables = begin(SIZE, 0, 0, 1)
    pool, tables, _ = do_fork(pool, tables, ints(-1, 0, 0, -1))
    new_pool, new_tables, src, dst, ok = do_write(pool, tables, rows(0, 1, 2, 3))
    assert ok and not src.any() and not dst.any()
    assert same((new_pool, new_tables), (pool, tables))


@pytest.mark.parametrize(
    "parent",
    [(-1, 0, 1, -1), (-1, 0, 3, -1), (0, -1, -1, -1), (-1, 4, -1, -1), (-1, -2, -1, -1), (3, -1, -1, -1)],
)
def test_fork_is_all_or_nothing(parent: tuple[int, ...]) -> None:
    """A child of a child, of an empty row, of itself, of no row at all, or with blocks of its own."""
    pool, tables = begin(5, 0, 0, 0)
    new_pool, new_tables, ok = do_fork(pool, tables, ints(*parent))
    assert not ok and same((new_pool, new_tables), (pool, tables))


@pytest.mark.parametrize("change", ["free", "null", "past", "negative", "twice", "entry twice", "not open", "outside"])
def test_share_is_all_or_nothing(change: str) -> None:
    pool, tables = begin(2 * SIZE, 0, 0, 0)
    at, columns, ids = np.array([1, 1, 2, ROWS], np.int32), np.array([0, 1, 0, -7], np.int32), ints(1, 2, 1, 99)
    opened, ok = do_open(tables, at, columns)
    assert ok and opened.length.tolist() == [2 * SIZE, 2 * SIZE, SIZE, 0]
    *state, ok = do_share(pool, opened, at, columns, ids)
    assert ok and sound(*state) and state[0].refcount[1:3].tolist() == [3, 2]
    assert state[1].blocks[1:3, :2].tolist() == [[1, 2], [1, 0]]

    bad_block = {"free": 5, "null": 0, "past": BLOCKS, "negative": -1, "twice": 1}
    if change in bad_block:
        ids = ids.at[1].set(bad_block[change])
    elif change == "entry twice":
        columns[1] = 0
    else:
        at[2], columns[2] = {"not open": (3, 0), "outside": (2, COLUMNS)}[change]
    *new, ok = do_share(pool, opened, at, columns, ids)
    assert not ok and same(tuple(new), (pool, opened))


@pytest.mark.parametrize("place", [(0, 1), (-1, 0), (ROWS + 1, 0), (1, -1), (1, COLUMNS)])
def test_only_empty_rows_are_opened(place: tuple[int, int]) -> None:
    _, tables = begin(2 * SIZE, 0, 0, 0)
    row, column = place
    new, ok = do_open(tables, ints(2, row), ints(0, column))
    assert not ok and same(new, tables)


def test_reorder_moves_tables_by_reference_count() -> None:
    """Rows 0 and 1 change places, 2 is taken over by nobody, 3 follows 1: no block is lost on the way."""
    pool, tables = begin(SIZE + 1, 3, 2 * SIZE, 0)
    before, free = np.asarray(tables.blocks), int(pool.num_free)
    moved = do_reorder(pool, tables, ints(1, 0, 0, 1))
    assert sound(*moved)
    np.testing.assert_array_equal(moved[1].blocks, before[[1, 0, 0, 1]])
    assert moved[1].length.tolist() == [3, SIZE + 1, SIZE + 1, 3]
    assert moved[0].num_free == free + 2  # the blocks of row 2
    stay = do_reorder(pool, tables, ints(0, -1, ROWS, 3))
    assert same(stay, (pool, tables))


def test_reorder_of_many_rows_at_random() -> None:
    """Chains, swaps and cycles over more rows than a tile, again and again, with growth between."""
    rng = np.random.default_rng(0)
    rows, columns, blocks = 21, 6, 150
    pool, tables, ok = grow(
        init_pool(blocks), init_tables(rows, columns), jnp.asarray(rng.integers(0, 13, rows), jnp.int32),
        block_size=SIZE, max_new_blocks=columns,
    )  # fmt: skip
    for _ in range(30):
        before = np.asarray(tables.blocks), np.asarray(tables.length)
        source = np.where(rng.random(rows) < rng.choice([0.1, 0.5, 1.0]), rng.integers(0, rows, rows), np.arange(rows))
        pool, tables = do_reorder(pool, tables, jnp.asarray(source, jnp.int32))
        assert sound(pool, tables)
        np.testing.assert_array_equal(tables.blocks, before[0][source])
        np.testing.assert_array_equal(tables.length, before[1][source])
        writing = tables.length < columns * SIZE
        pool, tables, *_, ok = do_write(pool, tables, writing)
        assert ok
        pool, tables, ok = do_grow(pool, tables, tables.length + writing)
        assert ok


def test_hold_and_drop_count_duplicates() -> None:
    pool, tables = begin(2 * SIZE, 0, 0, 0)
    pool, ok = do_hold(pool, ints(1, 0, 1, 2))
    assert ok and sound(pool, tables, (1, 1, 2))
    pool, tables = do_release(pool, tables, rows(0))
    assert pool.num_free == BLOCKS - 3 and sound(pool, tables, (1, 1, 2))
    refused, ok = do_drop(pool, ints(2, 1, 1, 1))  # one too many
    assert not ok and same(refused, pool)
    pool, ok = do_drop(pool, ints(1, 2, 0, 1))
    assert ok and pool.num_free == BLOCKS - 1 and sound(pool, tables)


@pytest.mark.parametrize("bad", [5, BLOCKS, -1, 2**31 - 1, -(2**31)])
def test_hold_and_drop_refuse_what_is_not_owned(bad: int) -> None:
    pool, _ = begin(2 * SIZE, 0, 0, 0)
    for operation in (do_hold, do_drop):
        new, ok = operation(pool, ints(1, bad))
        assert not ok and same(new, pool)


def test_state_is_updated_in_place() -> None:
    """Donated, no operation needs a second copy of the pool or the tables."""
    pool, tables = init_pool(65_536), init_tables(64, 1024)
    mask, zeros = jnp.zeros(64, bool), jnp.zeros(64, jnp.int32)
    state_bytes = sum(x.nbytes for x in jax.tree.leaves((pool, tables)))

    def step(pool, tables, mask, lengths, parent):
        pool, tables = release(pool, tables, mask, block_size=16)
        pool, tables, _ = fork(pool, tables, parent, block_size=16)
        pool, tables, _, _, _ = copy_on_write(pool, tables, mask, block_size=16)
        return grow(pool, tables, lengths, block_size=16, max_new_blocks=4)

    compiled = compile_optimised(jax.jit(step, donate_argnums=(0, 1)).lower(pool, tables, mask, zeros, zeros))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == state_bytes
    whole = re.escape(f"= s32[{tables.blocks.size}]") + "|" + re.escape("= s32[64,1024]")
    assert not re.findall(rf"({whole})\S* copy\(.*", compiled.as_text())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, t: init_pool(1), "num_blocks must be at least 2"),
        (lambda p, t: init_tables(0, 1), "num_rows and max_blocks must be at least 1"),
        (lambda p, t: grow(p, t, ints(1), block_size=4, max_new_blocks=1), r"new_length must be int32\[4\]"),
        (
            lambda p, t: grow(p, t, ints(1, 1, 1, 1), block_size=4, max_new_blocks=0),
            "max_new_blocks must be at",
        ),
        (lambda p, t: release(p, t, ints(1, 0, 0, 0), block_size=4), r"mask must be bool\[4\]"),
        (lambda p, t: release(p, t, rows(1), block_size=0), "block_size must be at least 1"),
        (
            lambda p, t: share(p, t, ints(1), ints(0), ints(1), block_size=0),
            "block_size must be at least 1",
        ),
        (lambda p, t: hold(p, jnp.zeros((1, 1), jnp.int32)), "ids must be a vector of int32"),
        (lambda p, t: drop(p, jnp.zeros(1)), "ids must be a vector of int32"),
    ],
)
def test_wrong_arguments_are_refused(call: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(init_pool(BLOCKS), init_tables(ROWS, COLUMNS))


def test_slide_gives_up_first_entries_and_what_nobody_has_is_free():
    pool, tables = begin(16, 9, 0, 0)
    pool, tables, ok = do_fork(pool, tables, ints(-1, -1, 0, -1))
    assert ok
    before = np.asarray(tables.blocks)
    pool, tables = do_slide(pool, tables, ints(2, 9, 0, 1))  # past the end of row 1; row 3 is empty
    after = np.asarray(tables.blocks)
    assert after[0].tolist() == [0, 0, *before[0, 2:]] and not after[1].any() and (after[2] == before[2]).all()
    assert np.asarray(tables.length).tolist() == [16, 9, 16, 0]
    assert int(pool.num_free) == 11 - 4 and np.asarray(pool.refcount)[before[0]].tolist() == [1, 1, 2, 2]
    assert not np.asarray(audit(pool, tables, block_size=SIZE, slides=True)).any()
    again = do_slide(pool, tables, ints(2, 0, 0, 0))
    assert same((pool, tables), again)
    # What is left is grown, forked, taken over and released like any row.
    pool, tables = do_slide(pool, tables, ints(0, 0, 3, 0))
    assert int(pool.num_free) == 11 - 2
    pool, tables, ok = do_fork(pool, tables, ints(-1, -1, -1, 0))
    assert ok and np.asarray(tables.blocks)[3].tolist() == after[0].tolist()
    pool, tables = do_reorder(pool, tables, ints(2, 1, 2, 3))
    assert np.asarray(tables.blocks)[0].tolist() == [0, 0, 0, before[0, 3]]
    pool, tables, ok = do_grow(pool, tables, ints(16, 13, 16, 16))
    assert ok and np.asarray(tables.blocks)[1, 3] > 0
    assert not np.asarray(audit(pool, tables, block_size=SIZE, slides=True)).any()
    assert np.asarray(do_audit(pool, tables, jnp.zeros(BLOCKS, jnp.int32))).any()  # without a window that is wrong
    pool, tables = do_release(pool, tables, rows(0, 1, 2, 3))
    assert int(pool.num_free) == 11 and sound(pool, tables)
