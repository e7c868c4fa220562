"""Decode attention on XLA: one query row a sequence.

The work is cut into *items*, one per (sequence, span of a few pages), numbered sequence by sequence:

    lengths 300, 0, 70, ...      spans of 128 tokens
    item       0    1    2    3    4   ...
    sequence   0    0    0    2    3
    span       0    1    2    0    0

A loop takes `ITEMS` of them at a time, so its trip count grows with the tokens in the cache and neither a long
sequence nor an empty row makes the others pay. Items of one sequence that meet in a tile are merged there, and
then into that sequence's running softmax. Live sequences are counted off by `rank`, so that a tile's sequences
are consecutive in the running state and one slice reads or writes them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.indexing import gather
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.xla.tiles import MASKED, Softmax, attend_tile, ceil_div, fetch, pages_spanned, product_dtype

ITEMS = 8  # work items a tile


def span_pages(kv_heads: int, block_size: int, head_dim: int) -> int:
    """Pages an item covers: a tile's keys should fill about half a core's level-2 cache as float32."""
    token_bytes = ITEMS * kv_heads * head_dim * 4
    pages = min(max(2**19 // token_bytes, 64), 256) // block_size
    return 1 << (pages.bit_length() - 1) if pages else 1


def add_selected(mine: jax.Array, x: jax.Array) -> jax.Array:
    """out[s] = sum of x[w] where mine[s, w]. Written out over w: XLA fuses that into one elementwise loop, while
    it makes a reduction over axis w a kernel of its own, ten times slower at this size."""
    return functools.reduce(jnp.add, (jnp.where(mine[:, w], x[w], 0.0) for w in range(mine.shape[1])))


def decode_attention(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    lengths: jax.Array,
    spec: AttentionSpec,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Each row's attention over its own sequence.

    Args:
        q: [T, Hq, D]; row r is sequence r. T may differ from R if no sequence from T on has a length.
        pages: of any dtype.
        block_tables: i32[R, M].
        lengths: i32[R], tokens in the cache, of which row r is the last; 0 gives zeros.
        spec: see there.
        sinks: f32[Hq] or None.

    Returns:
        (out f32[R, Hq, D], lse f32[R, Hq] or None).
    """
    _, kv_heads, block_size, head_dim = pages.k.shape
    sequences, columns = block_tables.shape
    group = q.shape[1] // kv_heads
    pages_each = min(span_pages(kv_heads, block_size, head_dim), columns)
    if spec.window is not None:
        pages_each = min(pages_each, pages_spanned(spec.window, block_size))
    span = pages_each * block_size
    # bfloat16 products of queries and keys are exact in float32. XLA:CPU does them at half the time, but one
    # row at a time at a tenth of the speed, so not for a group of one. The weights stay float32.
    key_dtype = product_dtype(q, pages) if group > 1 else jnp.dtype(jnp.float32)
    queries = q.reshape(-1, kv_heads, group, head_dim).astype(key_dtype)

    if spec.window is None:
        seen = lengths
        tables = jnp.pad(block_tables, ((0, 0), (0, -columns % pages_each))).reshape(-1, pages_each)
        spans_per_row = tables.shape[0] // sequences
    else:  # items start at the first page that the row sees
        first_page = lax.div(jnp.maximum(lengths - spec.window, 0), jnp.int32(block_size))
        seen = lengths - first_page * block_size
    counts = ceil_div(seen, span)
    ends = jnp.cumsum(counts)
    total = ends[-1]
    rank = jnp.cumsum(counts > 0, dtype=jnp.int32) - 1

    def tile(i: jax.Array, state: Softmax) -> Softmax:
        item = i * ITEMS + jnp.arange(ITEMS, dtype=jnp.int32)
        real = item < total
        row = jnp.sum(ends[None] <= item[:, None], axis=1, dtype=jnp.int32)
        row = jnp.where(real, row, 0)
        index = jnp.where(real, item - (ends - counts)[row], 0)
        end = jnp.where(real, seen[row] - index * span, 0)  # may exceed the span
        slot = jnp.arange(span, dtype=jnp.int32)
        live = slot < end[:, None]
        if spec.window is None:
            first = None
            ids = gather(tables, row * spans_per_row + index, mode="promise_in_bounds")
        else:
            first = end - spec.window  # may be negative
            live &= slot >= first[:, None]
            page = first_page[row] + index * pages_each
            page = page[:, None] + jnp.arange(pages_each, dtype=jnp.int32)
            ids = gather(block_tables, (row[:, None], page))
        fetched = fetch(pages, ids, first, end, key_dtype, jnp.dtype(jnp.float32))
        part = attend_tile(gather(queries, row, mode="clip"), fetched, live[:, None, None, :], spec)

        # Merge items of one sequence. `mine[s, w]`: item w belongs to the tile's s-th sequence. Selected, not
        # multiplied by zeros and ones: a NaN in one sequence must not reach another.
        first_rank = rank[row[0]]
        mine = real & (rank[row] - first_rank == jnp.arange(ITEMS, dtype=jnp.int32)[:, None])
        mine = mine[:, :, None, None]
        top = jnp.where(mine, part.top[None], MASKED).max(axis=1)
        weight = jnp.exp(part.top - jnp.where(mine, top[:, None], MASKED).max(axis=0))
        merged = Softmax(
            top,
            add_selected(mine, part.total * weight),
            add_selected(mine[..., None], part.acc * weight[..., None]),
        )
        here = Softmax(*(lax.dynamic_slice_in_dim(x, first_rank, ITEMS) for x in state))
        return Softmax(
            *(
                lax.dynamic_update_slice_in_dim(x, new, first_rank, 0)
                for x, new in zip(state, here.merge(merged), strict=True)
            )
        )

    # ITEMS spare rows: a tile's slice may reach past the last sequence.
    state = Softmax.empty((sequences + ITEMS, kv_heads, group), head_dim)
    state = lax.fori_loop(0, ceil_div(total, ITEMS), tile, state)
    if sinks is not None:
        state = state.with_sinks(sinks.reshape(kv_heads, group))
    live, at = counts > 0, jnp.maximum(rank, 0)
    out = jnp.where(live[:, None, None, None], state.output()[at], 0.0).reshape(sequences, -1, head_dim)
    if not spec.return_lse:
        return out, None
    return out, jnp.where(live[:, None], state.lse()[at].reshape(sequences, -1), -jnp.inf)
