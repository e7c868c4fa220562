"""The XLA backend: a decode batch goes to `decode`, anything with several rows a sequence to `ragged`."""

from __future__ import annotations

import jax

from pallas_kernels.batch import PagedBatch
from pallas_kernels.xla.decode import decode_attention
from pallas_kernels.xla.ragged import ragged_attention


@jax.jit  # traced and lowered once for all layers of a step, which XLA then inlines as before
def attention(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: PagedBatch, scale: float) -> jax.Array:
    """See `pallas_kernels.paged_attention`. Portable: nothing but XLA operations, dynamic trip counts."""
    if batch.query_starts is None:
        out = decode_attention(q, k_pages, v_pages, batch.block_tables, batch.kv_lengths, scale)
    else:
        out = ragged_attention(q, k_pages, v_pages, batch, scale)
    return out.astype(q.dtype)
