"""The KV pages themselves: one layer's pool, written and copied. How numbers are stored in them: `storage`.

A pool of pages is one array `[N, Hkv, B, D]` (blocks, KV heads, tokens per block, head size) for K and one for V. One
block is one contiguous chunk, one head's page one contiguous tile. Block 0 is the null block: padding writes go there
and nothing reads it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.checks import LANES, QUANTISED, fail
from pallas_kernels.cpu.library import make_zeros
from pallas_kernels.indexing import gather, scatter
from pallas_kernels.storage import quantise, storage_dtype, to_storage


class KVPages(NamedTuple):
    """One layer's KV pages.

    Attributes:
        k, v: [N, Hkv, B, D] of one dtype: float32, bfloat16, float16, int8 or float8_e4m3fn; or bits: uint16
            (bfloat16) or uint8 (float8_e4m3fn).
        k_scales, v_scales: f32[N, Hkv, B], one a token and KV head, for int8, float8_e4m3fn and uint8: a value is
            the stored number times its scale. None for all other pages.
    """

    k: jax.Array
    v: jax.Array
    k_scales: jax.Array | None = None
    v_scales: jax.Array | None = None


def page_shapes(
    num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: jax.typing.DTypeLike, platform: str
) -> KVPages:
    """The shapes and dtypes of pages on `platform` ("cpu", "gpu", "tpu"): KVPages of jax.ShapeDtypeStruct.

    dtype: "float32", "bfloat16", "float16", "int8" or "fp8" (float8_e4m3fn), or one of those dtypes.
    On TPUs head_dim is rounded up to a multiple of 128: they lay arrays out so anyway, and only so can the kernels copy
    pages as they lie.
    """
    shape = (num_blocks, kv_heads, block_size, head_dim)
    for name, size in zip(("num_blocks", "kv_heads", "block_size", "head_dim"), shape, strict=True):
        if size < 1:
            fail(name, size, "at least 1")
    stored = storage_dtype(dtype, platform)
    if platform == "tpu":
        shape = (*shape[:3], -(-head_dim // LANES) * LANES)
    pool = jax.ShapeDtypeStruct(shape, stored)
    scales = jax.ShapeDtypeStruct(shape[:3], jnp.float32) if stored.name in QUANTISED else None
    return KVPages(pool, pool, scales, scales)  # type: ignore[arg-type]


def init_pages(num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: jax.typing.DTypeLike) -> KVPages:
    """Zero pages of `num_blocks` blocks, as the default backend's platform stores them; see `page_shapes`."""
    shapes = page_shapes(num_blocks, kv_heads, block_size, head_dim, dtype, jax.default_backend())
    return jax.tree.map(lambda x: make_zeros(x.shape, x.dtype), shapes)


def write_kv(pages: KVPages, k: jax.Array, v: jax.Array, write_slots: jax.Array) -> KVPages:
    """`pallas_kernels.write_kv` on XLA's operations."""
    block_size = pages.k.shape[2]
    block, offset = write_slots // block_size, write_slots % block_size

    def put(pool: jax.Array, rows: jax.Array) -> jax.Array:
        return pool.at[block, :, offset].set(rows, mode="drop", wrap_negative_indices=False)

    dtype = pages.k.dtype
    if pages.k_scales is None or pages.v_scales is None:
        return KVPages(put(pages.k, to_storage(k, dtype)), put(pages.v, to_storage(v, dtype)))
    (k, k_scales), (v, v_scales) = quantise(k, dtype), quantise(v, dtype)
    return KVPages(put(pages.k, k), put(pages.v, v), put(pages.k_scales, k_scales), put(pages.v_scales, v_scales))


def rotate(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x [T, heads, D] by cos and sin f32[T, D/2]: dimension i turns with i + D/2 (Hugging Face's pairs)."""
    cos, sin = (t[:, None, :] for t in rotary)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def copy_blocks(pages: KVPages, src: jax.Array, dst: jax.Array) -> KVPages:
    """`pallas_kernels.copy_blocks` on XLA's operations."""
    return jax.tree.map(lambda pool: scatter(pool, dst, gather(pool, src, mode="promise_in_bounds")), pages)


def take_blocks(pages: KVPages, ids: jax.Array) -> KVPages:
    """Pages of the blocks ids i32[C], which are clipped."""
    return jax.tree.map(lambda pool: gather(pool, ids, mode="clip"), pages)
