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

from pallas_kernels.checks import QUANTISED
from pallas_kernels.indexing import gather
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.storage import from_storage

MASKED = -1e30


def ceil_div(a: jax.Array, b: int) -> jax.Array:
    """ceil(a / b) for a >= 0 and b > 0. lax.div: jnp's `//` adds the sign handling of floor division."""
    return lax.div(a + (b - 1), jnp.asarray(b, a.dtype))


def pages_spanned(tokens: int, block_size: int) -> int:
    """The most pages that so many neighbouring tokens can lie on."""
    return -(-(tokens - 1) // block_size) + 1


def product_dtype(q: jax.Array, pages: KVPages) -> jnp.dtype:
    """bfloat16 where queries are and it holds the pages' numbers, which is what matrix units are built for; else
    float32. Quantised numbers have few enough bits; their scales are applied to scores and weights."""
    both = q.dtype == jnp.bfloat16 and pages.k.dtype.name in ("bfloat16", "uint16", *QUANTISED)
    return jnp.dtype(jnp.bfloat16 if both else jnp.float32)


class Tile(NamedTuple):
    """Some pages of keys and values, ready for the matrix products.

    k, v: [..., Hkv, l, D], not yet multiplied by their scales; k_scales, v_scales: f32[..., Hkv, l] or None.
    """

    k: jax.Array
    v: jax.Array
    k_scales: jax.Array | None
    v_scales: jax.Array | None


def fetch(
    pages: KVPages,
    block_ids: jax.Array,
    first: jax.Array | None,
    end: jax.Array,
    key_dtype: jnp.dtype,
    value_dtype: jnp.dtype,
) -> Tile:
    """A tile of keys and values.

    Args:
        pages: of any dtype.
        block_ids: i32[..., C].
        first, end: i32[...], which of the C * B slots count: those from `first` (None: 0) up to `end` (any number
            above C * B: all). The rest come out as zeros, whatever is stored there: weighting a NaN by zero would
            not be enough.
        key_dtype, value_dtype: float32, or bfloat16 for pages whose numbers it holds.
    """

    def scales(pool: jax.Array | None) -> jax.Array | None:
        return None if pool is None else fetch_slots(pool[..., None], block_ids, first, end)[..., 0]

    return Tile(
        from_storage(fetch_slots(pages.k, block_ids, first, end), key_dtype),
        from_storage(fetch_slots(pages.v, block_ids, first, end), value_dtype),
        scales(pages.k_scales),
        scales(pages.v_scales),
    )


def fetch_slots(pool: jax.Array, block_ids: jax.Array, first: jax.Array | None, end: jax.Array) -> jax.Array:
    """Slots of a pool [N, Hkv, B, D] as `fetch` wants them, in the pool's dtype [..., Hkv, C * B, D].

    The pool is seen as [N * Hkv, B * D], one row a page of one head, and the rows are gathered in the order in
    which the matrix products want them: XLA:CPU moves such whole rows up to four times faster than the same
    data gathered as [..., C, Hkv, B, D], and no transpose is left. The mask is a comparison on the whole row
    for a like reason: a fusion that only moves data, or masks it token by token, becomes one short memcpy per
    token, at half the speed. Masked as stored: XLA:CPU selects bfloat16 by way of float32, and uint16 as it is.
    """
    blocks, kv_heads, block_size, head_dim = pool.shape
    rows = block_ids[..., None, :] * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
    tile = gather(pool.reshape(blocks * kv_heads, block_size * head_dim), rows, mode="promise_in_bounds")
    page = jnp.arange(block_ids.shape[-1], dtype=jnp.int32)
    element = jnp.arange(block_size * head_dim, dtype=jnp.int32)

    def in_page(slot: jax.Array) -> jax.Array:  # [..., 1, C, 1]
        return ((slot[..., None, None] - page * block_size) * head_dim)[..., None]

    live = element < in_page(end)
    if first is not None:
        live &= element >= in_page(first)
    tile = jnp.where(live, tile, jnp.zeros((), tile.dtype))
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

    def with_sinks(self, sinks: jax.Array) -> Softmax:
        """One more logit, without a value, in each query's softmax. sinks: broadcastable to [...]."""
        sinks = jnp.broadcast_to(sinks, self.top.shape)
        return self.merge(Softmax(sinks, jnp.ones_like(sinks), jnp.zeros_like(self.acc)))

    def lse(self) -> jax.Array:
        """The log of the denominator, f32[...]; -inf where there is nothing in it."""
        return self.top + jnp.log(self.total)

    def output(self) -> jax.Array:
        """The attention output f32[..., D]; zeros where no key was seen."""
        return self.acc / jnp.where(self.total == 0, 1.0, self.total)[..., None]


def attend_tile(queries: jax.Array, tile: Tile, visible: jax.Array, spec: AttentionSpec) -> Softmax:
    """One tile's softmax. `...` are batch axes, `q` queries, `l` keys.

    Args:
        queries: [..., q, D], of the keys' dtype.
        tile: [..., l, D], from `fetch`. The weights are rounded to the values' dtype; all sums are float32.
        visible: bool, broadcastable to [..., q, l]: which query sees which key. A query that sees none has a
            meaningless result.
        spec: its scale and soft cap.
    """
    scores = jnp.einsum("...qd,...ld->...ql", queries, tile.k, preferred_element_type=jnp.float32)
    scores *= spec.scale if tile.k_scales is None else spec.scale * tile.k_scales[..., None, :]
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    scores = jnp.where(visible, scores, MASKED)
    top = scores.max(axis=-1)
    weights = jnp.exp(scores - top[..., None])
    total = weights.sum(axis=-1)
    if tile.v_scales is not None:
        weights *= tile.v_scales[..., None, :]
    acc = jnp.einsum("...ql,...ld->...qd", weights.astype(tile.v.dtype), tile.v, preferred_element_type=jnp.float32)
    return Softmax(top, total, acc)
