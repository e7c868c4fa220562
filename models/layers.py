"""The two layers everything is made of. Weights are ``[out, in]``, as checkpoints store them; sums are in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

FEW_ROWS = 64  # up to here, on CPU, the weights go on the left of a product


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


def take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """table[ids], [T, H] from [V, H]; ids i32[T] outside [0, V) are clipped.

    bfloat16 rows are gathered as bits: XLA:CPU turns a gather of bfloat16 into one of float32 and converts the whole
    table first, in every step. The barrier ties the table to the ids: or XLA moves the change of type out of a decode
    loop, where it becomes a copy of the table.
    """
    if table.dtype != jnp.bfloat16:
        return table.at[ids].get(mode="clip")
    table, ids = lax.optimization_barrier((table, ids))
    rows = lax.bitcast_convert_type(table, jnp.uint16).at[ids].get(mode="clip")
    return lax.bitcast_convert_type(rows, table.dtype)


class Linear(nnx.Module):
    """y [T, out] = x [T, in] times weight [out, in] transposed (+ bias), in x's dtype."""

    def __init__(self, features_in: int, features_out: int, *, bias: bool, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((features_out, features_in), dtype))
        self.bias = nnx.Param(jnp.zeros((features_out,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.bias is None:
            return matmul(x, self.weight[...], x.dtype)
        y = matmul(x, self.weight[...]) + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Scale the last axis to unit root mean square, times a weight; inside in float32."""

    def __init__(self, features: int, *, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide *= lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * self.weight[...].astype(jnp.float32)).astype(x.dtype)
