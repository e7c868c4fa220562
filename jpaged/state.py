"""Everything the engine keeps on the device: one pytree, donated to every step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jpaged_models import KVPages, ModelConfig, init_cache

from jpaged.allocator import BlockPool, BlockTables, blocks_needed, init_pool, init_tables
from jpaged.config import EngineConfig
from jpaged.plan import SAMPLING, Plan
from jpaged.sampling import SamplingState


class SlotState(NamedTuple):
    """What each slot's request needs to go on without the host."""

    sampling: SamplingState  # [S] each
    last_token: jax.Array  # i32[S]  sampled, not yet in the cache
    left: jax.Array  # i32[S]  tokens it may still generate; 0: finished or empty
    stop_ids: jax.Array  # i32[S, E]  -1: none


class EngineState(NamedTuple):
    cache: tuple[KVPages, ...]  # one a layer: K and V [N, Hkv, B, D], and scales if they are quantised
    pool: BlockPool
    tables: BlockTables
    slots: SlotState


class BlockCounts(NamedTuple):
    """Blocks by state, and tokens in the tables; i32[] each."""

    used: jax.Array  # referenced, whoever by
    cached: jax.Array  # referenced, but by no table
    shared: jax.Array  # referenced more than once
    free: jax.Array
    tokens: jax.Array  # over all tables; a shared block's tokens count for each


def init_state(model: ModelConfig, config: EngineConfig, kv_dtype: str) -> EngineState:
    """Zeroed pages of kv_dtype (see `init_cache`), a full pool, empty tables and slots."""
    slots = config.max_num_seqs
    return EngineState(
        init_cache(model, config.num_blocks, config.block_size, kv_dtype),
        init_pool(config.num_blocks),
        init_tables(slots, config.max_blocks_per_seq),
        SlotState(
            SamplingState(
                temperature=jnp.zeros(slots, jnp.float32),
                top_k=jnp.zeros(slots, jnp.int32),
                top_p=jnp.ones(slots, jnp.float32),
                min_p=jnp.zeros(slots, jnp.float32),
                seed=jnp.zeros((slots, 2), jnp.uint32),
            ),
            last_token=jnp.zeros(slots, jnp.int32),
            left=jnp.zeros(slots, jnp.int32),
            stop_ids=jnp.full((slots, config.max_stop_ids), -1, jnp.int32),
        ),
    )


def admit(slots: SlotState, plan: Plan) -> SlotState:
    """Release's and admission's part in the slots: the old request is forgotten, the new one written over it."""
    rows = plan.admit  # i32[S, 8 + E]
    new = rows[:, 0] > 0

    def choose(fresh: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(new[:, None] if old.ndim == 2 else new, fresh, old)

    floats = lax.bitcast_convert_type(rows[:, 1:5], jnp.float32)
    sampling = SamplingState(
        temperature=floats[:, 0],
        top_k=rows[:, 2],
        top_p=floats[:, 2],
        min_p=floats[:, 3],
        seed=lax.bitcast_convert_type(rows[:, 5:7], jnp.uint32),
    )
    return SlotState(
        jax.tree.map(choose, sampling, slots.sampling),
        slots.last_token,
        choose(rows[:, 7], jnp.where(plan.release, 0, slots.left)),
        choose(rows[:, SAMPLING:], slots.stop_ids),
    )


def count_blocks(pool: BlockPool, tables: BlockTables, *, block_size: int) -> BlockCounts:
    """Count the pool's blocks by state. Work grows with the pool; the engine calls it for its statistics only."""
    held = blocks_needed(tables.length, block_size)  # [S]
    live = jnp.arange(tables.blocks.shape[1])[None, :] < held[:, None]
    num_blocks = pool.refcount.shape[0]
    in_table = jnp.zeros(num_blocks, bool).at[jnp.where(live, tables.blocks, num_blocks)].set(True, mode="drop")
    used = pool.refcount > 0
    return BlockCounts(
        used=used.sum(dtype=jnp.int32),
        cached=(used & ~in_table).sum(dtype=jnp.int32),
        shared=(pool.refcount > 1).sum(dtype=jnp.int32),
        free=pool.num_free,
        tokens=tables.length.sum(dtype=jnp.int32),
    )
