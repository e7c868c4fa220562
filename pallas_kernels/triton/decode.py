"""Decode attention in two Triton kernels: flash decoding over balanced pieces of sequences, and their union.

The keys of all sequences are cut into *items* of neighbouring keys of one sequence. How long an item is depends on the
data: long enough to pay, short enough that there are some thousands of them to share out among the multiprocessors, so
neither one long sequence among short ones nor a batch of one leaves the device idle. There are at most R plus
`spare_items` items, which is the grid; programs without an item end at once.

    lengths 300, 0, 70, ...      items of 128 keys
    item       0    1    2    3
    sequence   0    0    0    2
    keys      0..  128.. 256.. 0..

A program takes one item and one KV head, with all its query heads as the rows of one tile: keys and values are read
once for the group. The union of a sequence's items is exact: each comes with the log of its softmax's denominator.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.indexing import gather
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.tiles import arange, ceil_div
from pallas_kernels.triton.choices import LEAST, DecodeTiles, choose_decode, power_of_two
from pallas_kernels.triton.tiles import (
    LOG2_E,
    MASKED,
    Geometry,
    Ref,
    Softmax,
    attend_keys,
    flatten,
    get_geometry,
    load_rows,
    store_rows,
)

UNION = 16  # items that are joined at once


class Items(NamedTuple):
    """Pieces of sequences.

    sequence, first, end: i32[I], the sequence and its keys first..end-1; first == end for no item.
    offsets: i32[R + 1], sequence r has the items offsets[r]..offsets[r + 1] - 1.
    """

    sequence: jax.Array
    first: jax.Array
    end: jax.Array
    offsets: jax.Array


def cut_items(lengths: jax.Array, columns: int, spec: AttentionSpec, geometry: Geometry, sizes: DecodeTiles) -> Items:
    """Items of sequences of lengths i32[R], whose tables have `columns` columns."""
    sequences, span = lengths.shape[0], geometry.span
    least = max(1, sizes.least_keys // span)  # spans an item
    most_keys = columns * geometry.block_size
    if spec.window is not None:
        most_keys = min(most_keys, spec.window)
    spare = min(-(-sizes.programs // geometry.kv_heads), sequences * (-(-most_keys // (span * least)) - 1))
    begin = jnp.zeros_like(lengths) if spec.window is None else jnp.maximum(lengths - spec.window, 0)
    spans = ceil_div(lengths - begin, span)
    each = jnp.maximum(ceil_div(jnp.sum(spans, dtype=jnp.int32), max(spare, 1)), least)  # spans an item
    if spare == 0:
        each = jnp.maximum(each, -(-most_keys // span))
    ends = jnp.cumsum(ceil_div(spans, each), dtype=jnp.int32)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    item = arange(sequences + spare)
    sequence = jnp.searchsorted(ends, item, side="right", method="compare_all").astype(jnp.int32)

    def of_sequence(x: jax.Array) -> jax.Array:
        return gather(x, sequence)

    first = of_sequence(begin) + (item - of_sequence(offsets[:-1])) * each * span
    end = jnp.minimum(first + each * span, of_sequence(lengths))
    real = item < ends[-1]
    return Items(jnp.where(real, sequence, 0), jnp.where(real, first, 0), jnp.where(real, end, 0), offsets)


def decode_attention(
    out: jax.Array | None,
    lse: jax.Array | None,
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    lengths: jax.Array,
    num_decode: jax.Array | None,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    interpret: bool,
    sizes: DecodeTiles | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Each row's attention over its own sequence.

    Args:
        out, lse: results whose rows from `num_decode` on are kept; None together with num_decode: R == T rows, all new.
        q: [T, Hq, D]; row r is sequence r.
        pages: of any dtype.
        block_tables: i32[R, M], R <= T.
        lengths: i32[R], tokens in the cache, of which row r is the last; 0 gives zeros.
        num_decode: i32[1] or None.
        spec: see there.
        sinks: f32[Hq] or None.
        interpret: run on XLA's operations, to test without a GPU.
        sizes: of the tiles; None: as `choices` chooses.

    Returns:
        (out [T, Hq, D] in q's dtype, lse f32[T, Hq] or None).
    """
    rows, heads, head_dim = q.shape
    sequences, columns = block_tables.shape
    sizes = sizes or choose_decode(q, pages)
    g = get_geometry(q, pages, sizes.span)
    if num_decode is not None:
        lengths = jnp.where(arange(sequences) < num_decode, lengths, 0)
    items = cut_items(lengths, columns, spec, g, sizes)
    count = items.sequence.shape[0]
    compiler = plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages)
    parts, part_lse = pl.pallas_call(
        functools.partial(_attend_items, spec=spec, geometry=g),
        grid=(count, g.kv_heads),
        out_shape=[
            jax.ShapeDtypeStruct((count * heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((count * heads,), jnp.float32),
        ],
        compiler_params=compiler,
        interpret=interpret,
        name="paged_decode",
    )(q.reshape(rows * heads, head_dim), flatten(pages), block_tables, items[:3])

    shapes = [jax.ShapeDtypeStruct((rows * heads, head_dim), q.dtype)]
    if spec.return_lse:
        shapes.append(jax.ShapeDtypeStruct((rows * heads,), jnp.float32))
    kept = [x.reshape(s.shape) for x, s in zip((out, lse), shapes, strict=False) if x is not None]
    sink = [] if sinks is None else [sinks]
    first_kept = 3 + len(sink)
    joined = pl.pallas_call(
        functools.partial(
            _join_items, heads=heads, head_dim=head_dim, lanes=g.lanes, has_sinks=bool(sink), kept=len(kept)
        ),
        grid=(sequences, heads),
        out_shape=shapes,
        input_output_aliases={first_kept + (num_decode is not None) + i: i for i in range(len(kept))},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=2),
        interpret=interpret,
        name="paged_decode_join",
    )(parts, part_lse, items.offsets, *sink, *([] if num_decode is None else [num_decode]), *kept)
    return joined[0].reshape(q.shape), joined[1].reshape(rows, heads) if spec.return_lse else None


def _attend_items(
    q: Ref,
    pages: KVPages,
    tables: Ref,
    items: tuple[Ref, Ref, Ref],
    out: Ref,
    lse: Ref,
    *,
    spec: AttentionSpec,
    geometry: Geometry,
) -> None:
    """One item and KV head. q [T * Hq, D], tables [R, M], items 3 x [I] -> out f32[I * Hq, D], lse f32[I * Hq]."""
    g = geometry
    item, head = pl.program_id(0), pl.program_id(1)
    sequence, first, end = (ref[item] for ref in items)

    @pl.when(first < end)
    def _() -> None:
        member = arange(max(LEAST, power_of_two(g.group)))  # of the group of query heads
        live = member < g.group
        query_head = head * g.group + member
        queries = load_rows(q, sequence * g.heads + query_head, live, g.head_dim, g.lanes).astype(g.dtype)

        def step(i: jax.Array, softmax: Softmax) -> Softmax:
            return attend_keys(queries, pages, tables, sequence, head, first + i * g.span, end, None, softmax, spec, g)

        empty = Softmax.empty(member.shape[0], g.lanes)
        softmax = lax.fori_loop(0, ceil_div(end - first, g.span), step, empty)
        rows = item * g.heads + query_head
        store_rows(out, rows, softmax.output(), live, g.head_dim)
        plgpu.store(lse.at[rows], softmax.top + jnp.log2(softmax.total), mask=live)


def _join_items(
    parts: Ref,
    part_lse: Ref,
    offsets: Ref,
    *refs: Ref,
    heads: int,
    head_dim: int,
    lanes: int,
    has_sinks: bool,
    kept: int,
) -> None:
    """One row and query head: the union of its sequence's items; zeros if there are none.

    refs: sinks f32[Hq] if any, num_decode i32[1] if results are kept, those, out [T * Hq, D], lse f32[T * Hq] if asked.
    """
    row, head = pl.program_id(0), pl.program_id(1)
    sinks, refs = (refs[0], refs[1:]) if has_sinks else (None, refs)
    num_decode, results = (refs[0], refs[1 + kept :]) if kept else (None, refs)
    begin, end = offsets[row], offsets[row + 1]

    def join() -> None:
        def step(i: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple:
            top, total, acc = state
            item = begin + i * UNION + arange(UNION)
            live = item < end
            rows = item * heads + head
            lse = plgpu.load(part_lse.at[rows], mask=live, other=jnp.float32(MASKED))
            higher = jnp.maximum(top, lse.max())
            weights = jnp.where(live, jnp.exp2(lse - higher), 0.0)
            rescale = jnp.exp2(top - higher)
            part = (load_rows(parts, rows, live, head_dim, lanes) * weights[:, None]).sum(axis=0)
            return higher, total * rescale + weights.sum(), acc * rescale + part

        state = (jnp.float32(MASKED), jnp.float32(0), jnp.zeros(lanes, jnp.float32))
        top, total, acc = lax.fori_loop(0, ceil_div(end - begin, UNION), step, state)
        empty = begin == end
        if sinks is not None:
            sink = sinks[head] * LOG2_E
            higher = jnp.maximum(top, sink)
            rescale = jnp.exp2(top - higher)
            top, total, acc = higher, total * rescale + jnp.exp2(sink - higher), acc * rescale
        column = arange(lanes)
        value = jnp.where(empty, 0.0, acc / jnp.where(empty, 1.0, total))
        here = jnp.broadcast_to(row * heads + head, column.shape)
        plgpu.store(results[0].at[here, column], value.astype(results[0].dtype), mask=column < head_dim)
        if len(results) > 1:
            results[1][row * heads + head] = jnp.where(
                empty, -jnp.inf, (top + jnp.log2(jnp.where(empty, 1.0, total))) / LOG2_E
            )

    if num_decode is None:
        join()
    else:
        pl.when(row < num_decode[0])(join)
