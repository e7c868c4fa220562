"""Decode attention on XLA: one query row a sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pages import to_float32


def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    scale: float,
    pages_per_step: int = 8,
) -> jax.Array:
    """q [R, Hq, D], pages [N, Hkv, B, D], block_tables i32[R, M], lengths i32[R] -> [R, Hq, D] in q's dtype.

    Online softmax over `pages_per_step` pages at a time, as many times as the longest sequence needs.
    """
    rows, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_pages.shape
    columns = block_tables.shape[1]
    chunk = min(pages_per_step, columns)
    tables = jnp.pad(block_tables, ((0, 0), (0, -columns % chunk)))
    queries = q.reshape(rows, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32) * scale

    def step(i, carry):
        top, total, acc = carry
        ids = lax.dynamic_slice_in_dim(tables, i * chunk, chunk, axis=1)
        position = i * chunk * block_size + jnp.arange(chunk * block_size)
        live = position[None] < lengths[:, None]
        live = live.reshape(rows, chunk, 1, block_size)
        k = to_float32(k_pages.at[ids].get(mode="promise_in_bounds"))
        v = to_float32(v_pages.at[ids].get(mode="promise_in_bounds"))
        v = jnp.where(live[..., None], v, 0.0)
        scores = jnp.einsum("rhgd,rchbd->rhgcb", queries, k)
        scores = jnp.where(live.transpose(0, 2, 1, 3)[:, :, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=(-2, -1)))
        base = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
        weights = jnp.exp(scores - base[..., None, None])
        shrink = jnp.exp(top - base)
        total = total * shrink + weights.sum(axis=(-2, -1))
        acc = acc * shrink[..., None] + jnp.einsum("rhgcb,rchbd->rhgd", weights, v)
        return new_top, total, acc

    state = (
        jnp.full(queries.shape[:3], -jnp.inf),
        jnp.zeros(queries.shape[:3]),
        jnp.zeros(queries.shape),
    )
    steps = _cdiv(jnp.max(lengths), chunk * block_size)
    _, total, acc = lax.fori_loop(0, steps, step, state)
    out = acc / jnp.where(total == 0, 1.0, total)[..., None]
    return out.reshape(q.shape).astype(q.dtype)


def _cdiv(a, b):
    return (a + b - 1) // b
