"""Static checks shared by the public functions: shapes and dtypes only, so they also run while tracing."""

from __future__ import annotations

import math
from typing import NoReturn

import jax
import jax.numpy as jnp

from pallas_kernels.batch import PagedBatch

PAGE_DTYPES = ("float32", "bfloat16", "uint16")


def fail(name: str, given: object, allowed: str) -> NoReturn:
    raise ValueError(f"{name}: got {given}; allowed is {allowed}")


def require_int(name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
    """Raises `ValueError` unless `x` is int32 of `shape`."""
    if x.shape != shape:
        fail(name, f"shape {x.shape}", f"shape {shape}")
    if x.dtype != jnp.int32:
        fail(name, f"dtype {x.dtype}", "int32")


def check_pages(k_pages: jax.Array, v_pages: jax.Array) -> None:
    """Raises `ValueError` unless both are [N, Hkv, B, D] of one shape and one page dtype."""
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.ndim != 4:
            fail(name, f"shape {pages.shape}", "[num_blocks, kv_heads, block_size, head_dim]")
        if pages.dtype.name not in PAGE_DTYPES:
            fail(name, f"dtype {pages.dtype}", f"one of {', '.join(PAGE_DTYPES)} (uint16: bfloat16 bits)")
    if v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        fail(
            "v_pages",
            f"{v_pages.dtype}{v_pages.shape}",
            f"the shape and dtype of k_pages, {k_pages.dtype}{k_pages.shape}",
        )


def check_attention(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: PagedBatch, scale: float) -> None:
    """Raises `ValueError` unless the arguments of `paged_attention` fit together."""
    check_pages(k_pages, v_pages)
    _, kv_heads, _, head_dim = k_pages.shape
    if q.ndim != 3 or q.shape[2] != head_dim:
        fail("q", f"shape {q.shape}", f"[T, Hq, {head_dim}] to fit pages {k_pages.shape}")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        fail("q", f"dtype {q.dtype}", "a float dtype")
    rows, heads = q.shape[:2]
    if heads == 0 or heads % kv_heads:
        fail("q", f"{heads} query heads", f"a positive multiple of the {kv_heads} KV heads")
    if batch.block_tables.ndim != 2:
        fail("block_tables", f"shape {batch.block_tables.shape}", "[R, M]")
    sequences = batch.block_tables.shape[0]
    require_int("block_tables", batch.block_tables, batch.block_tables.shape)
    require_int("kv_lengths", batch.kv_lengths, (sequences,))
    require_int("write_slots", batch.write_slots, (rows,))
    if batch.query_starts is None:
        if rows != sequences:
            fail("q", f"{rows} rows", f"{sequences} rows, one a sequence (query_starts is None)")
        if batch.num_decode is not None:
            fail("num_decode", "an array", "None when query_starts is None")
    else:
        require_int("query_starts", batch.query_starts, (sequences + 1,))
        if batch.num_decode is not None:
            require_int("num_decode", batch.num_decode, ())
    if isinstance(scale, (int, float)) and not math.isfinite(scale):
        fail("scale", scale, "a finite number")
