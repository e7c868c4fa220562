"""The TPU backend: decode rows as tiles of one row, chunks of prompts as tiles of many, one kernel for both."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.batch import PagedBatch
from pallas_kernels.indexing import gather, scatter
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.tiles import Tiles, arange, cut_tiles
from pallas_kernels.tpu.flash import attend_tiles, check_supported

TILE = 128  # rows of a prefill tile's products: (row, query head of the group)


# Jitted: traced and lowered once for all layers of a step that have the same spec.
@partial(jax.jit, static_argnames=("spec", "interpret"))
def attention(
    q: jax.Array,
    pages: KVPages,
    batch: PagedBatch,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """See `pallas_kernels.paged_attention`. `interpret`: on XLA's operations, to test without a TPU."""
    check_supported(pages, batch)
    rows, heads, _ = q.shape
    sequences = batch.kv_lengths.shape[0]
    out = jnp.zeros(q.shape, q.dtype)
    lse = jnp.full((rows, heads), -jnp.inf, jnp.float32) if spec.return_lse else None
    single = min(sequences, rows)  # sequences that can be decode rows
    is_decode = arange(single) < (single if batch.query_starts is None else _decode_rows(batch))
    if batch.query_starts is None or batch.num_decode is not None:
        one_each = PagedBatch(
            batch.block_tables[:single],
            jnp.where(is_decode, batch.kv_lengths[:single], 0),
            batch.write_slots,
            arange(single + 1),
        )
        tiles = cut_tiles(one_each, jnp.int32(0), single, 1)
        out, lse = _fill(out, lse, q, pages, batch.block_tables, tiles, 1, spec, sinks, interpret)
    if batch.query_starts is not None:
        rows_each = max(1, min(TILE // (heads // pages.k.shape[1]), rows))
        tiles = cut_tiles(batch, _decode_rows(batch), rows, rows_each)
        out, lse = _fill(out, lse, q, pages, batch.block_tables, tiles, rows_each, spec, sinks, interpret)
    return out, lse


def _decode_rows(batch: PagedBatch) -> jax.Array:
    return jnp.int32(0) if batch.num_decode is None else batch.num_decode


def _fill(
    out: jax.Array,
    lse: jax.Array | None,
    q: jax.Array,
    pages: KVPages,
    tables: jax.Array,
    tiles: Tiles,
    rows_each: int,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """out [T, Hq, D] and lse f32[T, Hq] with the tiles' rows filled in.

    XLA gathers the queries of each tile, so that the kernel finds them as the rows of its products, and scatters the
    results back: little beside the pages that are read.
    """
    rows, heads, head_dim = q.shape
    kv_heads = pages.k.shape[1]
    group = heads // kv_heads
    nth = arange(rows_each)
    inside = nth < tiles.rows[:, None]  # [I, rows_each]
    at = jnp.where(inside, tiles.row[:, None] + nth, rows)  # T: nowhere
    packed = gather(q, at)  # [I, rows_each, Hq, D]
    packed = packed.reshape(-1, rows_each, kv_heads, group, head_dim).swapaxes(1, 2)
    packed = packed.reshape(-1, kv_heads, rows_each * group, head_dim)
    if sinks is not None:
        sinks = jnp.tile(sinks.reshape(kv_heads, group), (1, rows_each))
    seen, denominators = attend_tiles(packed, pages, tables, tiles, group, spec, sinks, interpret)

    def unpack(x: jax.Array) -> jax.Array:  # [I, Hkv, rows_each * group, ...] -> [I, rows_each, Hq, ...]
        x = x.reshape(-1, kv_heads, rows_each, group, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(-1, rows_each, heads, *x.shape[4:])

    out = scatter(out, at, unpack(seen))
    if lse is not None and denominators is not None:
        lse = scatter(lse, at, unpack(denominators))
    return out, lse
