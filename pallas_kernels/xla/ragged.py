"""Mixed batches on XLA: decode rows and prefill chunks packed into one array of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.batch import PagedBatch
from pallas_kernels.xla.decode import decode_attention


def ragged_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: PagedBatch, scale: float
) -> jax.Array:
    """q [T, Hq, D], pages [N, Hkv, B, D] -> [T, Hq, D] in q's dtype. Each row is taken as a sequence of its own."""
    starts = batch.query_starts
    assert starts is not None
    rows = jnp.arange(q.shape[0])
    sequence = jnp.searchsorted(starts, rows, side="right", method="compare_all") - 1
    sequence = jnp.clip(sequence, 0, len(batch.kv_lengths) - 1)
    seen = batch.kv_lengths[sequence] - starts[sequence + 1] + rows + 1
    seen = jnp.where((rows < starts[-1]) & (batch.kv_lengths[sequence] > 0), seen, 0)
    return decode_attention(q, k_pages, v_pages, batch.block_tables[sequence], seen, scale)
