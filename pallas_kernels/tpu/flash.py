"""Attention of tiles of query rows over pages: the one TPU attention kernel.

The grid is the tiles, in order. Pages are copied to fast memory by the kernel itself, some of them (a *span*) at a time
into one of two buffers, so that one span is on its way while the other is worked on; the first span of the next tile is
on its way while the last of this one is worked on. Tables, lengths and tiles are scalars that are there before the
kernel starts. A tile's queries and results travel by Pallas' own pipeline.

A page is copied with all its heads, one contiguous piece of memory. Scores are kept per head as f32[m, span].
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.batch import PagedBatch
from pallas_kernels.checks import LANES, QUANTISED, fail
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.tiles import Tiles, ceil_div

MASKED = -1e30  # finite, or a tile without a visible key would give inf - inf
SPAN = 256  # keys that are on their way at once, or fewer:
MOST_SPAN_BYTES = 1 << 20  # of keys, and of values
VMEM_LIMIT = 64 << 20  # of 128 MiB: what a kernel may use of fast memory
MAX_TABLES = 1 << 19  # bytes of scalar memory for the block tables
Ref = Any


def sublanes(dtype: jnp.dtype) -> int:
    """Rows of a register tile: 8 of 32 bits, 16 of 16, 32 of 8."""
    return 32 // jnp.dtype(dtype).itemsize


def check_pages_fit(pages: KVPages) -> None:
    """Raises ValueError for pages that the kernels cannot copy: pieces of memory must be whole register tiles."""
    dtype, (_, _, block_size, width) = pages.k.dtype, pages.k.shape
    if dtype.name in ("uint16", "uint8", "float16"):
        fail("pages.k", f"dtype {dtype}", "float32, bfloat16, int8 or float8_e4m3fn with the tpu backend")
    least = LANES if dtype.name in QUANTISED else sublanes(dtype)  # scales of a page are a row of B
    if block_size % least:
        fail("block_size", block_size, f"a multiple of {least} for {dtype} pages with the tpu backend")
    if width % LANES:
        fail("pages.k", f"shape {pages.k.shape}", f"a last axis of a multiple of {LANES} with the tpu backend")


def check_supported(pages: KVPages, batch: PagedBatch) -> None:
    """Raises ValueError for pages or tables that the attention kernel cannot hold."""
    check_pages_fit(pages)
    size = batch.block_tables.size * 4
    if size > MAX_TABLES:
        fail("block_tables", f"{size} bytes", f"at most {MAX_TABLES} with the tpu backend: take larger blocks")


def pages_at_once(pages: KVPages, columns: int) -> int:
    """Pages of a span."""
    page_bytes = pages.k.dtype.itemsize * math.prod(pages.k.shape[1:])
    return max(1, min(SPAN // pages.k.shape[2], MOST_SPAN_BYTES // page_bytes, columns))


class Shape(NamedTuple):
    """The static sizes of a call."""

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    span_pages: int
    queries: int  # rows of a tile's products
    dtype: jnp.dtype  # operands of the products

    @property
    def span(self) -> int:
        return self.span_pages * self.block_size


def attend_tiles(
    q: jax.Array,
    pages: KVPages,
    tables: jax.Array,
    tiles: Tiles,
    group: int,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Each tile's attention over its sequence's pages.

    Args:
        q: [I, Hkv, m, D]; of a tile's m rows, row i is query row `i // group` of the tile.
        pages: see `check_supported`.
        tables: i32[R, M].
        tiles: I of them.
        group: query heads a KV head.
        spec: see there.
        sinks: f32[Hkv, m] or None.
        interpret: run on XLA's operations.

    Returns:
        (out [I, Hkv, m, D] in q's dtype, lse f32[I, Hkv, m] or None); unspecified for places without a tile.
    """
    count, kv_heads, queries, head_dim = q.shape
    block_size, columns = pages.k.shape[2], tables.shape[1]
    out_dtype = q.dtype
    # Quantised numbers and bfloat16 are bfloat16's; whatever else is multiplied in float32.
    narrow = q.dtype == jnp.bfloat16 and pages.k.dtype.name in ("bfloat16", *QUANTISED)
    dtype = jnp.dtype(jnp.bfloat16 if narrow else jnp.float32)
    padded = -(-queries // sublanes(dtype)) * sublanes(dtype)
    q = jnp.pad(q.astype(dtype), ((0, 0), (0, 0), (0, padded - queries), (0, 0)))
    shape = Shape(kv_heads, group, head_dim, block_size, pages_at_once(pages, columns), padded, dtype)
    tile_spec = pl.BlockSpec((1, kv_heads, padded, head_dim), _tile_index)
    in_specs = [tile_spec]
    inputs = [q]
    if sinks is not None:
        sinks = jnp.pad(sinks, ((0, 0), (0, padded - queries)))
        inputs.append(jnp.broadcast_to(sinks[..., None], (kv_heads, padded, LANES)))
        in_specs.append(pl.BlockSpec((kv_heads, padded, LANES), lambda i, *_: (0, 0, 0)))
    pools = jax.tree.leaves(pages)
    in_specs += [pl.BlockSpec(memory_space=pl.ANY)] * len(pools)
    out_specs = [tile_spec]
    out_shapes = [jax.ShapeDtypeStruct(q.shape, out_dtype)]
    if spec.return_lse:
        out_specs.append(pl.BlockSpec((1, kv_heads, padded, LANES), _tile_index))
        out_shapes.append(jax.ShapeDtypeStruct((count, kv_heads, padded, LANES), jnp.float32))
    buffers = [pltpu.VMEM((2, shape.span_pages, *pool.shape[1:]), pool.dtype) for pool in pools]
    num_tiles = jnp.sum(tiles.rows > 0, dtype=jnp.int32).reshape(1)
    results = pl.pallas_call(
        functools.partial(_attend_tile, spec=spec, shape=shape, pools=len(pools), has_sinks=sinks is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(count,),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[
                *buffers,
                pltpu.SemaphoreType.DMA((2, len(pools))),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((kv_heads, padded, head_dim), jnp.float32),
                pltpu.VMEM((kv_heads, padded, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, padded, LANES), jnp.float32),
            ],
        ),
        out_shape=out_shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT),
        interpret=interpret,
        name="paged_attention",
    )(num_tiles, tables, tiles.sequence, tiles.rows, tiles.position, *inputs, *pools)
    out = results[0][:, :, :queries]
    return out, results[1][:, :, :queries, 0] if spec.return_lse else None


def _tile_index(i: jax.Array, num_tiles: Ref, *_: Ref) -> tuple[jax.Array, int, int, int]:
    """Places without a tile stay at the last one, so that nothing is copied for them."""
    return jnp.maximum(jnp.minimum(i, num_tiles[0] - 1), 0), 0, 0, 0


def _attend_tile(
    num_tiles: Ref,
    tables: Ref,
    sequences: Ref,
    counts: Ref,
    positions: Ref,
    q: Ref,
    *refs: Ref,
    spec: AttentionSpec,
    shape: Shape,
    pools: int,
    has_sinks: bool,
) -> None:
    """One tile.

    Scalars: num_tiles [1], tables [R, M], and of the tiles [I]. q [1, Hkv, m, D].
    refs: sinks [Hkv, m, 128] if any; pools (keys, values, and their scales); out [1, Hkv, m, D], lse [1, Hkv, m, 128]
    if asked for; buffers [2, P, ...] of the pools, their semaphores [2, pools], the buffer in turn [1], and the
    softmax: acc [Hkv, m, D], top and total [Hkv, m, 128].
    """
    s = shape
    sinks, refs = (refs[0], refs[1:]) if has_sinks else (None, refs)
    sources, refs = refs[:pools], refs[pools:]
    out, refs = refs[0], refs[1:]
    lse, refs = (refs[0], refs[1:]) if spec.return_lse else (None, refs)
    buffers, (semaphores, turn, acc, top, total) = refs[:pools], refs[pools:]
    tile = pl.program_id(0)

    def pages_of(tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first page a tile reads and one past the last."""
        length = positions[tile] + counts[tile]
        first = jnp.int32(0)
        if spec.window is not None:
            first = lax.div(jnp.maximum(positions[tile] - (spec.window - 1), 0), jnp.int32(s.block_size))
        return first, ceil_div(length, s.block_size)

    def copies(tile: jax.Array, page: jax.Array, last: jax.Array, slot: jax.Array, act: str) -> None:
        """Starts or awaits the copies of a span's pages, page.. up to last, into a buffer."""

        def each(i: jax.Array, _: None) -> None:
            block = tables[sequences[tile], page + i]
            for n, (source, buffer) in enumerate(zip(sources, buffers, strict=True)):
                copy = pltpu.make_async_copy(source.at[block], buffer.at[slot, i], semaphores.at[slot, n])
                copy.start() if act == "start" else copy.wait()

        lax.fori_loop(0, jnp.minimum(last - page, s.span_pages), each, None)

    @pl.when(tile == 0)
    def _() -> None:
        turn[0] = 0

        @pl.when(num_tiles[0] > 0)
        def _() -> None:
            copies(tile, *pages_of(tile), jnp.int32(0), "start")

    @pl.when(tile < num_tiles[0])
    def _() -> None:
        first, last = pages_of(tile)
        spans = ceil_div(last - first, s.span_pages)
        length = positions[tile] + counts[tile]
        lowest = jnp.int32(0) if spec.window is None else positions[tile] - (spec.window - 1)
        acc[...] = jnp.zeros_like(acc)
        top[...] = jnp.full_like(top, MASKED)
        total[...] = jnp.zeros_like(total)
        row = lax.div(lax.broadcasted_iota(jnp.int32, (s.queries, s.span), 0), jnp.int32(s.group))
        position = positions[tile] + row

        def step(i: jax.Array, slot: jax.Array) -> jax.Array:
            page = first + i * s.span_pages
            other = 1 - slot

            @pl.when(i + 1 < spans)
            def _() -> None:
                copies(tile, page + s.span_pages, last, other, "start")

            @pl.when((i + 1 == spans) & (tile + 1 < num_tiles[0]))
            def _() -> None:
                copies(tile + 1, *pages_of(tile + 1), other, "start")

            copies(tile, page, last, slot, "wait")
            begin = page * s.block_size
            key = begin + lax.broadcasted_iota(jnp.int32, (s.queries, s.span), 1)
            visible = (key <= position) & (key < length)
            if spec.window is not None:
                visible &= key > position - spec.window
            scales = [_spread_scales(buffer.at[slot], lowest - begin, length - begin, s) for buffer in buffers[2:]]
            for head in range(s.kv_heads):
                k = _numbers(buffers[0], slot, head, s)
                v = _numbers(buffers[1], slot, head, s)
                place = begin + lax.broadcasted_iota(jnp.int32, v.shape, 0)
                v = jnp.where((place >= lowest) & (place < length), v, jnp.zeros_like(v))  # the rest may be NaN
                _attend_head(q, k, v, visible, [x[head] for x in scales], head, acc, top, total, spec, s)
            return other

        turn[0] = lax.fori_loop(0, spans, step, turn[0])
        for head in range(s.kv_heads):
            highest, denominator, value = top[head][:, :1], total[head][:, :1], acc[head]
            if sinks is not None:
                sink = sinks[head][:, :1]
                higher = jnp.maximum(highest, sink)
                rescale = jnp.exp(highest - higher)
                highest, denominator = higher, denominator * rescale + jnp.exp(sink - higher)
                value = value * rescale
            out[0, head] = (value / denominator).astype(out.dtype)
            if lse is not None:
                lse[0, head] = jnp.broadcast_to(highest + jnp.log(denominator), (s.queries, LANES))


def _numbers(buffer: Ref, slot: jax.Array, head: int, s: Shape) -> jax.Array:
    """A head's keys or values in a buffer [2, P, Hkv, B, D]: [P * B, D] as the products take them."""
    x = buffer[slot, :, head]
    if x.dtype != s.dtype:
        x = x.astype(jnp.float32).astype(s.dtype)
    return x.reshape(s.span, s.head_dim)


def _spread_scales(buffer: Ref, first: jax.Array, end: jax.Array, s: Shape) -> list[jax.Array]:
    """Scales [P, Hkv, B] of a span, of which slots first..end-1 count: f32[1, P * B] a head, 0 elsewhere.

    Numbers that lie in rows are moved into one row by a product with zeros and ones, exactly: HIGHEST keeps all bits.
    """
    wide = lax.broadcasted_iota(jnp.int32, (s.block_size, s.span), 1)
    narrow = lax.broadcasted_iota(jnp.int32, (s.block_size, s.span), 0)
    spread = (lax.rem(wide, jnp.int32(s.block_size)) == narrow).astype(jnp.float32)
    page_of = lax.div(lax.broadcasted_iota(jnp.int32, (s.kv_heads, s.span), 1), jnp.int32(s.block_size))
    slot_in_page = lax.broadcasted_iota(jnp.int32, (s.kv_heads, s.block_size), 1)
    rows = jnp.zeros((s.kv_heads, s.span), jnp.float32)
    for page in range(s.span_pages):
        place = page * s.block_size + slot_in_page
        some = jnp.where((place >= first) & (place < end), buffer[page], 0.0)
        moved = lax.dot_general(
            some,
            spread,
            (((1,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        rows = jnp.where(page_of == page, moved, rows)
    return [rows[head : head + 1] for head in range(s.kv_heads)]


def _attend_head(
    q: Ref,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    scales: list[jax.Array],
    head: int,
    acc: Ref,
    top: Ref,
    total: Ref,
    spec: AttentionSpec,
    s: Shape,
) -> None:
    """Adds a span to the running softmax of one head. k, v [span, D], visible bool[m, span], scales f32[1, span]."""
    precision = lax.Precision.HIGHEST if s.dtype == jnp.float32 else None
    scores = lax.dot_general(
        q[0, head], k, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    scores = scores * spec.scale
    if scales:
        scores = scores * scales[0]
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    scores = jnp.where(visible, scores, MASKED)
    before = top[head][:, :1]
    highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - highest)
    rescale = jnp.exp(before - highest)
    top[head] = jnp.broadcast_to(highest, (s.queries, LANES))
    denominator = total[head][:, :1] * rescale + jnp.sum(weights, axis=1, keepdims=True)
    total[head] = jnp.broadcast_to(denominator, (s.queries, LANES))
    if scales:
        weights = weights * scales[1]
    acc[head] = acc[head] * rescale + lax.dot_general(
        weights.astype(s.dtype), v, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
