"""Invariants of the allocator, all in one function: tests run it after every operation, the engine when idle.

A violation is a bug in this project, never a user's mistake: a block leaked, or two sequences may write to
the same one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.allocator import BlockPool, BlockTables, blocks_needed
from pallas_kernels.indexing import gather, scatter_add

INVARIANTS = {
    "null_block": "references to the null block (block 0)",
    "num_free": "num_free outside 0..N-1",
    "free_range": "entries of the free stack outside 1..N-1",
    "free_twice": "blocks that are in the free stack more than once",
    "free_referenced": "free blocks with a reference count",
    "leaked": "blocks that are neither free nor referenced",
    "refcount": "blocks whose count is not their table references plus cache holds",
    "length": "rows with a length outside 0..M * block_size",
    "table_range": "live table entries outside 1..N-1",
    "table_twice": "live table entries that repeat an earlier one of their row",
    "table_tail": "table entries past the live ones that are not 0",
    "shared_write": "rows about to append to a block that has another owner",
}


class AllocatorError(RuntimeError):
    """The allocator's state is inconsistent."""


def audit(
    pool: BlockPool,
    tables: BlockTables,
    holds: jax.Array | None = None,
    *,
    block_size: int,
    writing: jax.Array | None = None,
    slides: bool = False,
) -> jax.Array:
    """Violations of each of `INVARIANTS`, in their order: i32[12]; all zero is right. Jit-able.

    holds    i32[N], references that the prefix cache has to each block; None: it has none
    writing  bool[S], rows about to append at `length` (after `copy_on_write`); None: none are
    slides   whether rows may have given up their first entries
    """
    num_blocks, (num_rows, max_blocks) = pool.refcount.shape[0], tables.blocks.shape
    zeros = jnp.zeros(num_blocks, jnp.int32)
    ids = jnp.arange(num_blocks, dtype=jnp.int32)
    column = jnp.arange(max_blocks, dtype=jnp.int32)

    in_stack = ids < pool.num_free
    free_known = (pool.free >= 1) & (pool.free < num_blocks)
    times_free = scatter_add(zeros, jnp.where(in_stack & free_known, pool.free, num_blocks), 1)

    owned = blocks_needed(jnp.clip(tables.length, 0, max_blocks * block_size), block_size)
    live = column < owned[:, None]
    if slides:
        live &= jnp.cumsum(tables.blocks != 0, axis=1) > 0
    known = (tables.blocks >= 1) & (tables.blocks < num_blocks)
    references = scatter_add(zeros, jnp.where(live & known, tables.blocks, num_blocks), 1)
    references = references if holds is None else references + holds

    earlier = (column[None, :] < column[:, None]) & live[:, None, :]
    repeats = live & jnp.any((tables.blocks[:, :, None] == tables.blocks[:, None, :]) & earlier, axis=2)

    if writing is None:
        shared_write = jnp.zeros(num_rows, bool)
    else:
        inside = writing & (tables.length % block_size != 0)
        target = jnp.where(inside, tables.length // block_size, max_blocks)
        target = gather(tables.blocks, (jnp.arange(num_rows), target))
        shared_write = inside & (gather(pool.refcount, target, mode="clip") != 1)

    violations = {
        "null_block": (pool.refcount[0] != 0) | (references[0] != 0),
        "num_free": (pool.num_free < 0) | (pool.num_free >= num_blocks),
        "free_range": in_stack & ~free_known,
        "free_twice": times_free > 1,
        "free_referenced": (times_free > 0) & (pool.refcount != 0),
        "leaked": (ids > 0) & (times_free == 0) & (pool.refcount == 0),
        "refcount": pool.refcount != references,
        "length": (tables.length < 0) | (tables.length > max_blocks * block_size),
        "table_range": live & ~known,
        "table_twice": repeats,
        "table_tail": ~live & (tables.blocks != 0),
        "shared_write": shared_write,
    }
    return jnp.stack([jnp.sum(violations[name], dtype=jnp.int32) for name in INVARIANTS])


def check(violations: jax.Array | np.ndarray) -> None:
    """AllocatorError that says what is wrong and how often, unless all `violations` of `audit` are 0."""
    faults = [f"{n} {text}" for n, text in zip(np.asarray(violations), INVARIANTS.values(), strict=True) if n]
    if faults:
        raise AllocatorError("the block allocator is inconsistent: " + "; ".join(faults))
