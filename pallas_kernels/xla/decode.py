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

from pallas_kernels.xla.tiles import MASKED, Softmax, attend_tile, ceil_div, fetch, product_dtype

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
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    scale: float,
) -> jax.Array:
    """Each row's attention over its own sequence.

    Args:
        q: [T, Hq, D]; row r is sequence r. T may differ from R if no sequence from T on has a length.
        k_pages, v_pages: [N, Hkv, B, D].
        block_tables: i32[R, M].
        lengths: i32[R], keys row r sees; 0 gives zeros.

    Returns:
        f32[R, Hq, D].
    """
    _, kv_heads, block_size, head_dim = k_pages.shape
    sequences, columns = block_tables.shape
    group = q.shape[1] // kv_heads
    pages = min(span_pages(kv_heads, block_size, head_dim), columns)
    span = pages * block_size
    tables = jnp.pad(block_tables, ((0, 0), (0, -columns % pages))).reshape(-1, pages)
    spans_per_row = tables.shape[0] // sequences
    # bfloat16 products of queries and keys are exact in float32. XLA:CPU does them at half the time, but one
    # row at a time at a tenth of the speed, so not for a group of one. The weights stay float32.
    key_dtype = product_dtype(q, k_pages) if group > 1 else jnp.dtype(jnp.float32)
    queries = q.reshape(-1, kv_heads, group, head_dim).astype(key_dtype)

    counts = ceil_div(lengths, span)
    ends = jnp.cumsum(counts)
    total = ends[-1]
    rank = jnp.cumsum(counts > 0, dtype=jnp.int32) - 1

    def tile(i: jax.Array, state: Softmax) -> Softmax:
        item = i * ITEMS + jnp.arange(ITEMS, dtype=jnp.int32)
        real = item < total
        row = jnp.sum(ends[None] <= item[:, None], axis=1, dtype=jnp.int32)
        row = jnp.where(real, row, 0)
        index = jnp.where(real, item - (ends - counts)[row], 0)
        tokens = jnp.where(real, lengths[row] - index * span, 0)  # may exceed the span
        live = jnp.arange(span, dtype=jnp.int32) < tokens[:, None]

        ids = tables.at[row * spans_per_row + index].get(mode="promise_in_bounds")
        part = attend_tile(
            queries.at[row].get(mode="clip"),
            fetch(k_pages, ids, tokens, key_dtype),
            fetch(v_pages, ids, tokens, jnp.dtype(jnp.float32)),
            live[:, None, None, :],
            scale,
        )

        # Merge items of one sequence. `mine[s, w]`: item w belongs to the tile's s-th sequence. Selected, not
        # multiplied by zeros and ones: a NaN in one sequence must not reach another.
        first = rank[row[0]]
        mine = real & (rank[row] - first == jnp.arange(ITEMS, dtype=jnp.int32)[:, None])
        mine = mine[:, :, None, None]
        top = jnp.where(mine, part.top[None], MASKED).max(axis=1)
        weight = jnp.exp(part.top - jnp.where(mine, top[:, None], MASKED).max(axis=0))
        merged = Softmax(
            top,
            add_selected(mine, part.total * weight),
            add_selected(mine[..., None], part.acc * weight[..., None]),
        )
        here = Softmax(*(lax.dynamic_slice_in_dim(x, first, ITEMS) for x in state))
        return Softmax(
            *(
                lax.dynamic_update_slice_in_dim(x, new, first, 0)
                for x, new in zip(state, here.merge(merged), strict=True)
            )
        )

    # ITEMS spare rows: a tile's slice may reach past the last sequence.
    state = Softmax.empty((sequences + ITEMS, kv_heads, group), head_dim)
    state = lax.fori_loop(0, ceil_div(total, ITEMS), tile, state)
    out = jnp.where((counts > 0)[:, None, None, None], state.output()[jnp.maximum(rank, 0)], 0.0)
    return out.reshape(sequences, -1, head_dim)
