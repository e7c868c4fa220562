"""Static checks shared by the public functions: shapes and dtypes only, so they also run while tracing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import jax
import jax.numpy as jnp

from pallas_kernels.batch import PagedBatch

if TYPE_CHECKING:
    from pallas_kernels.pages import KVPages

LANES = 128  # columns of a TPU's registers, and of its memory whatever an array's width
QUANTISED = ("int8", "float8_e4m3fn", "uint8")
PAGE_DTYPES = ("float32", "bfloat16", "float16", "uint16", *QUANTISED)
QUERY_DTYPES = ("float32", "bfloat16", "float16")


def fail(name: str, given: object, allowed: str) -> NoReturn:
    raise ValueError(f"{name}: got {given}; allowed is {allowed}")


def require_int(name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
    """Raises `ValueError` unless `x` is int32 of `shape`."""
    if x.shape != shape:
        fail(name, f"shape {x.shape}", f"shape {shape}")
    if x.dtype != jnp.int32:
        fail(name, f"dtype {x.dtype}", "int32")


def fits_width(head_dim: int, width: int) -> bool:
    """Whether heads of so many numbers lie in pages `width` wide: as wide as they are, or the next multiple of 128."""
    return width == head_dim or (head_dim > 0 and width == -(-head_dim // LANES) * LANES)


def check_pages(pages: KVPages) -> None:
    """Raises `ValueError` unless K and V are [N, Hkv, B, D] of one shape and page dtype, with scales if quantised."""
    if not (isinstance(pages, tuple) and len(pages) == 4):
        fail("pages", type(pages).__name__, "KVPages(k, v, k_scales, v_scales)")
    for name, x in (("k", pages.k), ("v", pages.v)):
        if x.ndim != 4:
            fail(f"pages.{name}", f"shape {x.shape}", "[num_blocks, kv_heads, block_size, head_dim]")
        if x.dtype.name not in PAGE_DTYPES:
            bits = "uint16: bfloat16 bits, uint8: float8_e4m3fn bits"
            fail(f"pages.{name}", f"dtype {x.dtype}", f"one of {', '.join(PAGE_DTYPES)} ({bits})")
    if pages.v.shape != pages.k.shape or pages.v.dtype != pages.k.dtype:
        given, wanted = (f"{x.dtype}{x.shape}" for x in (pages.v, pages.k))
        fail("pages.v", given, f"the shape and dtype of pages.k, {wanted}")
    for name, scales in (("k_scales", pages.k_scales), ("v_scales", pages.v_scales)):
        if pages.k.dtype.name not in QUANTISED:
            if scales is not None:
                fail(f"pages.{name}", "an array", f"None for {pages.k.dtype} pages")
        elif scales is None or scales.shape != pages.k.shape[:3] or scales.dtype != jnp.float32:
            given = "None" if scales is None else f"{scales.dtype}{scales.shape}"
            fail(f"pages.{name}", given, f"float32{pages.k.shape[:3]} for {pages.k.dtype} pages")


def check_attention(q: jax.Array, pages: KVPages, batch: PagedBatch, sinks: jax.Array | None) -> None:
    """Raises `ValueError` unless the arrays given to `paged_attention` fit together."""
    check_pages(pages)
    _, kv_heads, _, width = pages.k.shape
    if q.ndim != 3 or not fits_width(q.shape[2], width):
        fail("q", f"shape {q.shape}", f"[T, Hq, {width}] to fit pages {pages.k.shape}")
    if q.dtype.name not in QUERY_DTYPES:
        fail("q", f"dtype {q.dtype}", f"one of {', '.join(QUERY_DTYPES)}")
    rows, heads = q.shape[:2]
    if heads == 0 or heads % kv_heads:
        fail("q", f"{heads} query heads", f"a positive multiple of the {kv_heads} KV heads")
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype != jnp.float32):
        fail("sinks", f"{sinks.dtype}{sinks.shape}", f"None or float32({heads},), one a query head")
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


def check_write(pages: KVPages, k: jax.Array, v: jax.Array, write_slots: jax.Array) -> None:
    """Raises `ValueError` unless the arrays given to `write_kv` fit together."""
    check_pages(pages)
    _, kv_heads, _, width = pages.k.shape
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 3 or x.shape[1] != kv_heads or not fits_width(x.shape[2], width):
            fail(name, f"shape {x.shape}", f"[T, {kv_heads}, {width}] to fit pages {pages.k.shape}")
        if x.dtype.name not in QUERY_DTYPES:
            fail(name, f"dtype {x.dtype}", f"one of {', '.join(QUERY_DTYPES)}")
    if (k.shape, k.dtype) != (v.shape, v.dtype):
        fail("v", f"{v.dtype}{v.shape}", f"the shape and dtype of k, {k.dtype}{k.shape}")
    require_int("write_slots", write_slots, (k.shape[0],))


def check_rotary(q: jax.Array, k: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> None:
    """Raises `ValueError` unless q and the rotary table given to `rotate_and_write` fit k, which fits its pages."""
    rows, _, head_dim = k.shape
    if q.ndim != 3 or (q.shape[0], q.shape[2], q.dtype) != (rows, head_dim, k.dtype):
        fail("q", f"{q.dtype}{q.shape}", f"{k.dtype}({rows}, Hq, {head_dim}) to fit k")
    if head_dim % 2:
        fail("k", f"head size {head_dim}", "an even head size")
    for name, x in zip(("cos", "sin"), rotary, strict=True):
        if x.shape != (rows, head_dim // 2) or x.dtype != jnp.float32:
            fail(name, f"{x.dtype}{x.shape}", f"float32({rows}, {head_dim // 2})")


def check_copy(pages: KVPages, src: jax.Array, dst: jax.Array) -> None:
    """Raises `ValueError` unless the arrays given to `copy_blocks` fit together."""
    check_pages(pages)
    if src.ndim != 1:
        fail("src", f"shape {src.shape}", "[C]")
    require_int("src", src, src.shape)
    require_int("dst", dst, src.shape)
