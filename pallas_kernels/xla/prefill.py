"""Prefill attention on XLA: sequences with several query rows each, packed one after the other.

The rows of each sequence are cut into *query tiles* (`tile_sizes`), and a loop goes through all tiles of all
sequences; for each, an inner loop goes through the spans of pages that its last row may see. Both trip counts
come from the data. A tile may run past the end of its sequence: it then also writes zeros over the next rows,
which belong to later sequences, whose tiles come later and put that right, or to padding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import PagedBatch
from pallas_kernels.xla.tiles import Softmax, attend_tile, ceil_div, fetch, product_dtype


def tile_sizes(kv_heads: int, group: int, head_dim: int) -> tuple[int, int]:
    """(query rows of one sequence in a tile, keys in a step of its inner loop).

    Small tiles waste little on short prompts and the causal corner; they pay as long as a product of all heads stays
    large enough. `group` query heads share the keys, so a product has rows * group.
    """
    rows, span = (32, 64) if kv_heads * head_dim <= 256 else (64, 128)
    return max(rows * 4 // max(group, 4), 8), span


def prefill_attention(
    out: jax.Array,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    batch: PagedBatch,
    first: jax.Array,
    scale: float,
) -> jax.Array:
    """Fills in the rows of sequences `first` and later.

    Args:
        out: f32[T, Hq, D], kept for the rows of sequences before `first`, zeros elsewhere.
        q: [T, Hq, D].
        k_pages, v_pages: [N, Hkv, B, D].
        batch: with `query_starts`.
        first: i32[].

    Returns:
        f32[T, Hq, D].
    """
    rows, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_pages.shape
    group = heads // kv_heads
    starts, lengths = batch.query_starts, batch.kv_lengths
    assert starts is not None
    sequences, columns = batch.block_tables.shape
    tile_rows, span = tile_sizes(kv_heads, group, head_dim)
    tile_rows = min(tile_rows, rows)
    pages = max(1, min(span // block_size, columns))
    span = pages * block_size
    tables = jnp.pad(batch.block_tables, ((0, 0), (0, -columns % pages)))
    dtype = product_dtype(q, k_pages)

    counts = starts[1:] - starts[:-1]
    counts = jnp.where((jnp.arange(sequences, dtype=jnp.int32) >= first) & (lengths > 0), counts, 0)
    tiles = ceil_div(counts, tile_rows)
    ends = jnp.cumsum(tiles)
    # Spare rows: a slice for the last tile must not be shifted back to fit.
    spare = ((0, tile_rows), (0, 0), (0, 0))
    queries = jnp.pad(q.astype(dtype), spare).reshape(-1, kv_heads, group, head_dim)

    def tile(i: jax.Array, out: jax.Array) -> jax.Array:
        sequence = jnp.sum(ends <= i, dtype=jnp.int32)
        done = (i - ends[sequence] + tiles[sequence]) * tile_rows  # rows of the sequence before this tile
        row = starts[sequence] + done
        here = counts[sequence] - done  # rows of the sequence in this tile, if it is long enough
        position = lengths[sequence] - here + jnp.arange(tile_rows, dtype=jnp.int32)
        position = jnp.repeat(position, group)  # [q], q = (row, query head of the group)
        length = lengths[sequence] - jnp.maximum(here - tile_rows, 0)  # what the tile's last row sees
        tile_queries = lax.dynamic_slice_in_dim(queries, row, tile_rows)
        tile_queries = tile_queries.swapaxes(0, 1).reshape(kv_heads, -1, head_dim)
        table = lax.dynamic_index_in_dim(tables, sequence, keepdims=False)

        def step(j: jax.Array, state: Softmax) -> Softmax:
            ids = lax.dynamic_slice_in_dim(table, j * pages, pages)
            key = j * span + jnp.arange(span, dtype=jnp.int32)
            part = attend_tile(
                tile_queries,
                fetch(k_pages, ids, length - j * span, dtype),
                fetch(v_pages, ids, length - j * span, dtype),
                key <= position[:, None],
                scale,
            )
            return state.merge(part)

        state = Softmax.empty((kv_heads, tile_rows * group), head_dim)
        state = lax.fori_loop(0, ceil_div(length, span), step, state)
        done_rows = state.output().reshape(kv_heads, tile_rows, group, head_dim).swapaxes(0, 1)
        inside = jnp.arange(tile_rows, dtype=jnp.int32)[:, None, None] < here
        done_rows = jnp.where(inside, done_rows.reshape(tile_rows, heads, head_dim), 0.0)
        return lax.dynamic_update_slice_in_dim(out, done_rows, row, 0)

    return lax.fori_loop(0, ends[-1], tile, jnp.pad(out, spare))[:rows]
