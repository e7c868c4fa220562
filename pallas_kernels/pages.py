"""The KV pages themselves: one layer's pool, written and copied. How numbers are stored in them: `storage`.

A pool of pages is one array `[N, Hkv, B, D]` (blocks, KV heads, tokens per block, head size) for K and one for V. One
block is one contiguous chunk, one head's page one contiguous tile. Block 0 is the null block: padding writes go there
and nothing reads it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.checks import QUANTISED, check_pages, fail, require_int
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


def init_pages(num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: jax.typing.DTypeLike) -> KVPages:
    """Zero pages of `num_blocks` blocks, in the default backend's storage dtype for `dtype`.

    `dtype`: "float32", "bfloat16", "float16", "int8" or "fp8" (float8_e4m3fn), or one of those dtypes.
    """
    shape = (num_blocks, kv_heads, block_size, head_dim)
    for name, size in zip(("num_blocks", "kv_heads", "block_size", "head_dim"), shape, strict=True):
        if size < 1:
            fail(name, size, "at least 1")
    stored = storage_dtype(dtype, jax.default_backend())
    if stored.name not in QUANTISED:
        return KVPages(jnp.zeros(shape, stored), jnp.zeros(shape, stored))
    scales = (jnp.zeros(shape[:3], jnp.float32) for _ in range(2))
    return KVPages(jnp.zeros(shape, stored), jnp.zeros(shape, stored), *scales)


def write_kv(pages: KVPages, k: jax.Array, v: jax.Array, write_slots: jax.Array) -> KVPages:
    """Stores each row's K and V at its slot; in place when the caller donates the pages.

    Args:
        pages: of any dtype; values are rounded to it, or quantised (see `storage`).
        k, v: [T, Hkv, D] of any float dtype.
        write_slots: i32[T], `block * B + offset`. Real rows' slots are distinct; padding rows share block 0,
            where the surviving value is unspecified. A slot outside the pool is dropped.

    Returns:
        The pages, same shapes and dtypes.
    """
    check_pages(pages)
    _, kv_heads, block_size, head_dim = pages.k.shape
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 3 or x.shape[1:] != (kv_heads, head_dim):
            fail(name, f"shape {x.shape}", f"[T, {kv_heads}, {head_dim}] to fit pages {pages.k.shape}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            fail(name, f"dtype {x.dtype}", "a float dtype")
    if k.shape != v.shape:
        fail("v", f"shape {v.shape}", f"the shape of k, {k.shape}")
    require_int("write_slots", write_slots, (k.shape[0],))

    block, offset = write_slots // block_size, write_slots % block_size

    def put(pool: jax.Array, rows: jax.Array) -> jax.Array:
        return pool.at[block, :, offset].set(rows, mode="drop")

    dtype = pages.k.dtype
    if pages.k_scales is None or pages.v_scales is None:
        return KVPages(put(pages.k, to_storage(k, dtype)), put(pages.v, to_storage(v, dtype)))
    (k, k_scales), (v, v_scales) = quantise(k, dtype), quantise(v, dtype)
    return KVPages(put(pages.k, k), put(pages.v, v), put(pages.k_scales, k_scales), put(pages.v_scales, v_scales))


def copy_blocks(pages: KVPages, src: jax.Array, dst: jax.Array) -> KVPages:
    """Copies block `src[i]` over block `dst[i]`, scales included, for each i (copy-on-write); in place if donated.

    Args:
        pages: of any dtype.
        src, dst: i32[C]. All sources are read before any destination is written. `(0, 0)` is a no-op, the
            padding of a shorter list. Destinations other than 0 are distinct.
    """
    check_pages(pages)
    if src.ndim != 1:
        fail("src", f"shape {src.shape}", "[C]")
    require_int("src", src, src.shape)
    require_int("dst", dst, src.shape)
    return jax.tree.map(lambda pool: pool.at[dst].set(pool.at[src].get(mode="promise_in_bounds"), mode="drop"), pages)
