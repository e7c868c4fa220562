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
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.xla.tiles import Softmax, attend_tile, ceil_div, fetch, pages_spanned, product_dtype


def tile_sizes(kv_heads: int, group: int, head_dim: int) -> tuple[int, int]:
    """(query rows of one sequence in a tile, keys in a step of its inner loop).

    Small tiles waste little on short prompts and the causal corner; they pay as long as a product of all heads stays
    large enough. `group` query heads share the keys, so a product has rows * group.
    """
    rows, span = (32, 64) if kv_heads * head_dim <= 256 else (64, 128)
    return max(rows * 4 // max(group, 4), 8), span


def prefill_attention(
    out: jax.Array,
    lse: jax.Array | None,
    q: jax.Array,
    pages: KVPages,
    batch: PagedBatch,
    first: jax.Array,
    spec: AttentionSpec,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Fills in the rows of sequences `first` and later.

    Args:
        out, lse: f32[T, Hq, D] and f32[T, Hq] (None unless spec.return_lse), kept for the rows of sequences before
            `first`; zeros and -inf elsewhere.
        q: [T, Hq, D].
        pages: of any dtype.
        batch: with `query_starts`.
        first: i32[].
        spec: see there.
        sinks: f32[Hq] or None.

    Returns:
        (out, lse).
    """
    rows, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = pages.k.shape
    group = heads // kv_heads
    starts, lengths = batch.query_starts, batch.kv_lengths
    assert starts is not None
    sequences, columns = batch.block_tables.shape
    tile_rows, span = tile_sizes(kv_heads, group, head_dim)
    tile_rows = min(tile_rows, rows)
    pages_each = max(1, min(span // block_size, columns))
    if spec.window is not None:
        pages_each = min(pages_each, pages_spanned(spec.window + tile_rows - 1, block_size))
    span = pages_each * block_size
    # With a window spans start at any page, so that the last one may end up to a span after the last column.
    spare_columns = 0 if spec.window is None else pages_each
    tables = jnp.pad(batch.block_tables, ((0, 0), (0, spare_columns + -columns % pages_each)))
    dtype = product_dtype(q, pages)

    counts = starts[1:] - starts[:-1]
    counts = jnp.where((jnp.arange(sequences, dtype=jnp.int32) >= first) & (lengths > 0), counts, 0)
    tiles = ceil_div(counts, tile_rows)
    ends = jnp.cumsum(tiles)
    # Spare rows: a slice for the last tile must not be shifted back to fit.
    queries = pad_rows(q.astype(dtype), tile_rows).reshape(-1, kv_heads, group, head_dim)

    def tile(i: jax.Array, done: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
        out, lse = done
        sequence = jnp.sum(ends <= i, dtype=jnp.int32)
        before = (i - ends[sequence] + tiles[sequence]) * tile_rows  # rows of the sequence before this tile
        row = starts[sequence] + before
        here = counts[sequence] - before  # rows of the sequence in this tile, if it is long enough
        position = lengths[sequence] - here + jnp.arange(tile_rows, dtype=jnp.int32)
        position = jnp.repeat(position, group)  # [q], q = (row, query head of the group)
        length = lengths[sequence] - jnp.maximum(here - tile_rows, 0)  # what the tile's last row sees
        tile_queries = lax.dynamic_slice_in_dim(queries, row, tile_rows)
        tile_queries = tile_queries.swapaxes(0, 1).reshape(kv_heads, -1, head_dim)
        table = lax.dynamic_index_in_dim(tables, sequence, keepdims=False)
        if spec.window is None:
            first_key, first_page = None, jnp.int32(0)
        else:  # of what the tile's first row sees
            first_key = jnp.maximum(position[0] - (spec.window - 1), 0)
            first_page = lax.div(first_key, jnp.int32(block_size))

        def step(j: jax.Array, state: Softmax) -> Softmax:
            page = first_page + j * pages_each
            start = page * block_size
            ids = lax.dynamic_slice_in_dim(table, page, pages_each)
            fetched = fetch(pages, ids, None if first_key is None else first_key - start, length - start, dtype, dtype)
            key = start + jnp.arange(span, dtype=jnp.int32)
            visible = key <= position[:, None]
            if spec.window is not None:
                visible &= key > position[:, None] - spec.window
            return state.merge(attend_tile(tile_queries, fetched, visible, spec))

        state = Softmax.empty((kv_heads, tile_rows * group), head_dim)
        state = lax.fori_loop(0, ceil_div(length - first_page * block_size, span), step, state)
        if sinks is not None:
            state = state.with_sinks(jnp.tile(sinks.reshape(kv_heads, group), (1, tile_rows)))
        inside = jnp.arange(tile_rows, dtype=jnp.int32) < here

        def put(all_rows: jax.Array, x: jax.Array, blank: float) -> jax.Array:
            """x [Hkv, tile rows * group, ...] at its rows; rows past the sequence's end are blank."""
            x = x.reshape(kv_heads, tile_rows, group, *x.shape[2:]).swapaxes(0, 1)
            x = x.reshape(tile_rows, *all_rows.shape[1:])
            x = jnp.where(inside.reshape(-1, *(1 for _ in x.shape[1:])), x, blank)
            return lax.dynamic_update_slice_in_dim(all_rows, x, row, 0)

        return put(out, state.output(), 0.0), None if lse is None else put(lse, state.lse(), -jnp.inf)

    done = pad_rows(out, tile_rows), None if lse is None else pad_rows(lse, tile_rows)
    out, lse = lax.fori_loop(0, ends[-1], tile, done)
    return out[:rows], None if lse is None else lse[:rows]


def pad_rows(x: jax.Array, spare: int) -> jax.Array:
    return jnp.pad(x, ((0, spare), *((0, 0) for _ in x.shape[1:])))
