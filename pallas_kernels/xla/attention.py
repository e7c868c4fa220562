"""The XLA backend: a decode batch goes to `decode`, anything with several rows a sequence to `ragged`."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.batch import PagedBatch
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.xla.decode import decode_attention
from pallas_kernels.xla.ragged import ragged_attention


# Jitted: traced and lowered once for all layers of a step that have the same spec, which XLA then inlines as before.
@partial(jax.jit, static_argnames="spec")
def attention(
    q: jax.Array, pages: KVPages, batch: PagedBatch, spec: AttentionSpec, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """See `pallas_kernels.paged_attention`. Portable: nothing but XLA operations, dynamic trip counts."""
    if batch.query_starts is None:
        out, lse = decode_attention(q, pages, batch.block_tables, batch.kv_lengths, spec, sinks)
    else:
        out, lse = ragged_attention(q, pages, batch, spec, sinks)
    return out.astype(q.dtype), lse
