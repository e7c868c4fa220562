"""Paged attention written as plainly as possible, in float32: what every other backend is checked against.

One sequence at a time, one query head at a time, the whole softmax in one piece, in NumPy. It shares nothing with
the fast paths but the arguments' types.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.batch import PagedBatch
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec

_BITS = {"uint16": ml_dtypes.bfloat16, "uint8": ml_dtypes.float8_e4m3fn}


def read_tokens(pool: np.ndarray, scales: np.ndarray | None, blocks: np.ndarray, head: int) -> np.ndarray:
    """All slots of a head in blocks i[C] of a pool [N, Hkv, B, D] with scales f32[N, Hkv, B] -> f32[C * B, D]."""
    stored = pool[blocks, head]
    values = stored.view(_BITS.get(stored.dtype.name, stored.dtype)).astype(np.float32)
    if scales is not None:
        values = values * scales[blocks, head][..., None]
    return values.reshape(-1, pool.shape[3])


def reference_attention(
    q: np.ndarray, pages: KVPages, batch: PagedBatch, spec: AttentionSpec, sinks: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """q [T, Hq, D], pages of any dtype, sinks f32[Hq] -> (out f32[T, Hq, D], lse f32[T, Hq]), on the host."""
    rows, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = pages.k.shape
    group = heads // kv_heads
    k_pool, v_pool = np.asarray(pages.k), np.asarray(pages.v)
    k_scales, v_scales = (None if x is None else np.asarray(x) for x in (pages.k_scales, pages.v_scales))
    tables, lengths = np.asarray(batch.block_tables), np.asarray(batch.kv_lengths)
    starts = np.arange(len(lengths) + 1) if batch.query_starts is None else np.asarray(batch.query_starts)
    out = np.zeros((rows, heads, head_dim), np.float32)
    lse = np.full((rows, heads), -np.inf, np.float32)

    for r, length in enumerate(lengths):
        first, last = starts[r], starts[r + 1]
        if length == 0 or first == last:
            continue
        blocks = tables[r, : -(-length // block_size)]
        position = np.arange(length - (last - first), length)[:, None]  # of each query row
        key = np.arange(length)
        visible = key <= position
        if spec.window is not None:
            visible &= key > position - spec.window
        begin = np.argmax(visible.any(axis=0))  # earlier keys are nobody's: they may hold anything
        for h in range(heads):
            k = read_tokens(k_pool, k_scales, blocks, h // group)[begin:length]
            v = read_tokens(v_pool, v_scales, blocks, h // group)[begin:length]
            scores = np.float32(spec.scale) * (q[first:last, h].astype(np.float32) @ k.T)
            if spec.soft_cap is not None:
                scores = np.float32(spec.soft_cap) * np.tanh(scores / np.float32(spec.soft_cap))
            scores = np.where(visible[:, begin:], scores, -np.inf)
            top = scores.max(axis=1)
            if sinks is not None:
                top = np.maximum(top, sinks[h])
            weights = np.exp(scores - top[:, None])
            total = weights.sum(axis=1)
            if sinks is not None:
                total += np.exp(sinks[h] - top)
            out[first:last, h] = weights @ v / total[:, None]
            lse[first:last, h] = top + np.log(total)
    return out, lse


def attention(
    q: jax.Array, pages: KVPages, batch: PagedBatch, spec: AttentionSpec, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """`reference_attention` as a backend: a host callback, so it also works (slowly) inside a jitted step."""

    def call(*args: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        q, pages, batch, sinks = jax.tree.map(np.asarray, args)
        return reference_attention(q, pages, batch, spec, sinks)

    shapes = jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)
    out, lse = jax.pure_callback(call, shapes, q, pages, batch, sinks)
    return out.astype(q.dtype), lse if spec.return_lse else None
