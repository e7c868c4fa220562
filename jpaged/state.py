"""Everything the engine keeps on the device: one pytree, donated to every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jpaged_models import KVPages, ModelConfig, init_cache

from jpaged.allocator import BlockPool, BlockTables, init_pool, init_tables
from jpaged.beams import BeamState, init_beams
from jpaged.config import EngineConfig
from jpaged.control_rows import init_controls
from jpaged.controls import Controls
from jpaged.named_blocks import NamedBlocks, init_names
from jpaged.plan import SAMPLING, Plan
from jpaged.sampling import SamplingState, init_sampling
from jpaged.stats import BlockCounts
from pallas_kernels.indexing import gather


class SlotState(NamedTuple):
    """What each slot's request needs to go on without the host."""

    sampling: SamplingState  # [S] each
    last_token: jax.Array  # i32[S]  sampled, not yet in the cache
    features: jax.Array  # i32[S]  bits of Feature
    left: jax.Array  # i32[S]  tokens it may still generate; 0: finished or empty
    stop_ids: jax.Array  # i32[S, E]  -1: none


class EngineState(NamedTuple):
    cache: tuple[KVPages, ...]  # one a run of L layers: K and V [L N, Hkv, B, D], and scales if they are quantised
    pool: BlockPool
    tables: BlockTables
    named: NamedBlocks
    beams: BeamState
    slots: SlotState
    controls: Controls


def init_state(
    model: ModelConfig, config: EngineConfig, kv_dtype: str, runs: Sequence[int] | None = None
) -> EngineState:
    """Zeroed pages of kv_dtype for runs of layers (see `init_cache`), a full pool, empty tables and slots."""
    slots = config.max_num_seqs
    return EngineState(
        init_cache(model, config.num_blocks, config.block_size, kv_dtype, runs),
        init_pool(config.num_blocks),
        init_tables(slots, config.max_blocks_per_seq),
        init_names(config.num_names, config.num_blocks),
        init_beams(slots),
        SlotState(
            init_sampling(slots),
            last_token=jnp.zeros(slots, jnp.int32),
            features=jnp.zeros(slots, jnp.int32),
            left=jnp.zeros(slots, jnp.int32),
            stop_ids=jnp.full((slots, config.max_stop_ids), -1, jnp.int32),
        ),
        jax.device_put(init_controls(model.vocab_size, config)),  # jnp.asarray would compile a copy for each
    )


def admit(slots: SlotState, plan: Plan) -> SlotState:
    """Release's and admission's part in the slots: the old request is forgotten, the new one written over it."""
    rows = plan.admit  # i32[S, 9 + E]
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
        choose(rows[:, 8], slots.features),
        choose(rows[:, 7], jnp.where(plan.release, 0, slots.left)),
        choose(rows[:, SAMPLING:], slots.stop_ids),
    )


def count_blocks(pool: BlockPool, tables: BlockTables, named: NamedBlocks, *, block_size: int) -> BlockCounts:
    """Count the pool's blocks by state: one pass over the counts of owners, without a scatter."""
    owners = pool.refcount - named.held  # sequences that have the block
    used = jnp.sum(owners > 0, dtype=jnp.int32)
    # Only last blocks have room left. Sequences that share one share its empty slots too.
    in_last = lax.rem(tables.length, block_size)  # tokens, 0 where the last block is full
    last = jnp.where(in_last != 0, lax.div(tables.length, block_size), tables.blocks.shape[1])
    block = gather(tables.blocks, (jnp.arange(last.shape[0]), last))
    room = jnp.where(in_last != 0, block_size - in_last, 0)
    waste = jnp.sum(room / jnp.maximum(gather(owners, block, mode="clip"), 1))
    return BlockCounts(
        used=used,
        cached=jnp.sum((owners == 0) & (named.held > 0), dtype=jnp.int32),
        shared=jnp.sum(owners > 1, dtype=jnp.int32),
        free=pool.num_free,
        entries=jnp.sum(owners, dtype=jnp.int32),
        tokens=used * block_size - jnp.round(waste).astype(jnp.int32),
    )
