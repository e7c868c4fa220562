"""The decoder's attention over a paged cache."""

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import PagedBatch

from .config import ModelConfig
from .decoder import Attend

LayerPages = tuple[jax.Array, jax.Array]  # k_pages, v_pages: [N, Hkv, B, D] each


def init_cache(config: ModelConfig, num_blocks: int, block_size: int, dtype: jnp.dtype) -> tuple[LayerPages, ...]:
    """Zeroed pages of ``num_blocks`` blocks (block 0 is the null block) per layer, each its own buffer."""
    for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")

    def pages() -> jax.Array:
        return pallas_kernels.init_pages(num_blocks, config.num_kv_heads, block_size, config.head_dim, dtype)

    return tuple((pages(), pages()) for _ in range(config.num_layers))


def paged_attend(batch: PagedBatch, backend: str = "auto") -> Attend:
    """An ``attend`` that writes new keys and values to their slots, then lets the queries read pages."""

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerPages, scale: float
    ) -> tuple[jax.Array, LayerPages]:
        k_pages, v_pages = pallas_kernels.write_kv(*cache, k, v, batch.write_slots)
        seen = pallas_kernels.paged_attention(q, k_pages, v_pages, batch, scale=scale, backend=backend)
        return seen, (k_pages, v_pages)

    return attend
