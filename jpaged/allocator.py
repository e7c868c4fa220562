"""Block allocator and block tables: a few small arrays, changed only inside jit, a whole batch at a time.

The KV cache is cut into `N` blocks of `block_size` tokens. Two pytrees say who owns what:

    BlockPool     free      i32[N]     a stack: free[:num_free] are the free ids, free[num_free - 1] on top
                  num_free  i32[]
                  refcount  i32[N]     owners of each block: table rows and the prefix cache's holds
    BlockTables   blocks    i32[S, M]  row s owns blocks[s, :blocks_needed(length[s])]; those past them are 0, and so
                                       are the first ones that it gave up (`slide`)
                  length    i32[S]     tokens of row s

Block 0 is the null block: padding is written there and nothing reads it. Never free, never referenced.

Every operation is pure and all-or-nothing. Where it cannot be done in full (not enough free blocks, a row
past `M`, an invalid request) it returns `ok = False` and the state bit for bit as it was: a request is judged
first, on S-sized arrays, and a refused one is turned into one that asks for nothing.

Cost. XLA runs a scatter serially on CPU and TPU, a few nanoseconds an index, so nothing scatters all S * M
entries. An operation that touches whole rows walks over *tiles* of the rows really asked for, with a traced
trip count (`over_tiles`): none asked for, none walked. Tiles also put "the same block in two rows" in order:
counts go down one tile after the other, and the tile that brings a block to zero frees it.

Negative indices wrap around in JAX even with `mode="drop"`, so ids that come from outside are range-checked
before they index anything, and entries to be left out are sent to `N`, `M` or `S` (one past the end).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.tiles import over_tiles
from pallas_kernels.indexing import gather, scatter, scatter_add

_TILE = 8  # rows handled at once; see scripts/bench_allocator.py


class BlockPool(NamedTuple):
    """Which blocks are free, and how many owners the others have."""

    free: jax.Array  # i32[N]
    num_free: jax.Array  # i32[]
    refcount: jax.Array  # i32[N]


class BlockTables(NamedTuple):
    """Which blocks each row (sequence slot) owns, in token order."""

    blocks: jax.Array  # i32[S, M]
    length: jax.Array  # i32[S]


def init_pool(num_blocks: int) -> BlockPool:
    """A pool of `num_blocks` blocks, the null block included; hands out 1, 2, 3, ... ValueError below 2."""
    if num_blocks < 2:
        raise ValueError(f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}")
    return BlockPool(
        free=jnp.arange(num_blocks - 1, -1, -1, dtype=jnp.int32),
        num_free=jnp.asarray(num_blocks - 1, jnp.int32),
        refcount=jnp.zeros(num_blocks, jnp.int32),
    )


def init_tables(num_rows: int, max_blocks: int) -> BlockTables:
    """`num_rows` empty rows of at most `max_blocks` blocks. ValueError where either is below 1."""
    if num_rows < 1 or max_blocks < 1:
        raise ValueError(f"num_rows and max_blocks must be at least 1, got {num_rows} and {max_blocks}")
    return BlockTables(blocks=jnp.zeros((num_rows, max_blocks), jnp.int32), length=jnp.zeros(num_rows, jnp.int32))


def blocks_needed(length: jax.Array, block_size: int) -> jax.Array:
    """Blocks that hold `length >= 0` tokens: ceil(length / block_size), without overflow near 2**31."""
    # Not `//` and `%`: to be right for negative numbers too they take ten operations each, in many places.
    return lax.div(length, block_size) + (lax.rem(length, block_size) != 0)


def grow(
    pool: BlockPool, tables: BlockTables, new_length: jax.Array, *, block_size: int, max_new_blocks: int
) -> tuple[BlockPool, BlockTables, jax.Array]:
    """Make every row long enough for `new_length` i32[S] tokens. Returns (pool, tables, ok bool[]).

    Row s takes its new blocks from the top of the stack, row 0 first. `max_new_blocks` (static) is the most
    blocks one row may gain: 1 for decoding. Rows with `new_length == length` stay as they are.

    ok is False and nothing changes where the pool has too few free blocks, or a row would shrink, gain more
    than `max_new_blocks` or have more than M.
    """
    num_rows, max_blocks, num_blocks = _check(pool, tables, block_size, new_length=new_length)
    if max_new_blocks < 1:
        raise ValueError(f"max_new_blocks must be at least 1, got {max_new_blocks}")
    max_new_blocks = min(max_new_blocks, max_blocks)

    have = blocks_needed(tables.length, block_size)
    want = blocks_needed(new_length, block_size)
    need = want - have
    valid = jnp.all((new_length >= tables.length) & (want <= max_blocks) & (need <= max_new_blocks))
    need = jnp.where(valid, need, 0)
    ok = valid & (jnp.sum(need) <= pool.num_free)
    need = jnp.where(ok, need, 0)
    taken = jnp.cumsum(need)
    top = pool.num_free - 1 - (taken - need)  # row s: free[top[s]], free[top[s] - 1], ...

    # The first new block of every row: all that a decode step needs.
    gains = need > 0
    first = gather(pool.free, jnp.where(gains, top, num_blocks))
    refcount = scatter(pool.refcount, jnp.where(gains, first, num_blocks), 1)
    blocks = scatter(tables.blocks, (jnp.arange(num_rows), jnp.where(gains, have, max_blocks)), first)

    if max_new_blocks > 1:  # the others, of the few rows that gain more than one (prefill)
        extra = jnp.arange(1, max_new_blocks, dtype=jnp.int32)

        def take(rows: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            refcount, blocks = state
            wanted = extra < gather(need, rows)[:, None]
            place = gather(top, rows)[:, None] - extra
            column = gather(have, rows)[:, None] + extra
            ids = gather(pool.free, jnp.where(wanted, place, num_blocks))
            refcount = scatter(refcount, jnp.where(wanted, ids, num_blocks), 1)
            blocks = scatter(blocks, (rows[:, None], jnp.where(wanted, column, max_blocks)), ids)
            return refcount, blocks

        refcount, blocks = over_tiles(need > 1, _TILE, take, (refcount, blocks))

    pool = BlockPool(pool.free, pool.num_free - taken[-1], refcount)
    return pool, BlockTables(blocks, jnp.where(ok, new_length, tables.length)), ok


def release(pool: BlockPool, tables: BlockTables, mask: jax.Array, *, block_size: int) -> tuple[BlockPool, BlockTables]:
    """Empty the rows in `mask` bool[S] and drop their references; blocks nobody owns any more become free.

    Cannot fail; empty rows are fine, and so is a block that several of the rows own.
    """
    _, max_blocks, num_blocks = _check(pool, tables, block_size, mask=mask)
    column = jnp.arange(max_blocks, dtype=jnp.int32)

    live = mask & (tables.length > 0)

    def drop_rows(rows: jax.Array, pool: BlockPool) -> BlockPool:
        ids = gather(tables.blocks, rows)
        owned = blocks_needed(gather(tables.length, rows), block_size)
        return _drop_references(pool, jnp.where((column < owned[:, None]) & (ids > 0), ids, num_blocks).reshape(-1))

    def clear_rows(rows: jax.Array, blocks: jax.Array) -> jax.Array:
        return scatter(blocks, rows, 0)

    # Two walks, the second made to wait for the first by a condition that always holds: XLA copies the whole
    # table where a loop both reads and writes it, and where it cannot tell which of two comes first.
    pool = over_tiles(live, _TILE, drop_rows, pool)
    blocks = over_tiles(live & (pool.num_free >= 0), _TILE, clear_rows, tables.blocks)
    return pool, BlockTables(blocks, jnp.where(live, 0, tables.length))


def slide(pool: BlockPool, tables: BlockTables, first: jax.Array, *, block_size: int) -> tuple[BlockPool, BlockTables]:
    """Row s gives up its entries before column `first[s]`, i32[S]: they become 0, and rows keep their lengths.

    For attention with a window, which never reads them again. Blocks nobody owns any more become free. Cannot fail;
    entries given up before are left alone, and so are those past a row's end.
    """
    _, max_blocks, num_blocks = _check(pool, tables, block_size, first=first)
    column = jnp.arange(max_blocks, dtype=jnp.int32)
    first = jnp.minimum(first, blocks_needed(tables.length, block_size))

    def gone(rows: jax.Array) -> jax.Array:
        return column < gather(first, rows)[:, None]

    def drop_entries(rows: jax.Array, pool: BlockPool) -> BlockPool:
        ids = gather(tables.blocks, rows)
        return _drop_references(pool, jnp.where(gone(rows) & (ids > 0), ids, num_blocks).reshape(-1))

    def clear_entries(rows: jax.Array, blocks: jax.Array) -> jax.Array:
        ids = gather(blocks, rows)
        return scatter(blocks, rows, jnp.where(gone(rows), 0, ids))

    # Two walks, as in `release`.
    pool = over_tiles(first > 0, _TILE, drop_entries, pool)
    blocks = over_tiles((first > 0) & (pool.num_free >= 0), _TILE, clear_entries, tables.blocks)
    return pool, tables._replace(blocks=blocks)


def open_rows(
    tables: BlockTables, rows: jax.Array, columns: jax.Array, *, block_size: int
) -> tuple[BlockTables, jax.Array]:
    """Make room for `share`: empty rows get the length of the full blocks that it will attach to them.

    `rows` and `columns` i32[K] name table entries, every column from 0 on for each row, or (with a window, see
    `slide`) from a later one on; row S is padding. The entries stay 0 until `share` fills them; what comes between
    (`grow`) goes to the columns behind them. Returns (tables, ok bool[]); ok is False and nothing changes where a row
    is not empty or a place is outside the tables.
    """
    num_rows = tables.length.shape[0]
    used, ok = _check_places(tables, rows, columns)
    ok = ok & ~jnp.any(used & (gather(tables.length, rows) > 0))
    target = jnp.where(used & ok, rows, num_rows)
    length = tables.length.at[target].max((columns + 1) * block_size, mode="drop")
    return tables._replace(length=length), ok


def share(
    pool: BlockPool, tables: BlockTables, rows: jax.Array, columns: jax.Array, ids: jax.Array, *, block_size: int
) -> tuple[BlockPool, BlockTables, jax.Array]:
    """Attach blocks that already have an owner to entries that `open_rows` left open: prefix hits.

    Block `ids[k]` becomes entry (`rows[k]`, `columns[k]`), i32[K] each; row S is padding. Done after `grow`, so that
    a row can share what another row was given in the same step. Returns (pool, tables, ok bool[]).

    ok is False and nothing changes where an entry is not open, a block is outside 1..N-1 or free, or an entry, or a
    block of one row, comes twice. (K * K comparisons: long lists are handed over in tiles.)
    """
    num_rows, _, num_blocks = _check(pool, tables, block_size)
    used, ok = _check_places(tables, rows, columns)
    owned = blocks_needed(gather(tables.length, rows), block_size)
    vacant = gather(tables.blocks, (rows, columns)) == 0
    known = jnp.where(used & (ids >= 1) & (ids < num_blocks), ids, num_blocks)
    owners = gather(pool.refcount, known)
    same = (rows[:, None] == rows[None, :]) & ((ids[:, None] == ids[None, :]) | (columns[:, None] == columns[None, :]))
    twice = jnp.any(jnp.tril(same, -1), axis=1)
    ok = ok & jnp.all(~used | ((columns < owned) & vacant & (owners > 0) & ~twice))

    used = used & ok
    refcount = scatter_add(pool.refcount, jnp.where(used, ids, num_blocks), 1)
    blocks = scatter(tables.blocks, (jnp.where(used, rows, num_rows), columns), ids)
    return pool._replace(refcount=refcount), tables._replace(blocks=blocks), ok


def fork(
    pool: BlockPool, tables: BlockTables, parent: jax.Array, *, block_size: int
) -> tuple[BlockPool, BlockTables, jax.Array]:
    """Make row s a copy of row `parent[s]` that shares all its blocks, the partly filled last one included.

    `parent` i32[S]; -1 leaves a row alone. Rows may have several children. Returns (pool, tables, ok bool[]).
    Before either of two rows that share their last block appends to it: `copy_on_write`.

    ok is False and nothing changes where a parent is outside -1..S-1 or empty, or a child is not empty.
    """
    num_rows, max_blocks, num_blocks = _check(pool, tables, block_size, parent=parent)
    column = jnp.arange(max_blocks, dtype=jnp.int32)
    child = parent != -1
    source = jnp.where((parent >= 0) & (parent < num_rows), parent, num_rows)
    length = gather(tables.length, source)
    ok = jnp.all(~child | ((tables.length == 0) & (length > 0)))
    child = child & ok

    def copy_rows(rows: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        refcount, table = state
        # A parent is never a child (one is empty, the other is not): its row is as it was.
        ids = gather(table, gather(source, rows, fill=num_rows))
        owned = blocks_needed(gather(length, rows), block_size)
        kept = (column < owned[:, None]) & (ids > 0)
        refcount = scatter_add(refcount, jnp.where(kept, ids, num_blocks), 1)
        return refcount, scatter(table, rows, ids)

    refcount, table = over_tiles(child, _TILE, copy_rows, (pool.refcount, tables.blocks))
    tables = BlockTables(table, jnp.where(child, length, tables.length))
    return pool._replace(refcount=refcount), tables, ok


def reorder(
    pool: BlockPool, tables: BlockTables, source: jax.Array, *, block_size: int
) -> tuple[BlockPool, BlockTables]:
    """Row s becomes what row `source[s]` was, all its blocks shared; `source` i32[S], s itself for rows that stay.

    Beam search: a row may be taken over by several or by none, and blocks that nobody owns any more become free.
    Cannot fail; a source outside 0..S-1 counts as s.
    """
    num_rows, max_blocks, num_blocks = _check(pool, tables, block_size, source=source)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    source = jnp.where((source >= 0) & (source < num_rows), source, row)
    moved = source != row
    owned = blocks_needed(tables.length, block_size)
    column = jnp.arange(max_blocks, dtype=jnp.int32)

    def live(rows: jax.Array) -> jax.Array:
        """Block ids of rows i32[_TILE] of the old tables, N where there is none."""
        ids = gather(tables.blocks, rows)
        inside = column < gather(owned, rows)[:, None]
        return jnp.where(inside & (ids > 0), ids, num_blocks).reshape(-1)

    def take(rows: jax.Array, refcount: jax.Array) -> jax.Array:
        rows = gather(source, rows, fill=num_rows)
        return scatter_add(refcount, live(rows), 1)

    # All references are taken before any is dropped, so that no block is freed on its way from row to row.
    pool = pool._replace(refcount=over_tiles(moved, _TILE, take, pool.refcount))
    pool = over_tiles(moved & (pool.num_free >= 0), _TILE, lambda rows, pool: _drop_references(pool, live(rows)), pool)
    blocks = lax.cond(
        jnp.any(moved),
        lambda: gather(tables.blocks, source, mode="promise_in_bounds"),
        lambda: tables.blocks,
    )
    return pool, BlockTables(blocks, gather(tables.length, source, mode="promise_in_bounds"))


def copy_on_write(
    pool: BlockPool, tables: BlockTables, mask: jax.Array, *, block_size: int
) -> tuple[BlockPool, BlockTables, jax.Array, jax.Array, jax.Array]:
    """Give the rows in `mask` bool[S], about to append at `length`, a last block of their own.

    Returns (pool, tables, src i32[S], dst i32[S], ok bool[]). Page dst[s] must become a copy of page src[s]
    before any of these rows is written; (0, 0) where there is nothing to copy. A row needs no copy where
    `length` is a multiple of `block_size` (it begins a new block) or the block has one owner.

    Where the rows of `mask` are all the owners of a block, the first of them keeps it: n forks that write
    together cost n - 1 copies and leave no block behind. Where somebody else owns it too (a row that does not
    write, the prefix cache), each of them gets a copy.

    ok is False, nothing changes and nothing is to be copied where the pool has too few free blocks.
    """
    num_rows, max_blocks, num_blocks = _check(pool, tables, block_size, mask=mask)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    column, used = lax.div(tables.length, block_size), lax.rem(tables.length, block_size)
    column = jnp.where(mask & (used != 0), column, max_blocks)
    src = gather(tables.blocks, (row, column))
    owners = gather(pool.refcount, src)
    shared = owners > 1

    def without_keepers(shared: jax.Array) -> jax.Array:
        same = (src[:, None] == src[None, :]) & shared[None, :]
        writers = jnp.sum(same, axis=1, dtype=jnp.int32)
        is_first = ~jnp.any(same & (row[None, :] < row[:, None]), axis=1)
        return shared & ~((writers == owners) & is_first)

    copies = lax.cond(jnp.any(shared), without_keepers, lambda shared: shared, shared)
    count = jnp.cumsum(copies, dtype=jnp.int32)
    ok = count[-1] <= pool.num_free
    copies = copies & ok
    top = pool.num_free - count  # the n-th copy, from 1, is free[num_free - n]
    dst = gather(pool.free, jnp.where(copies, top, num_blocks))
    refcount = scatter_add(pool.refcount, jnp.where(copies, src, num_blocks), -1)
    refcount = scatter(refcount, jnp.where(copies, dst, num_blocks), 1)
    blocks = scatter(tables.blocks, (row, jnp.where(copies, column, max_blocks)), dst)
    pool = BlockPool(pool.free, pool.num_free - jnp.where(ok, count[-1], 0), refcount)
    return pool, tables._replace(blocks=blocks), jnp.where(copies, src, 0), dst, ok


def hold(pool: BlockPool, ids: jax.Array) -> tuple[BlockPool, jax.Array]:
    """Add a reference to each block in `ids` i32[K], padded with 0; n of them where an id comes n times.

    How the prefix cache keeps blocks alive. Returns (pool, ok bool[]); ok is False and nothing changes where
    an id is outside 0..N-1 or names a block that is free.
    """
    ids, ok = _check_ids(pool, ids)
    num_blocks = pool.refcount.shape[0]
    owners = gather(pool.refcount, ids, fill=1)
    ok = ok & jnp.all(owners > 0)
    refcount = scatter_add(pool.refcount, jnp.where(ok, ids, num_blocks), 1)
    return pool._replace(refcount=refcount), ok


def drop(pool: BlockPool, ids: jax.Array) -> tuple[BlockPool, jax.Array]:
    """Take a reference from each block in `ids` i32[K], padded with 0; n of them where an id comes n times.

    Blocks nobody owns any more become free. Returns (pool, ok bool[]); ok is False and nothing changes where
    an id is outside 0..N-1 or a block has fewer references than are taken away. The pool cannot tell a hold
    from a table reference: dropping one that was never held is for `audit` to find.
    """
    ids, ok = _check_ids(pool, ids)
    num_blocks = pool.refcount.shape[0]
    # Judge by doing it and looking: counts below zero are undone exactly, nothing was freed yet.
    ids = jnp.where(ok, ids, num_blocks)
    left = scatter_add(pool.refcount, ids, -1)
    ok = ok & jnp.all(gather(left, ids) >= 0)
    left = scatter_add(left, jnp.where(ok, num_blocks, ids), 1)
    return _free_unowned(pool._replace(refcount=left), jnp.where(ok, ids, num_blocks)), ok


def _drop_references(pool: BlockPool, ids: jax.Array) -> BlockPool:
    """Take one reference for every entry of `ids` i32[K]; N means no entry. Frees blocks left with none."""
    refcount = scatter_add(pool.refcount, ids, -1)
    return _free_unowned(pool._replace(refcount=refcount), ids)


def _free_unowned(pool: BlockPool, ids: jax.Array) -> BlockPool:
    """Push the blocks of `ids` i32[K] whose count is now 0, each once however often it comes; N is no entry.

    The count itself serves as scratch to find the first of equal ids: the entries of an unowned block write
    their (negative) tags into it, the least one wins, and the winner sets the count back to 0. (That only the
    winner does orders this write after the reads, which saves a copy of the array.)
    """
    num_blocks, num_ids = pool.refcount.shape[0], ids.shape[0]
    unowned = gather(pool.refcount, ids, fill=1) == 0
    targets = jnp.where(unowned, ids, num_blocks)
    tag = jnp.arange(-num_ids, 0, dtype=jnp.int32)
    refcount = pool.refcount.at[targets].min(tag, mode="drop")
    winner = unowned & (gather(refcount, targets) == tag)
    refcount = scatter(refcount, jnp.where(winner, ids, num_blocks), 0)
    count = jnp.cumsum(winner, dtype=jnp.int32)
    place = jnp.where(winner, pool.num_free + count - 1, num_blocks)
    free = scatter(pool.free, place, ids)
    return BlockPool(free, pool.num_free + count[-1], refcount)


def _check_places(tables: BlockTables, rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Table entries of a host request: (which are no padding bool[K], all inside the tables bool[])."""
    num_rows, max_blocks = tables.blocks.shape
    used = rows != num_rows
    inside = (rows >= 0) & (rows < num_rows) & (columns >= 0) & (columns < max_blocks)
    return used, jnp.all(~used | inside)


def _check_ids(pool: BlockPool, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids of a host request: (padding and out-of-range ids become N, all in range bool[])."""
    if ids.ndim != 1 or ids.dtype != jnp.int32:
        raise ValueError(f"ids must be a vector of int32, got {ids.dtype}{list(ids.shape)}")
    num_blocks = pool.refcount.shape[0]
    known = (ids >= 0) & (ids < num_blocks)
    return jnp.where(known & (ids != 0), ids, num_blocks), jnp.all(known)


def _check(pool: BlockPool, tables: BlockTables, block_size: int, **per_row: jax.Array) -> tuple[int, int, int]:
    """(S, M, N); ValueError at trace time where a per-row argument has the wrong shape or type."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    num_rows, max_blocks = tables.blocks.shape
    for name, value in per_row.items():
        dtype = jnp.bool_ if name == "mask" else jnp.int32
        if value.shape != (num_rows,) or value.dtype != dtype:
            raise ValueError(
                f"{name} must be {jnp.dtype(dtype).name}[{num_rows}], one per row of the tables,"
                f" got {value.dtype}{list(value.shape)}"
            )
    return num_rows, max_blocks, pool.refcount.shape[0]
