"""The Triton backend: decode rows by `decode`, chunks of prompts by `prefill`, into one result."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.batch import PagedBatch
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton.choices import KernelTiles
from pallas_kernels.triton.decode import decode_attention
from pallas_kernels.triton.prefill import prefill_attention


# Jitted: traced and lowered once for all layers of a step that have the same spec.
@partial(jax.jit, static_argnames=("spec", "interpret", "tiles"))
def attention(
    q: jax.Array,
    pages: KVPages,
    batch: PagedBatch,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    interpret: bool = False,
    tiles: KernelTiles = KernelTiles(),  # noqa: B008, a tuple
) -> tuple[jax.Array, jax.Array | None]:
    """See `pallas_kernels.paged_attention`.

    interpret: on XLA's operations, to test without a GPU.
    tiles: sizes to try, `bench_kernels.py` does.
    """
    tables, lengths = batch.block_tables, batch.kv_lengths
    if batch.query_starts is None:
        return decode_attention(None, None, q, pages, tables, lengths, None, spec, sinks, interpret, tiles.decode)
    rows, heads, _ = q.shape
    out = jnp.zeros(q.shape, q.dtype)
    lse = jnp.full((rows, heads), -jnp.inf, jnp.float32) if spec.return_lse else None
    first = jnp.zeros(1, jnp.int32) if batch.num_decode is None else batch.num_decode.reshape(1)
    if batch.num_decode is not None:
        some = min(len(lengths), rows)  # a decode sequence is a row, so only the first T sequences can be one
        out, lse = decode_attention(
            out, lse, q, pages, tables[:some], lengths[:some], first, spec, sinks, interpret, tiles.decode
        )
    return prefill_attention(out, lse, q, pages, batch, first, spec, sinks, interpret, tiles.prefill)
