"""Paged attention written as plainly as possible, in float32: what every other backend is checked against.

One sequence at a time, one KV head at a time, the whole softmax in one piece, in NumPy. It shares nothing with
the fast paths but `PagedBatch`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.batch import PagedBatch


def reference_attention(
    q: np.ndarray, k_pages: np.ndarray, v_pages: np.ndarray, batch: PagedBatch, scale: float
) -> np.ndarray:
    """q [T, Hq, D], pages [N, Hkv, B, D] (uint16: bfloat16 bits) -> f32[T, Hq, D], on the host."""
    rows, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_pages.shape
    group = heads // kv_heads
    tables, lengths = np.asarray(batch.block_tables), np.asarray(batch.kv_lengths)
    starts = np.arange(len(lengths) + 1) if batch.query_starts is None else np.asarray(batch.query_starts)
    out = np.zeros((rows, heads, head_dim), np.float32)

    def cached(pages: np.ndarray, blocks: np.ndarray, head: int, length: int) -> np.ndarray:
        chunk = pages[blocks, head]
        chunk = chunk.view(ml_dtypes.bfloat16) if chunk.dtype == np.uint16 else chunk
        return chunk.astype(np.float32).reshape(-1, head_dim)[:length]

    for r, length in enumerate(lengths):
        first, last = starts[r], starts[r + 1]
        if length == 0 or first == last:
            continue
        blocks = tables[r, : -(-length // block_size)]
        position = np.arange(length - (last - first), length)  # of each query row
        visible = np.arange(length)[None, :] <= position[:, None]
        for h in range(heads):
            k = cached(k_pages, blocks, h // group, length)
            v = cached(v_pages, blocks, h // group, length)
            scores = scale * (q[first:last, h].astype(np.float32) @ k.T)
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[first:last, h] = weights @ v
    return out


def attention(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: PagedBatch, scale: float) -> jax.Array:
    """`reference_attention` as a backend: a host callback, so it also works (slowly) inside a jitted step."""

    def call(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: PagedBatch) -> np.ndarray:
        return reference_attention(np.asarray(q), np.asarray(k_pages), np.asarray(v_pages), batch, scale)

    shape = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return jax.pure_callback(call, shape, q, k_pages, v_pages, batch).astype(q.dtype)
