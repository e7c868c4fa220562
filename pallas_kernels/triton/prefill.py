"""Ragged prefill attention in one Triton kernel: chunks of any sequences, packed, causal over their pages.

A program takes some neighbouring query rows of one sequence, a *tile*, and one KV head. The tile's rows and the query
heads of the group make up the m rows of the products (`PrefillTiles.height`), (row, head) by (row, head), so that a
group of any size fills them:

    group of 3, m = 16:   row 0 0 0 1 1 1 2 2 2 3 3 3 4 4 4 -
                          head 0 1 2 0 1 2 0 1 2 0 1 2 0 1 2 -

There are at most T / (rows a tile) + R tiles, which is the grid; programs without a tile end at once. Keys that every
row of the tile sees are worked off without a mask.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.batch import PagedBatch
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.tiles import Tiles, arange, ceil_div, cut_tiles
from pallas_kernels.triton.choices import PrefillTiles, choose_prefill
from pallas_kernels.triton.tiles import (
    LOG2_E,
    Geometry,
    Ref,
    Softmax,
    attend_keys,
    flatten,
    get_geometry,
    load_rows,
    store_rows,
)


def prefill_attention(
    out: jax.Array,
    lse: jax.Array | None,
    q: jax.Array,
    pages: KVPages,
    batch: PagedBatch,
    first: jax.Array,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    interpret: bool,
    sizes: PrefillTiles | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Fills in the rows of sequences `first` and later, in place.

    Args:
        out, lse: [T, Hq, D] in q's dtype and f32[T, Hq] (None unless spec.return_lse); all other rows are kept.
        q: [T, Hq, D].
        pages: of any dtype.
        batch: with `query_starts`.
        first: i32[1].
        spec: see there.
        sinks: f32[Hq] or None.
        interpret: run on XLA's operations, to test without a GPU.
        sizes: of the tiles; None: as `choices` chooses.

    Returns:
        (out, lse).
    """
    rows, heads, head_dim = q.shape
    sizes = sizes or choose_prefill(q, pages)
    g = get_geometry(q, pages, sizes.span)
    rows_each = sizes.height // g.group
    tiles = cut_tiles(batch, first[0], rows, rows_each)
    kept = [out.reshape(rows * heads, head_dim)] + ([] if lse is None else [lse.reshape(-1)])
    sink = [] if sinks is None else [sinks]
    inputs = (q.reshape(rows * heads, head_dim), flatten(pages), batch.block_tables, tiles, *sink)
    first_kept = len(jax.tree.leaves(inputs))
    results = pl.pallas_call(
        functools.partial(
            _attend_tiles, height=sizes.height, has_sinks=bool(sink), kept=len(kept), spec=spec, geometry=g
        ),
        grid=(tiles.row.shape[0], g.kv_heads),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept],
        input_output_aliases={first_kept + i: i for i in range(len(kept))},
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        interpret=interpret,
        name="paged_prefill",
    )(*inputs, *kept)
    return results[0].reshape(q.shape), None if lse is None else results[1].reshape(rows, heads)


def _attend_tiles(
    q: Ref,
    pages: KVPages,
    tables: Ref,
    tiles: Tiles,
    *refs: Ref,
    height: int,
    has_sinks: bool,
    kept: int,
    spec: AttentionSpec,
    geometry: Geometry,
) -> None:
    """One tile and KV head. q [T * Hq, D]; refs: sinks f32[Hq] if any, what is kept, out [T * Hq, D], lse f32[T * Hq]
    if asked for."""
    g = geometry
    sinks = refs[0] if has_sinks else None
    results = refs[has_sinks + kept :]
    tile, head = pl.program_id(0), pl.program_id(1)
    sequence, row, rows, position = (ref[tile] for ref in tiles)

    @pl.when(rows > 0)
    def _() -> None:
        group = jnp.int32(g.group)
        m = arange(height)
        nth = lax.div(m, group)  # of the tile's rows
        live = nth < rows
        query_head = head * group + lax.rem(m, group)
        at = (row + nth) * g.heads + query_head
        queries = load_rows(q, at, live, g.head_dim, g.lanes).astype(g.dtype)
        length = position + rows
        if spec.window is None:
            begin = jnp.int32(0)
            whole = lax.div(position + 1, jnp.int32(g.span))  # spans that the first row sees, so every row does
        else:
            begin = jnp.maximum(position - (spec.window - 1), 0)
            whole = jnp.int32(0)

        def step(i: jax.Array, softmax: Softmax, *, masked: bool) -> Softmax:
            end, positions = (length, position + nth) if masked else (None, None)
            key = begin + i * g.span
            return attend_keys(queries, pages, tables, sequence, head, key, end, positions, softmax, spec, g)

        softmax = Softmax.empty(height, g.lanes)
        if spec.window is None:
            softmax = lax.fori_loop(0, whole, functools.partial(step, masked=False), softmax)
        last = ceil_div(length - begin, g.span)
        top, total, acc = lax.fori_loop(whole, last, functools.partial(step, masked=True), softmax)
        if sinks is not None:
            sink = plgpu.load(sinks.at[query_head], mask=live, other=jnp.float32(0)) * LOG2_E
            higher = jnp.maximum(top, sink)
            rescale = jnp.exp2(top - higher)
            top, total, acc = higher, total * rescale + jnp.exp2(sink - higher), acc * rescale[:, None]
        store_rows(results[0], at, acc / total[:, None], live, g.head_dim)
        if len(results) > 1:
            plgpu.store(results[1].at[at], (top + jnp.log2(total)) * (1.0 / LOG2_E), mask=live)
