"""Mixed batches on XLA: decode rows first, then prefill chunks, packed into one array of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.batch import PagedBatch
from pallas_kernels.xla.decode import decode_attention
from pallas_kernels.xla.prefill import prefill_attention


def ragged_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: PagedBatch, scale: float
) -> jax.Array:
    """q [T, Hq, D], pages [N, Hkv, B, D], batch with `query_starts` -> f32[T, Hq, D].

    The first `num_decode` sequences are worked off together by `decode_attention`, to which all others look
    empty; the rest one by one. Either part costs next to nothing when it has nothing to do.
    """
    rows = q.shape[0]
    if batch.num_decode is None:
        return prefill_attention(jnp.zeros(q.shape), q, k_pages, v_pages, batch, jnp.int32(0), scale)
    # A decode sequence is a row, so that only the first T sequences can be one.
    sequences = min(len(batch.kv_lengths), rows)
    is_decode = jnp.arange(sequences, dtype=jnp.int32) < batch.num_decode
    lengths = jnp.where(is_decode, batch.kv_lengths[:sequences], 0)
    out = decode_attention(q, k_pages, v_pages, batch.block_tables[:sequences], lengths, scale)
    out = jnp.pad(out, ((0, rows - sequences), (0, 0), (0, 0)))
    return prefill_attention(out, q, k_pages, v_pages, batch, batch.num_decode, scale)
