"""The KV pages themselves: how they are stored, written and copied.

A pool of pages is one array `[N, Hkv, B, D]` (blocks, KV heads, tokens per block, head size). One block is one
contiguous chunk, one head's page one contiguous tile. Block 0 is the null block: padding writes go there and
nothing reads it.

On CPU a bfloat16 pool is stored as its bits in uint16: XLA:CPU has no native bfloat16 scatter and would convert
the whole pool to float32 and back around every write. Integers it moves as they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.checks import check_pages, fail, require_int

_STORABLE = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


def storage_dtype(dtype: jax.typing.DTypeLike, platform: str) -> np.dtype:
    """The dtype in which pages of `dtype` (float32 or bfloat16) are stored on `platform` ("cpu", "gpu", ...).

    bfloat16 on "cpu" is stored as uint16 bits (see the module's docstring); all else as itself.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in _STORABLE:
        fail("dtype", dtype, "float32 or bfloat16")
    return np.dtype(np.uint16) if platform == "cpu" and dtype == jnp.bfloat16 else dtype


def init_pages(
    num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Zero pages `[num_blocks, kv_heads, block_size, head_dim]` in the default backend's storage dtype."""
    shape = (num_blocks, kv_heads, block_size, head_dim)
    for name, size in zip(("num_blocks", "kv_heads", "block_size", "head_dim"), shape, strict=True):
        if size < 1:
            fail(name, size, "at least 1")
    return jnp.zeros(shape, storage_dtype(dtype, jax.default_backend()))


def to_storage(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Values as a pool of `dtype` stores them: rounded to bfloat16 and taken as bits for uint16, else cast."""
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def from_storage(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Stored pages as values of `dtype`. bfloat16 bits are the upper half of the float32's bits."""
    if x.dtype != jnp.uint16:
        return x.astype(dtype)
    if dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.bfloat16)
    return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32).astype(dtype)


def write_kv(
    k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, write_slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Stores each row's K and V at its slot; in place when the caller donates the pages.

    Args:
        k_pages, v_pages: [N, Hkv, B, D], float32, bfloat16, or uint16 (bfloat16 bits).
        k, v: [T, Hkv, D] of any float dtype; rounded to the pages' dtype.
        write_slots: i32[T], `block * B + offset`. Real rows' slots are distinct; padding rows share block 0,
            where the surviving value is unspecified. A slot outside the pool is dropped.

    Returns:
        (k_pages, v_pages), same shapes and dtypes.
    """
    check_pages(k_pages, v_pages)
    _, kv_heads, block_size, head_dim = k_pages.shape
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 3 or x.shape[1:] != (kv_heads, head_dim):
            fail(name, f"shape {x.shape}", f"[T, {kv_heads}, {head_dim}] to fit pages {k_pages.shape}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            fail(name, f"dtype {x.dtype}", "a float dtype")
    if k.shape != v.shape:
        fail("v", f"shape {v.shape}", f"the shape of k, {k.shape}")
    require_int("write_slots", write_slots, (k.shape[0],))

    block, offset = write_slots // block_size, write_slots % block_size

    def put(pages: jax.Array, x: jax.Array) -> jax.Array:
        return pages.at[block, :, offset, :].set(to_storage(x, pages.dtype), mode="drop")

    return put(k_pages, k), put(v_pages, v)


def copy_blocks(pages: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    """Copies block `src[i]` over block `dst[i]` for each i (copy-on-write); in place when `pages` is donated.

    Args:
        pages: [N, Hkv, B, D].
        src, dst: i32[C]. All sources are read before any destination is written. `(0, 0)` is a no-op, the
            padding of a shorter list. Destinations other than 0 are distinct.
    """
    if pages.ndim != 4:
        fail("pages", f"shape {pages.shape}", "[N, Hkv, B, D]")
    if src.ndim != 1:
        fail("src", f"shape {src.shape}", "[C]")
    require_int("src", src, src.shape)
    require_int("dst", dst, src.shape)
    blocks = pages.at[src].get(mode="promise_in_bounds")
    return pages.at[dst].set(blocks, mode="drop")
