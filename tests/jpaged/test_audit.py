"""The audit finds each kind of damage, by name, and nothing else."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.allocator import BlockPool, BlockTables, fork, grow, hold, init_pool, init_tables
from jpaged.audit import INVARIANTS, AllocatorError, audit, check

SIZE = 4
run = jax.jit(functools.partial(audit, block_size=SIZE))


def healthy() -> tuple[BlockPool, BlockTables, np.ndarray, np.ndarray]:
    """Rows 0 and 2 share blocks 1 and 2 (the last not full), row 1 owns 3 and 4, the cache holds 3."""
    pool, tables = init_pool(10), init_tables(4, 3)
    length = jnp.array([6, 8, 0, 0], jnp.int32)
    pool, tables, _ = grow(pool, tables, length, block_size=SIZE, max_new_blocks=2)
    pool, tables, _ = fork(pool, tables, jnp.array([-1, -1, 0, -1], jnp.int32), block_size=SIZE)
    pool, _ = hold(pool, jnp.array([3, 0], jnp.int32))
    return (
        pool,
        tables,
        np.bincount([3], minlength=10).astype(np.int32),
        np.array([False, True, False, False]),
    )


def test_nothing_to_find() -> None:
    pool, tables, holds, writing = healthy()
    counts = run(pool, tables, holds, writing=writing)
    assert counts.shape == (len(INVARIANTS),) and not np.asarray(counts).any()
    check(counts)


DAMAGE = {
    "null_block": lambda p, t: (p._replace(refcount=p.refcount.at[0].set(1)), t),
    "num_free": lambda p, t: (p._replace(num_free=jnp.int32(-1)), t),
    "free_range": lambda p, t: (p._replace(free=p.free.at[0].set(0)), t),
    "free_twice": lambda p, t: (p._replace(free=p.free.at[0].set(p.free[1])), t),
    "free_referenced": lambda p, t: (p._replace(free=p.free.at[0].set(1)), t),
    "leaked": lambda p, t: (p._replace(num_free=p.num_free - 1), t),
    "refcount": lambda p, t: (p._replace(refcount=p.refcount.at[1].add(1)), t),
    "length": lambda p, t: (p, t._replace(length=t.length.at[3].set(-1))),
    "table_range": lambda p, t: (p, t._replace(blocks=t.blocks.at[1, 0].set(10))),
    "table_twice": lambda p, t: (p, t._replace(blocks=t.blocks.at[1, 0].set(4))),
    "table_tail": lambda p, t: (p, t._replace(blocks=t.blocks.at[3, 2].set(5))),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_by_name(name: str) -> None:
    pool, tables, holds, writing = healthy()
    pool, tables = DAMAGE[name](pool, tables)
    counts = dict(zip(INVARIANTS, run(pool, tables, holds, writing=writing).tolist(), strict=True))
    assert counts[name] >= 1
    with pytest.raises(AllocatorError, match=re.escape(f"{counts[name]} {INVARIANTS[name]}")):
        check(np.array(list(counts.values())))


def test_a_write_to_a_shared_block_is_found() -> None:
    pool, tables, holds, _ = healthy()
    counts = run(pool, tables, holds, writing=np.array([True, True, True, True]))
    assert dict(zip(INVARIANTS, counts.tolist(), strict=True))["shared_write"] == 2  # rows 0 and 2
    assert int(counts.sum()) == 2


def test_a_hold_that_the_cache_does_not_know_of_is_found() -> None:
    pool, tables, _, _ = healthy()
    counts = run(pool, tables)
    assert dict(zip(INVARIANTS, counts.tolist(), strict=True))["refcount"] == int(counts.sum()) == 1
