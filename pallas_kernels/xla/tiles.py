"""What decode and prefill share: fetching a tile of pages, and the running softmax over tiles.

A softmax over many tiles keeps, per query, three float32 numbers or vectors: `top` (the largest score seen),
`total` (the sum of `exp(score - top)`) and `acc` (the sum of `exp(score - top) * value`). Masked scores are
`MASKED`, a large finite number: with -inf a tile without a visible key would give `inf - inf`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pages import from_storage

MASKED = -1e30


def ceil_div(a: jax.Array, b: int) -> jax.Array:
    """ceil(a / b) for a >= 0 and b > 0. lax.div: jnp's `//` adds the sign handling of floor division."""
    return lax.div(a + (b - 1), jnp.asarray(b, a.dtype))


def product_dtype(q: jax.Array, pages: jax.Array) -> jnp.dtype:
    """bfloat16 where queries and pages both are, which is what matrix units are built for; else float32."""
    both = q.dtype == jnp.bfloat16 and pages.dtype.itemsize == 2
    return jnp.dtype(jnp.bfloat16 if both else jnp.float32)


def fetch(pages: jax.Array, block_ids: jax.Array, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """A tile of keys or values, ready for the matrix products.

    Args:
        pages: [N, Hkv, B, D].
        block_ids: i32[..., C].
        tokens: i32[...], how many slots of those blocks hold tokens (any number above C * B: all). The rest
            come out as zeros, whatever is stored there: weighting a NaN by zero would not be enough.
        dtype: float32, or bfloat16 for 16-bit pages.

    Returns:
        `dtype`[..., Hkv, C * B, D].

    The pool is seen as [N * Hkv, B * D], one row a page of one head, and the rows are gathered in the order in
    which the matrix products want them: XLA:CPU moves such whole rows up to four times faster than the same
    data gathered as [..., C, Hkv, B, D], and no transpose is left. The mask is a comparison on the whole row
    for a like reason: a fusion that only moves data, or masks it token by token, becomes one short memcpy per
    token, at half the speed.
    """
    blocks, kv_heads, block_size, head_dim = pages.shape
    rows = block_ids[..., None, :] * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
    tile = pages.reshape(blocks * kv_heads, block_size * head_dim).at[rows].get(mode="promise_in_bounds")
    page = jnp.arange(block_ids.shape[-1], dtype=jnp.int32)
    end = (tokens[..., None, None] - page * block_size) * head_dim  # [..., 1, C]
    live = jnp.arange(block_size * head_dim, dtype=jnp.int32) < end[..., None]
    # Masked as stored: XLA:CPU selects bfloat16 by way of float32, and uint16 as it is.
    tile = from_storage(jnp.where(live, tile, jnp.zeros((), tile.dtype)), dtype)
    return tile.reshape(*tile.shape[:-2], -1, head_dim)


class Softmax(NamedTuple):
    """The running softmax of some queries: top, total f32[...]; acc f32[..., D]."""

    top: jax.Array
    total: jax.Array
    acc: jax.Array

    @staticmethod
    def empty(shape: tuple[int, ...], head_dim: int) -> Softmax:
        return Softmax(jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))

    def merge(self, other: Softmax) -> Softmax:
        """The softmax over both sets of keys."""
        top = jnp.maximum(self.top, other.top)
        mine, others = jnp.exp(self.top - top), jnp.exp(other.top - top)
        return Softmax(
            top,
            self.total * mine + other.total * others,
            self.acc * mine[..., None] + other.acc * others[..., None],
        )

    def output(self) -> jax.Array:
        """The attention output f32[..., D]; zeros where no key was seen."""
        return self.acc / jnp.where(self.total == 0, 1.0, self.total)[..., None]


def attend_tile(queries: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, scale: float) -> Softmax:
    """One tile's softmax. `...` are batch axes, `q` queries, `l` keys.

    Args:
        queries: [..., q, D].
        keys: [..., l, D], of the queries' dtype, from `fetch`.
        values: [..., l, D], from `fetch`. The weights are rounded to their dtype; all sums are float32.
        visible: bool, broadcastable to [..., q, l]: which query sees which key. A query that sees none has a
            meaningless result.
        scale: factor on the scores.
    """
    scores = jnp.einsum("...qd,...ld->...ql", queries, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, scores * scale, MASKED)
    top = scores.max(axis=-1)
    weights = jnp.exp(scores - top[..., None])
    acc = jnp.einsum("...ql,...ld->...qd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return Softmax(top, weights.sum(axis=-1), acc)
