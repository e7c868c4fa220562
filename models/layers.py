"""The two layers everything is made of. Weights are ``[in, out]``; sums are in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


def matmul(x: jax.Array, weight: jax.Array, contract: int = 0) -> jax.Array:
    """f32[T, out] = x [T, in] times weight [in, out] (``contract=1``: weight [out, in]).

    The float32 result type is not only for accuracy: with bfloat16 operands XLA:CPU takes its fast path only
    then. For float32 operands ask for real float32 products on accelerators too.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, weight, (((1,), (contract,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """table[ids], [T, H] from [V, H]; ids i32[T] outside [0, V) are clipped.

    bfloat16 rows are gathered as bits: XLA:CPU turns a gather of bfloat16 into one of float32 and converts the whole
    table first, in every step.
    """
    if table.dtype != jnp.bfloat16:
        return table.at[ids].get(mode="clip")
    rows = lax.bitcast_convert_type(table, jnp.uint16).at[ids].get(mode="clip")
    return lax.bitcast_convert_type(rows, table.dtype)


class Linear(nnx.Module):
    """y [T, out] = x [T, in] @ weight (+ bias), in x's dtype."""

    def __init__(self, features_in: int, features_out: int, *, bias: bool, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((features_in, features_out), dtype))
        self.bias = nnx.Param(jnp.zeros((features_out,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = matmul(x, self.weight[...])
        if self.bias is not None:
            y += self.bias[...].astype(jnp.float32)
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
