"""The layers everything is made of. Weights are ``[out, in]``, as checkpoints store them; sums are in float32."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from pallas_kernels.cpu import linear as cpu_linear
from pallas_kernels.indexing import gather

FEW_ROWS = 64  # up to here, on CPU, the weights go on the left of a product


def is_packed(weight: jax.Array) -> bool:
    """Whether a weight, or those of many layers, is in the layout of the native CPU kernels; else it is [out, in]."""
    return weight.ndim >= 4


def matmul(x: jax.Array, weight: jax.Array, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """x [T, in] times weight [out, in] transposed: [T, out], summed in float32 and then rounded to ``dtype``.

    Summing in float32 is not only for accuracy: with bfloat16 operands XLA:CPU takes its fast path only when asked
    for a float32 result. For float32 operands it asks for real float32 products on accelerators too.
    """
    if x.shape[0] > FEW_ROWS:
        return _product(x, weight).astype(dtype)
    return lax.platform_dependent(
        x,
        weight,
        cpu=lambda x, weight: _weights_on_the_left(x, weight, dtype),
        default=lambda x, weight: _product(x, weight).astype(dtype),
    )


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    """f32[m, n] from left [m, k] and right [n, k]."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.dot_general(
        left, right, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _weights_on_the_left(x: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The same product as (weight x^T)^T. XLA:CPU repacks the right-hand operand of every product: let it be the small
    one (measured at 32 rows: 1.5x in bfloat16, 1.25x in float32). The barrier keeps XLA from turning it round again."""
    return lax.optimization_barrier(_product(weight, x).astype(dtype)).T


def multiply_head(hidden: jax.Array, weight: jax.Array, vocab: int, live: jax.Array | None) -> jax.Array:
    """hidden [R, H] times a head's weight, [V, H] or packed: logits f32[R, V]."""
    if is_packed(weight):
        return cpu_linear.linear(hidden, weight, vocab, live=live, dtype=jnp.float32)
    return matmul(hidden, weight)


def take_rows(table: jax.Array, ids: jax.Array, vocab: int, features: int, dtype: jnp.dtype) -> jax.Array:
    """table[ids], `dtype` [T, H] from [V, H] or packed; ids i32[T] outside [0, V) are clipped.

    bfloat16 rows are gathered as bits on CPU: XLA:CPU turns a gather of bfloat16 into one of float32 and converts the
    whole table first, in every step. The barrier ties the table to the ids: or XLA moves the change of type out of a
    decode loop, where it becomes a copy of the table. On TPUs the bits are such a copy.
    """
    if is_packed(table):
        return cpu_linear.take_rows(table, ids, vocab, features, dtype)
    take = partial(gather, mode="clip")
    if table.dtype != jnp.bfloat16:
        return take(table, ids)
    return lax.platform_dependent(table, ids, cpu=_take_rows_as_bits, default=take)


def take_split_rows(table: jax.Array, ids: jax.Array, vocab: int, axis: str) -> jax.Array:
    """The same from a table [V, H] whose rows are divided among the devices of a mesh axis; this one's [V / n, H]."""
    own = jnp.clip(ids, 0, vocab - 1) - lax.axis_index(axis) * table.shape[0]
    rows = take_rows(table, own, vocab, table.shape[1], table.dtype)
    return lax.psum(jnp.where(((own >= 0) & (own < table.shape[0]))[:, None], rows, 0), axis)


def _take_rows_as_bits(table: jax.Array, ids: jax.Array) -> jax.Array:
    table, ids = lax.optimization_barrier((table, ids))
    rows = gather(lax.bitcast_convert_type(table, jnp.uint16), ids, mode="clip")
    return lax.bitcast_convert_type(rows, table.dtype)


class RMSNorm(nnx.Module):
    """Scale the last axis to unit root mean square, times a weight; inside in float32."""

    def __init__(self, features: int, *, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array, layer: jax.Array | None = None) -> jax.Array:
        """``layer`` i32[]: the row of the weight that counts, where it has one for each layer."""
        weight = self.weight[...] if layer is None else gather(self.weight[...], layer, mode="promise_in_bounds")
        wide = x.astype(jnp.float32)
        wide *= lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * weight.astype(jnp.float32)).astype(x.dtype)


class Linear(nnx.Module):
    """y [T, out] = x [T, in] times weight [out, in] transposed (+ bias), in x's dtype.

    The weight may be packed for the native CPU kernels (``packing``), which do in one pass over x what is otherwise a
    chain of operations. With ``axis`` each device of a mesh axis has a part of the inputs, and results are added up.
    """

    gated = False

    def __init__(self, features_in: int, features_out: int, *, bias: bool, dtype: jnp.dtype, axis: str | None = None):
        self.features, self.axis = features_out, axis
        self.weight = nnx.Param(jnp.zeros((self.rows, features_in), dtype))
        self.bias = nnx.Param(jnp.zeros((self.rows,), dtype)) if bias else None

    @property
    def rows(self) -> int:
        """Of the weight."""
        return self.features

    def __call__(
        self,
        x: jax.Array,
        *,
        norm: RMSNorm | None = None,
        residual: jax.Array | None = None,
        live: jax.Array | None = None,
        layer: jax.Array | None = None,
    ) -> jax.Array:
        """The product of norm(x), plus residual [T, out]. ``live`` i32[]: rows from there on are padding.

        ``layer`` i32[]: which of the weights, where there is one for each layer; those are packed.
        """
        weight = self.weight[...]
        if is_packed(weight):
            return self._multiply_packed(x, (self.features,), norm, residual=residual, live=live, layer=layer)[0]
        bias = None if self.bias is None else self.bias[...]
        y = self.multiply(x if norm is None else norm(x), weight, bias)
        return y if residual is None else residual + y

    def split(
        self,
        x: jax.Array,
        parts: Sequence[int],
        *,
        norm: RMSNorm,
        live: jax.Array | None,
        layer: jax.Array | None,
    ) -> Sequence[jax.Array]:
        """The same in several arrays, [T, part] for each of ``parts``; packed weights write them so."""
        if is_packed(self.weight[...]):
            return self._multiply_packed(x, parts, norm, live=live, layer=layer)
        return jnp.split(self(x, norm=norm), np.cumsum(parts[:-1]), axis=1)

    def _multiply_packed(
        self, x: jax.Array, parts: Sequence[int], norm: RMSNorm | None, **options: Any
    ) -> tuple[jax.Array, ...]:
        scale, eps = (None, 0.0) if norm is None else (norm.weight[...], norm.eps)
        bias = None if self.bias is None else self.bias[...]
        weight = self.weight[...]
        return cpu_linear.split_linear(x, weight, parts, norm=scale, eps=eps, bias=bias, gated=self.gated, **options)

    def multiply(self, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        if self.axis is not None:  # in x's dtype: what travels between devices is what a large step waits for
            y = lax.psum(matmul(x, weight, x.dtype), self.axis)
            return y if bias is None else y + bias
        if bias is None:
            return matmul(x, weight, x.dtype)
        return (matmul(x, weight) + bias.astype(jnp.float32)).astype(x.dtype)


class GatedLinear(Linear):
    """silu(gate) * up, [T, out]: a weight [2 out, in] with all the gate's rows, then all those of up."""

    gated = True

    @property
    def rows(self) -> int:
        return 2 * self.features

    def multiply(self, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        gate, up = jnp.split(super().multiply(x, weight, bias).astype(jnp.float32), 2, axis=1)
        return (jax.nn.silu(gate) * up).astype(x.dtype)
