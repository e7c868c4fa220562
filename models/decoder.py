"""One decoder for Llama, Mistral, Qwen2, Qwen3 and their kin.

Letters in shapes: T packed tokens of all sequences, H hidden, F feed-forward, V vocabulary,
Hq query heads, Hkv key/value heads, D head size.

The decoder knows nothing of paging. It hands q, k, v of every layer to ``attend``, which stores k and v in
that layer's cache as it likes and returns what the queries see.

Its layers come in runs (``runs``). A run of one is a layer as it is; a run of more is a loop over one ``Block`` whose
parameters have an axis of layers in front, and ``layer`` says to everything in it which one it is about.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pallas_kernels import AttentionSpec

from .config import ModelConfig
from .layers import GatedLinear, Linear, RMSNorm, is_packed, multiply_head, take_rows, take_split_rows
from .rope import rotary_table
from .runs import find_runs, list_windows
from .split import Split

Rotary = tuple[jax.Array, jax.Array]  # cos and sin, f32[T, D/2]
Layer = jax.Array | None  # i32[], the layer's place in its run; None for a run of one
# (q [T,Hq,D], k [T,Hkv,D], v [T,Hkv,D], rotary, the run's cache, the layer's options, layer)
# -> (out [T,Hq,D], the run's cache); q and k are still to be rotated.
Attend = Callable[[jax.Array, jax.Array, jax.Array, Rotary, Any, AttentionSpec, Layer], tuple[jax.Array, Any]]


class Attention(nnx.Module):
    def __init__(self, c: ModelConfig, dtype: jnp.dtype, window: int | None, axis: str | None):
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.spec = AttentionSpec(scale=c.head_dim**-0.5, window=window)
        fused = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.qkv = Linear(c.hidden_size, fused, bias=c.qkv_bias, dtype=dtype)  # outputs: all q, all k, all v
        wide = c.num_heads * c.head_dim
        self.out = Linear(wide, c.hidden_size, bias=c.attention_out_bias, dtype=dtype, axis=axis)
        self.q_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps, dtype=dtype) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps, dtype=dtype) if c.qk_norm else None

    def __call__(
        self,
        x: jax.Array,
        norm: RMSNorm,
        rotary: Rotary,
        cache: Any,
        attend: Attend,
        live: jax.Array | None,
        layer: Layer,
    ) -> tuple[jax.Array, Any]:
        """x + attention(norm(x)), [T, H], and the cache."""
        widths = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        parts = self.qkv.split(x, widths, norm=norm, live=live, layer=layer)
        q, k, v = (part.reshape(x.shape[0], -1, self.head_dim) for part in parts)  # [T, heads, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, layer), self.k_norm(k, layer)
        seen, cache = attend(q, k, v, rotary, cache, self.spec, layer)  # [T, Hq, D]
        return self.out(seen.reshape(x.shape[0], -1), residual=x, live=live, layer=layer), cache


class Mlp(nnx.Module):
    def __init__(self, c: ModelConfig, dtype: jnp.dtype, axis: str | None):
        self.gate_up = GatedLinear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, dtype=dtype)
        self.down = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias, dtype=dtype, axis=axis)

    def __call__(self, x: jax.Array, norm: RMSNorm, live: jax.Array | None, layer: Layer) -> jax.Array:
        """x + mlp(norm(x)), [T, H]."""
        wide = self.gate_up(x, norm=norm, live=live, layer=layer)
        return self.down(wide, residual=x, live=live, layer=layer)


class Block(nnx.Module):
    def __init__(self, c: ModelConfig, dtype: jnp.dtype, window: int | None, axis: str | None):
        self.attention_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        self.attention = Attention(c, dtype, window, axis)
        self.mlp_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        self.mlp = Mlp(c, dtype, axis)

    def __call__(
        self, x: jax.Array, rotary: Rotary, cache: Any, attend: Attend, live: jax.Array | None, layer: Layer
    ) -> tuple[jax.Array, Any]:
        x, cache = self.attention(x, self.attention_norm, rotary, cache, attend, live, layer)
        return self.mlp(x, self.mlp_norm, live, layer), cache


class Decoder(nnx.Module):
    """Tokens to hidden states, and hidden states to logits: two calls, because only some rows are sampled.

    A new one holds zeros; ``params.abstract_decoder`` makes one without memory, ``load`` fills it. ``layers`` has one
    block for each of ``runs`` (default: one a layer); a block that stands for more is made for one layer, and the
    parameters that it is given have an axis more. With ``split`` it is one device's part, to be run inside a
    ``shard_map``; ``config`` is always the whole model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype = jnp.float32,
        runs: Sequence[int] | None = None,
        split: Split | None = None,
    ):
        c = config if split is None else split.part(config)
        self.config = config
        self.axis = axis = None if split is None else split.axis
        self.runs = find_runs(c, stacked=False) if runs is None else tuple(runs)
        self.embedding = nnx.Param(jnp.zeros((c.vocab_size, c.hidden_size), dtype))
        windows = list_windows(c)
        self.layers = nnx.List([Block(c, dtype, windows[sum(self.runs[:run])], axis) for run in range(len(self.runs))])
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, bias=False, dtype=dtype)
        self.head = head

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: tuple[Any, ...] | None,
        attend: Attend,
        live: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """tokens i32[T], positions i32[T], one cache a run -> (hidden [T, H] after the last norm, cache).

        Without a cache ``attend`` is given None for each.
        Token ids must lie in [0, V): they are checked on the host; here a stray one is clipped. ``live`` i32[]: rows
        from there on are padding, whose results are unspecified; packed weights make their products free.
        """
        c, dtype = self.config, self.norm.weight[...].dtype  # of activations; a packed embedding may be int8
        if self.axis is None:
            x = take_rows(self.embedding[...], tokens, c.vocab_size, c.hidden_size, dtype)  # [T, H]
        else:
            x = take_split_rows(self.embedding[...], tokens, c.vocab_size, self.axis)
        # The barrier: or XLA computes sines and cosines again in every layer that uses them.
        rotary = lax.optimization_barrier(rotary_table(c.rope, c.head_dim, positions))
        updated = []
        for block, count, part in zip(self.layers, self.runs, cache or (None,) * len(self.runs), strict=True):

            def apply(layer: Layer, carry: tuple[jax.Array, Any], block: Block = block) -> tuple[jax.Array, Any]:
                x, part = carry
                return block(x, rotary, part, attend, live, layer)

            x, part = apply(None, (x, part)) if count == 1 else lax.fori_loop(0, count, apply, (x, part))
            updated.append(part)
        return self.norm(x), tuple(updated)

    def blocks(self) -> list[tuple[Block, Layer]]:
        """Every layer: the block it is in and its place there."""
        return [
            (block, None if count == 1 else jnp.int32(layer))
            for block, count in zip(self.layers, self.runs, strict=True)
            for layer in range(count)
        ]

    def logits(self, hidden: jax.Array, live: jax.Array | None = None) -> jax.Array:
        """hidden [R, H] -> f32[R, V]; rows from ``live`` i32[] on are unspecified."""
        weight = self.embedding[...] if self.head is None else self.head.weight[...]
        if self.axis is None:
            return multiply_head(hidden, weight, self.config.vocab_size, live)
        part = multiply_head(hidden, weight, weight.shape[0], live)
        return lax.all_gather(part, self.axis, axis=1, tiled=True)[:, : self.config.vocab_size]

    @property
    def skips_padding(self) -> bool:
        """Whether rows from ``live`` on cost nothing."""
        return is_packed(self.embedding[...])
