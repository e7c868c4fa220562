"""Rotary position embedding (RoPE) and the ways checkpoints stretch it to longer contexts.

Frequencies follow ``transformers.modeling_rope_utils`` in float32, so that logits agree with it.

In transformers two scalings depend on a sequence's length, so that a token is rotated according to what
stands after it. In a paged cache a key is rotated once and kept, and a token must not depend on how its
prompt was cut into chunks, so here the rotation is a function of the position alone:

* ``dynamic``: position p uses the base for length p + 1. That is what transformers does token by token, and
  all it does up to ``max_position_embeddings``; it differs only for a *prompt* longer than that.
* ``longrope``: the long factors if the longest servable sequence exceeds the original context, else the
  short ones (vLLM's rule). ``ModelConfig.with_max_length`` chooses.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import ConfigError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles. Fields beyond ``theta`` matter only to the kinds that name them."""

    theta: float = 10_000.0
    kind: str = "default"  # one of ROPE_KINDS, or "factors": divide each frequency by a number (GGUF)
    factor: float = 1.0  # linear, dynamic, llama3, yarn
    original_max_positions: int = 0  # dynamic, llama3, yarn, longrope: the context before stretching
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    factors: tuple[float, ...] = ()  # longrope (short) and "factors"; one per pair of dimensions
    long_factors: tuple[float, ...] = ()  # longrope
    use_long: bool = False  # longrope

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], head_dim: int) -> "RopeConfig":
        """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (transformers 4).

        Raises ``ConfigError`` for an unknown scaling or a missing parameter of it.
        """
        scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise ConfigError(f"rope scaling must be a dict or null, got {scaling!r}")
        theta = scaling.get("rope_theta", hf.get("rope_theta"))
        theta = 10_000.0 if theta is None else float(theta)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ROPE_KINDS:
            raise ConfigError(f"rope scaling type {kind!r} is not supported; allowed: {', '.join(ROPE_KINDS)}")
        partial = scaling.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise ConfigError(f"partial_rotary_factor {partial!r} is not supported; allowed: 1 or absent")
        max_positions = int(hf["max_position_embeddings"])
        # transformers 4 lets the original length stand beside rope_scaling instead of inside it
        original = scaling.get("original_max_position_embeddings", hf.get("original_max_position_embeddings"))

        def need(name: str) -> Any:
            value = original if name == "original_max_position_embeddings" else scaling.get(name)
            if value is None:
                raise ConfigError(f"rope scaling {kind!r} needs {name!r}; given: {sorted(scaling)}")
            return value

        if kind == "default":
            return cls(theta)
        if kind == "linear":
            return cls(theta, kind, factor=float(need("factor")))
        if kind == "dynamic":
            return cls(theta, kind, factor=float(need("factor")), original_max_positions=max_positions)
        if kind == "llama3":
            return cls(
                theta,
                kind,
                factor=float(need("factor")),
                original_max_positions=int(need("original_max_position_embeddings")),
                low_freq_factor=float(need("low_freq_factor")),
                high_freq_factor=float(need("high_freq_factor")),
            )
        if kind == "yarn":
            return cls._yarn(theta, scaling, int(original or max_positions), max_positions)
        original = int(need("original_max_position_embeddings"))
        short, long = (tuple(float(x) for x in need(f"{n}_factor")) for n in ("short", "long"))
        if len(short) != head_dim // 2 or len(long) != head_dim // 2:
            raise ConfigError(
                f"longrope needs head_dim / 2 = {head_dim // 2} short and long factors, "
                f"got {len(short)} and {len(long)}"
            )
        factor = scaling.get("factor") or max_positions / original
        attention = scaling.get("attention_factor")
        if attention is None:
            attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return cls(
            theta,
            kind,
            original_max_positions=original,
            attention_factor=float(attention),
            factors=short,
            long_factors=long,
            use_long=max_positions > original,
        )

    @classmethod
    def _yarn(cls, theta: float, scaling: Mapping[str, Any], original: int, max_positions: int) -> "RopeConfig":
        factor = scaling.get("factor")
        factor = max_positions / original if factor is None else float(factor)
        attention = scaling.get("attention_factor")
        if attention is None:
            numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
            attention = (
                _yarn_mscale(factor, numerator) / _yarn_mscale(factor, denominator)
                if numerator and denominator
                else _yarn_mscale(factor, 1.0)
            )
        return cls(
            theta,
            "yarn",
            factor=factor,
            original_max_positions=original,
            attention_factor=float(attention),
            beta_fast=float(scaling.get("beta_fast") or 32),
            beta_slow=float(scaling.get("beta_slow") or 1),
            truncate=bool(scaling.get("truncate", True)),
        )


def _yarn_mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """f32[head_dim / 2]: radians per position of each rotated pair. (``dynamic``: before it stretches.)"""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = 1 / np.float32(rope.theta) ** exponents
    if rope.kind in ("default", "dynamic"):
        return plain
    if rope.kind == "linear":
        return plain / np.float32(rope.factor)
    if rope.kind == "factors":
        return plain / np.asarray(rope.factors, np.float32)
    if rope.kind == "longrope":
        return plain / np.asarray(rope.long_factors if rope.use_long else rope.factors, np.float32)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    raise ConfigError(f"rope kind {rope.kind!r} is not supported; allowed: {', '.join(ROPE_KINDS)}, factors")


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Slow waves are stretched by ``factor``, fast ones kept, those between blended."""
    turns = np.float32(rope.original_max_positions) * plain / np.float32(2 * math.pi)  # in the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0, 1).astype(np.float32)
    return (1 - blend) * plain / np.float32(rope.factor) + blend * plain


def _yarn(rope: RopeConfig, plain: np.ndarray, head_dim: int) -> np.ndarray:
    """A linear ramp over dimensions from keeping (fast waves) to stretching (slow waves)."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low if high != low else 0.001)
    stretch = np.clip(ramp, 0, 1).astype(np.float32)
    return plain / np.float32(rope.factor) * stretch + plain * (1 - stretch)


def rotary_table(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, f32[T, head_dim / 2] each, of positions i32[T]: once a step for all layers."""
    position = positions.astype(jnp.float32)[:, None]
    if rope.kind == "dynamic":
        # the base grows with the length; written as a factor of the plain frequencies
        length = jnp.maximum(position + 1, rope.original_max_positions)
        growth = rope.factor * length / rope.original_max_positions - (rope.factor - 1)
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim - 2)
        frequencies = jnp.asarray(inverse_frequencies(rope, head_dim)) * growth**-exponents  # [T, head_dim / 2]
    else:
        frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))
    angles = position * frequencies
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor
