"""How numbers are stored in pages: plain, as bits, or quantised with a scale.

| pages            | value of an element                        | on CPU        |
|------------------|--------------------------------------------|---------------|
| float32, float16 | itself                                     | the same      |
| bfloat16         | itself                                     | uint16 (bits) |
| int8             | stored * scale, one scale a token and head | the same      |
| float8_e4m3fn    | stored * scale, one scale a token and head | uint8 (bits)  |

XLA:CPU has no native bfloat16 or float8 scatter and would convert the whole pool to float32 and back around every
write. Integers it moves as they are, hence the bits.

Quantisation, for each token and KV head on its own: scale = max|x| / 127 (int8; round to nearest even) or
max|x| / 448 (float8_e4m3fn, whose largest number is 448). Where that scale is 0 (a row of zeros, or of numbers so
small that it underflows) zeros are stored with scale 0. A row with a NaN or an infinity has a scale that is not
finite, so none of its values is read back as a number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.checks import QUANTISED, fail

KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8")
_FP8 = jnp.dtype(jnp.float8_e4m3fn)
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "uint8": 448.0}


def storage_dtype(dtype: jax.typing.DTypeLike, platform: str) -> np.dtype:
    """The dtype in which pages of `dtype`, a name of `KV_DTYPES` or its dtype, are stored on `platform` ("cpu", ...).

    On "cpu" bfloat16 is stored as uint16 bits and float8_e4m3fn as uint8 bits; all else as itself.
    """
    try:
        found = _FP8 if isinstance(dtype, str) and dtype == "fp8" else jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or (found != _FP8 and found.name not in KV_DTYPES):
        fail("dtype", repr(dtype), "one of " + ", ".join(map(repr, KV_DTYPES)))
    if platform == "cpu" and found == jnp.bfloat16:
        return np.dtype(np.uint16)
    if platform == "cpu" and found == _FP8:
        return np.dtype(np.uint8)
    return found


def to_storage(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Values as unquantised pages of `dtype` store them: cast, for uint16 to bfloat16 and then taken as bits."""
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def from_storage(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Stored numbers, not yet multiplied by their scales, as `dtype`."""
    if x.dtype == jnp.uint8:
        return lax.bitcast_convert_type(x, _FP8).astype(dtype)
    if x.dtype != jnp.uint16:
        return x.astype(dtype)
    if dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.bfloat16)
    # bfloat16 bits are the upper half of the float32's bits
    return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32).astype(dtype)


def quantise(x: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """x [..., D] -> (stored numbers `dtype`[..., D], scales f32[...]) with x ~ stored * scales. See the module."""
    assert dtype.name in QUANTISED
    largest = _LARGEST[dtype.name]
    x = x.astype(jnp.float32)
    scales = jnp.abs(x).max(axis=-1) / largest
    scaled = x / jnp.where(scales == 0, 1.0, scales)[..., None]
    scaled = jnp.where(scales[..., None] == 0, 0.0, jnp.clip(scaled, -largest, largest))
    if dtype == jnp.int8:
        return jnp.round(scaled).astype(jnp.int8), scales
    stored = scaled.astype(_FP8)
    return (lax.bitcast_convert_type(stored, jnp.uint8) if dtype == jnp.uint8 else stored), scales
