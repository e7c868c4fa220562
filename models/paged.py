"""The decoder's attention over a paged cache."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import AttentionSpec, KVPages, PagedBatch

from .config import ModelConfig
from .decoder import Attend, Layer, Rotary
from .runs import find_runs

MAX_SLOTS = 2**31 - 1


def init_cache(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: jax.typing.DTypeLike,
    runs: Sequence[int] | None = None,
) -> tuple[KVPages, ...]:
    """Zeroed pages of ``num_blocks`` blocks (block 0 is the null block) for each run of layers, each its own buffer.

    ``runs``: layers of each (default: one); a run of L has pages [L N, ...], a layer's blocks after the other's.
    ``dtype``: one of ``pallas_kernels.KV_DTYPES``, or its dtype.
    Raises ValueError for sizes below 1, and for a run with more slots than an int32 can number.
    """
    for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")

    runs = find_runs(config, stacked=False) if runs is None else runs
    if max(runs) * num_blocks * block_size > MAX_SLOTS:
        raise ValueError(
            f"num_blocks={num_blocks} of {block_size} tokens in {max(runs)} layers of one run are more than "
            f"the {MAX_SLOTS} slots that can be numbered"
        )

    def pages(layers: int) -> KVPages:
        return pallas_kernels.init_pages(layers * num_blocks, config.num_kv_heads, block_size, config.head_dim, dtype)

    return tuple(pages(layers) for layers in runs)


def cache_shapes(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: jax.typing.DTypeLike, platform: str
) -> tuple[KVPages, ...]:
    """What ``init_cache`` makes on ``platform`` ("cpu", "gpu", "tpu"), as ``jax.ShapeDtypeStruct``s."""
    sizes = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
    return (pallas_kernels.page_shapes(*sizes, dtype, platform),) * config.num_layers


def paged_attend(batch: PagedBatch, num_blocks: int, backend: str = "auto") -> Attend:
    """An ``attend`` that rotates, writes new keys and values to their slots, then lets the queries read pages.

    ``num_blocks``: N, the blocks that ``batch`` tells apart.
    """

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, rotary: Rotary, cache: KVPages, spec: AttentionSpec, layer: Layer
    ) -> tuple[jax.Array, KVPages]:
        own = batch if layer is None else select_layer(batch, layer * num_blocks, cache.k.shape[2])
        cache, q = write_cache(cache, q, k, v, rotary, own, backend)
        return read_cache(cache, q, own, spec, backend), cache

    return attend


def select_layer(batch: PagedBatch, first: jax.Array, block_size: int) -> PagedBatch:
    """The batch with the ids that its blocks have where a layer's begin at ``first`` i32[].

    Padding still goes to block 0 of all, the one that kernels know for the null block.
    """
    slots = batch.write_slots
    return batch._replace(
        block_tables=batch.block_tables + first,
        write_slots=jnp.where(slots < block_size, slots, slots + first * block_size),
    )


def write_cache(
    cache: KVPages,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rotary: Rotary,
    batch: PagedBatch,
    backend: str = "auto",
) -> tuple[KVPages, jax.Array]:
    """Rotate q [T,Hq,D] and k, store k and v [T,Hkv,D]: (cache, q)."""
    return pallas_kernels.rotate_and_write(cache, q, k, v, batch.write_slots, rotary, backend=backend)


def read_cache(
    cache: KVPages, q: jax.Array, batch: PagedBatch, spec: AttentionSpec, backend: str = "auto"
) -> jax.Array:
    """What rotated queries [T,Hq,D] see in the pages, [T,Hq,D]."""
    return pallas_kernels.paged_attention(
        q, cache, batch, scale=spec.scale, window=spec.window, soft_cap=spec.soft_cap, backend=backend
    )
