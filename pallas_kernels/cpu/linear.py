"""Products with weights packed for the native kernels (layout: src/kernels.h)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.library import require_library as load

PANEL = 32  # output columns of a panel


def pack_weight(weight: jax.Array, gated: bool = False) -> jax.Array:
    """[N, K] float32 or bfloat16 -> [ceil(N / 32), ceil(K / v), 32, v], v values to four bytes, zeros as padding."""
    n, k = weight.shape
    v = 4 // weight.dtype.itemsize
    if gated:
        gate, up = (pack_weight(half) for half in jnp.split(weight, 2))
        return jnp.stack([gate, up], axis=1).reshape(-1, *gate.shape[1:])
    panels, steps = -(-n // PANEL), -(-k // v)
    padded = jnp.pad(weight, ((0, panels * PANEL - n), (0, steps * v - k)))
    return padded.reshape(panels, PANEL, steps, v).swapaxes(1, 2)


def linear(
    x, weight, features, *, norm=None, eps=0.0, bias=None, residual=None, live=None, gated=False, dtype=None, set=""
):
    load()
    dtype = dtype or x.dtype
    none = jnp.zeros(0, x.dtype)
    call = jax.ffi.ffi_call("jpaged_cpu_linear", jax.ShapeDtypeStruct((x.shape[0], features), dtype))
    return call(
        x,
        weight,
        none if norm is None else norm,
        none if bias is None else bias,
        jnp.zeros(0, dtype) if residual is None else residual,
        jnp.zeros(0, jnp.int32) if live is None else live.reshape(1),
        eps=np.float32(eps),
        gated=gated,
        set=set,
    )
