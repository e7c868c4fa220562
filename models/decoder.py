"""One decoder for Llama, Mistral, Qwen2, Qwen3 and their kin.

Letters in shapes: T packed tokens of all sequences, H hidden, F feed-forward, V vocabulary,
Hq query heads, Hkv key/value heads, D head size.

The decoder knows nothing of paging. It hands q, k, v of every layer to ``attend``, which stores k and v in
that layer's cache as it likes and returns what the queries see.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pallas_kernels import AttentionSpec

from .config import ModelConfig
from .layers import GatedLinear, Linear, RMSNorm, is_packed, multiply_head, take_rows
from .rope import rotary_table

Rotary = tuple[jax.Array, jax.Array]  # cos and sin, f32[T, D/2]
# (q [T,Hq,D], k [T,Hkv,D], v [T,Hkv,D], rotary, layer_cache, the layer's options) -> (out [T,Hq,D], layer_cache);
# q and k are still to be rotated.
Attend = Callable[[jax.Array, jax.Array, jax.Array, Rotary, Any, AttentionSpec], tuple[jax.Array, Any]]


class Attention(nnx.Module):
    def __init__(self, c: ModelConfig, dtype: jnp.dtype, window: int | None):
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.spec = AttentionSpec(scale=c.head_dim**-0.5, window=window)
        fused = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.qkv = Linear(c.hidden_size, fused, bias=c.qkv_bias, dtype=dtype)  # outputs: all q, all k, all v
        self.out = Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.attention_out_bias, dtype=dtype)
        self.q_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps, dtype=dtype) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps, dtype=dtype) if c.qk_norm else None

    def __call__(
        self, x: jax.Array, norm: RMSNorm, rotary: Rotary, cache: Any, attend: Attend, live: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        """x + attention(norm(x)), [T, H], and the layer's cache."""
        qkv = self.qkv(x, norm=norm, live=live).reshape(x.shape[0], -1, self.head_dim)  # [T, Hq + 2 Hkv, D]
        q, k, v = jnp.split(qkv, [self.heads, self.heads + self.kv_heads], axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        seen, cache = attend(q, k, v, rotary, cache, self.spec)  # [T, Hq, D]
        return self.out(seen.reshape(x.shape[0], -1), residual=x, live=live), cache


class Mlp(nnx.Module):
    def __init__(self, c: ModelConfig, dtype: jnp.dtype):
        self.gate_up = GatedLinear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, dtype=dtype)
        self.down = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias, dtype=dtype)

    def __call__(self, x: jax.Array, norm: RMSNorm, live: jax.Array | None) -> jax.Array:
        """x + mlp(norm(x)), [T, H]."""
        return self.down(self.gate_up(x, norm=norm, live=live), residual=x, live=live)


class Block(nnx.Module):
    def __init__(self, c: ModelConfig, dtype: jnp.dtype, window: int | None):
        self.attention_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        self.attention = Attention(c, dtype, window)
        self.mlp_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        self.mlp = Mlp(c, dtype)

    def __call__(
        self, x: jax.Array, rotary: Rotary, cache: Any, attend: Attend, live: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        x, cache = self.attention(x, self.attention_norm, rotary, cache, attend, live)
        return self.mlp(x, self.mlp_norm, live), cache


class Decoder(nnx.Module):
    """Tokens to hidden states, and hidden states to logits: two calls, because only some rows are sampled.

    A new one holds zeros; ``params.abstract_decoder`` makes one without memory, ``load`` fills it.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype = jnp.float32):
        c = config
        self.config = c
        self.embedding = nnx.Param(jnp.zeros((c.vocab_size, c.hidden_size), dtype))
        self.layers = nnx.List([Block(c, dtype, window) for window in c.windows or (None,) * c.num_layers])
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, bias=False, dtype=dtype)
        self.head = head

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: tuple[Any, ...],
        attend: Attend,
        live: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """tokens i32[T], positions i32[T], one cache per layer -> (hidden [T, H] after the last norm, cache).

        Token ids must lie in [0, V): they are checked on the host; here a stray one is clipped. ``live`` i32[]: rows
        from there on are padding, whose results are unspecified; packed weights make their products free.
        """
        c, dtype = self.config, self.norm.weight[...].dtype  # of activations; a packed embedding may be int8
        x = take_rows(self.embedding[...], tokens, c.vocab_size, c.hidden_size, dtype)  # [T, H]
        # The barrier: or XLA computes sines and cosines again in every layer that uses them.
        rotary = lax.optimization_barrier(rotary_table(c.rope, c.head_dim, positions))
        updated = []
        for block, layer_cache in zip(self.layers, cache, strict=True):
            x, layer_cache = block(x, rotary, layer_cache, attend, live)
            updated.append(layer_cache)
        return self.norm(x), tuple(updated)

    def logits(self, hidden: jax.Array, live: jax.Array | None = None) -> jax.Array:
        """hidden [R, H] -> f32[R, V]; rows from ``live`` i32[] on are unspecified."""
        weight = self.embedding[...] if self.head is None else self.head.weight[...]
        return multiply_head(hidden, weight, self.config.vocab_size, live)

    @property
    def skips_padding(self) -> bool:
        """Whether rows from ``live`` on cost nothing."""
        return is_packed(self.embedding[...])
