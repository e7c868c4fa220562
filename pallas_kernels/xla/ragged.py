"""Mixed batches on XLA: decode rows first, then prefill chunks, packed into one array of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.batch import PagedBatch
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.xla.decode import decode_attention
from pallas_kernels.xla.prefill import prefill_attention


def ragged_attention(
    q: jax.Array, pages: KVPages, batch: PagedBatch, spec: AttentionSpec, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """q [T, Hq, D], batch with `query_starts` -> (out f32[T, Hq, D], lse f32[T, Hq] or None).

    The first `num_decode` sequences are worked off together by `decode_attention`, to which all others look
    empty; the rest one by one. Either part costs next to nothing when it has nothing to do.
    """
    rows = q.shape[0]
    if batch.num_decode is None:
        lse = jnp.full(q.shape[:2], -jnp.inf) if spec.return_lse else None
        return prefill_attention(jnp.zeros(q.shape), lse, q, pages, batch, jnp.int32(0), spec, sinks)
    # A decode sequence is a row, so that only the first T sequences can be one.
    sequences = min(len(batch.kv_lengths), rows)
    is_decode = jnp.arange(sequences, dtype=jnp.int32) < batch.num_decode
    lengths = jnp.where(is_decode, batch.kv_lengths[:sequences], 0)
    out, lse = decode_attention(q, pages, batch.block_tables[:sequences], lengths, spec, sinks)
    out = jnp.pad(out, ((0, rows - sequences), (0, 0), (0, 0)))
    if lse is not None:
        lse = jnp.pad(lse, ((0, rows - sequences), (0, 0)), constant_values=-jnp.inf)
    return prefill_attention(out, lse, q, pages, batch, batch.num_decode, spec, sinks)
