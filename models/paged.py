"""The decoder's attention over a paged cache."""

import jax

import pallas_kernels
from pallas_kernels import AttentionSpec, KVPages, PagedBatch

from .config import ModelConfig
from .decoder import Attend, Rotary


def init_cache(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: jax.typing.DTypeLike
) -> tuple[KVPages, ...]:
    """Zeroed pages of ``num_blocks`` blocks (block 0 is the null block) per layer, each its own buffer.

    ``dtype``: one of ``pallas_kernels.KV_DTYPES``, or its dtype.
    """
    for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")

    def pages() -> KVPages:
        return pallas_kernels.init_pages(num_blocks, config.num_kv_heads, block_size, config.head_dim, dtype)

    return tuple(pages() for _ in range(config.num_layers))


def cache_shapes(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: jax.typing.DTypeLike, platform: str
) -> tuple[KVPages, ...]:
    """What ``init_cache`` makes on ``platform`` ("cpu", "gpu", "tpu"), as ``jax.ShapeDtypeStruct``s."""
    sizes = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
    return (pallas_kernels.page_shapes(*sizes, dtype, platform),) * config.num_layers


def paged_attend(batch: PagedBatch, backend: str = "auto") -> Attend:
    """An ``attend`` that rotates, writes new keys and values to their slots, then lets the queries read pages."""

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, rotary: Rotary, cache: KVPages, spec: AttentionSpec
    ) -> tuple[jax.Array, KVPages]:
        cache, q = write_cache(cache, q, k, v, rotary, batch, backend)
        return read_cache(cache, q, batch, spec, backend), cache

    return attend


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
