"""The decoder's attention over one whole sequence, without a cache."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import AttentionSpec, rotate

from .decoder import Attend, Layer, Rotary

TILE = 64  # queries whose scores are in memory at once


def contiguous_attend(length: jax.Array) -> Attend:
    """A causal ``attend`` for T tokens, a multiple of TILE, of which the first ``length`` i32[] are the sequence.

    What follows them is padding: it is not read, and what it sees is unspecified. The caches are None.
    """

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, rotary: Rotary, cache: None, spec: AttentionSpec, layer: Layer
    ) -> tuple[jax.Array, None]:
        tokens, heads, size = q.shape
        kv_heads = k.shape[1]
        at = jnp.arange(tokens)
        q, k = rotate(q, rotary), rotate(k, rotary)
        v = jnp.where((at < length)[:, None, None], v, 0)  # padding may be anything, NaN too

        def see(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
            q, rows = tile  # [TILE, Hkv, G, D], i32[TILE]
            scores = jnp.einsum("qhgd,khd->hgqk", q, k, preferred_element_type=jnp.float32) * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
            seen = (at <= rows[:, None]) & (at < length)
            if spec.window is not None:
                seen &= at > rows[:, None] - spec.window
            weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
            out = jnp.einsum("hgqk,khd->qhgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return out.astype(q.dtype)

        tiles = q.reshape(tokens // TILE, TILE, kv_heads, heads // kv_heads, size)
        return lax.map(see, (tiles, at.reshape(-1, TILE))).reshape(tokens, heads, size), None

    return attend
