"""Products with packed weights by the native kernels (`src/linear.h`).

A weight [N, K] is packed as [ceil(N / P), ceil(K / v), P, v], where v values fill four bytes (1 float32, 2 bfloat16),
P outputs are what an instruction set computes at once (`panel_width`) and zeros fill up rows and columns: each panel of
P outputs is one stream of memory, read once for all rows of x. A gated weight (a gate's N rows, then the N rows it
multiplies) has the two panel by panel, a gate and then its factor.

An int8 weight has v = 4. Each 64 inputs (16 steps) are led by a step of P int32, -128 times the sum of each row's
integers in them, and a step of P float32 ends the panel, what each row's integers are multiplied with. Rows of x are
rounded to 8 bits when they are multiplied, each 64 values by the largest of them, and stored with 128 added, since
processors multiply unsigned with signed bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.checks import fail
from pallas_kernels.cpu.library import panel_width, require_library

GROUP = 16  # steps of an int8 panel
MOST_PARTS = 3  # arrays that outputs can be in
WEIGHT_DTYPES = ("float32", "bfloat16")


def pack_weight(weight: jax.Array | np.ndarray, *, gated: bool = False, instruction_set: str = "") -> np.ndarray:
    """[N, K] float32 or bfloat16 ([2 N, K] if gated) -> [panels, steps, P, v], on the host.

    `instruction_set`: which kernels are to read it; the best ("") unless told.
    Raises ValueError for another shape or dtype, an instruction set that is not here, or no native kernels.
    """
    return _pack(_check_weight(weight), partial(_pack_panels, panel=panel_width(instruction_set)), gated)


def quantize_weight(weight: jax.Array | np.ndarray, *, gated: bool = False, instruction_set: str = "") -> np.ndarray:
    """The same as int8 [panels, steps with sums and scales, P, 4], each row in 127 parts of its largest value.

    Raises ValueError as `pack_weight` does.
    """
    return _pack(_check_weight(weight), partial(_quantize_panels, panel=panel_width(instruction_set)), gated)


def _quantize_panels(weight: np.ndarray, panel: int) -> np.ndarray:
    """[N, K] -> int8 [panels, steps with sums and scales, P, 4]."""
    wide = weight.astype(np.float32)
    scales = np.abs(wide).max(axis=1, initial=0) / 127
    rounded = np.rint(wide / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8)
    panels = _pack_panels(rounded, panel)  # [panels, steps, P, 4]
    units = np.zeros(len(panels) * panel, np.float32)
    units[: len(scales)] = scales
    parts = []
    for start in range(0, panels.shape[1], GROUP):
        group = panels[:, start : start + GROUP]
        parts += [_as_step(-128 * group.sum(axis=(1, 3), dtype=np.int32)), group]
    return np.concatenate([*parts, _as_step(units.reshape(-1, panel))], axis=1)


def _as_step(words: np.ndarray) -> np.ndarray:
    """Four bytes for each row of a panel, [panels, P], as a step of int8: [panels, 1, P, 4]."""
    return np.ascontiguousarray(words).view(np.int8).reshape(len(words), 1, -1, 4)


def count_steps(features_in: int, dtype: jax.typing.DTypeLike) -> int:
    """Steps of a panel, int8 ones with those that hold no weights."""
    dtype = jnp.dtype(dtype)
    steps = -(-features_in * dtype.itemsize // 4)
    return steps if dtype != jnp.int8 else steps + -(-steps // GROUP) + 1


def _check_weight(weight: jax.Array | np.ndarray) -> np.ndarray:
    weight = np.asarray(weight)
    if weight.ndim != 2 or weight.dtype.name not in WEIGHT_DTYPES:
        fail("weight", f"{weight.dtype}{weight.shape}", f"[N, K] of {' or '.join(WEIGHT_DTYPES)}")
    return weight


def _pack(weight: np.ndarray, pack: Callable[[np.ndarray], np.ndarray], gated: bool) -> np.ndarray:
    """The panels of a weight; of a gated one those of its two halves in turns."""
    if not gated:
        return pack(weight)
    if weight.shape[0] % 2:
        fail("weight", f"{weight.shape[0]} rows", "an even number: gates, then what they multiply")
    halves = [pack(half) for half in np.split(weight, 2)]
    return np.stack(halves, axis=1).reshape(-1, *halves[0].shape[1:])


def _pack_panels(weight: np.ndarray, panel: int) -> np.ndarray:
    """[N, K] -> [panels, steps, P, v]."""
    n, k = weight.shape
    v = 4 // weight.dtype.itemsize
    panels, steps = -(-n // panel), -(-k // v)
    padded = np.zeros((panels * panel, steps * v), weight.dtype)
    padded[:n, :k] = weight
    # Four bytes at a time, whatever they hold: NumPy moves integers fast.
    words = padded.view(np.uint32).reshape(panels, panel, steps)
    return np.ascontiguousarray(words.swapaxes(1, 2)).view(weight.dtype).reshape(panels, steps, panel, v)


def linear(x: jax.Array, weight: jax.Array, features: int, **options: Any) -> jax.Array:
    """`split_linear` with its outputs in one array: [T, features]."""
    return split_linear(x, weight, (features,), **options)[0]


def split_linear(
    x: jax.Array,
    weight: jax.Array,
    parts: Sequence[int],
    *,
    norm: jax.Array | None = None,
    eps: float = 0.0,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    gated: bool = False,
    live: jax.Array | None = None,
    layer: jax.Array | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    instruction_set: str = "",
) -> tuple[jax.Array, ...]:
    """norm(x) times weight transposed, + bias, gated, + residual: [T, part] for each of `parts`.

    Sums are float32 and run over K in order, so a row's result does not depend on the other rows.

    Args:
        x: [T, K], float32 or bfloat16.
        weight: packed, of x's dtype or int8.
        parts: outputs in each array of the result, 1 to 3 of them; N in all.
        norm: [K]; x is scaled to unit root mean square (plus `eps` under the root), times this, rounded to x's dtype.
        bias: [N], or [2 N] if gated, added to the products.
        residual: [T, N] of the result's dtype, added to the rounded result; for one part only.
        gated: the result is silu(gate) * factor of the two halves of a gated weight.
        live: i32[]; rows from here on are padding, neither computed nor written: they hold anything. None: all count.
        layer: i32[]; weight, norm and bias have one more axis in front, and this is the index on it that counts. So a
            loop over layers passes all of them and copies none. An index outside is an error when the program runs.
        dtype: of the result, x's (by default) or float32.

    Raises:
        ValueError: operands that do not fit, an instruction set that is not here, or no native kernels.
    """
    panel = panel_width(instruction_set)
    dtype, features = jnp.dtype(dtype or x.dtype), sum(parts)
    v = 4 // weight.dtype.itemsize
    panels = -(-features // panel) * (2 if gated else 1)
    if not 1 <= len(parts) <= MOST_PARTS or (len(parts) > 1 and residual is not None):
        fail("parts", parts, f"1 to {MOST_PARTS} numbers, 1 with a residual")
    if x.ndim != 2 or x.dtype.name not in WEIGHT_DTYPES:
        fail("x", f"{x.dtype}{x.shape}", f"[T, K] of {' or '.join(WEIGHT_DTYPES)}")
    if weight.dtype not in (x.dtype, jnp.int8):
        fail("weight", f"{weight.dtype}{weight.shape}", f"{x.dtype} or int8, packed")
    layers = () if layer is None else weight.shape[:1]
    packed = (*layers, panels, count_steps(x.shape[1], weight.dtype), panel, v)
    if weight.shape != packed:
        fail("weight", f"{weight.dtype}{weight.shape}", f"{weight.dtype}{packed}, packed for x {x.shape}")
    if dtype not in (x.dtype, jnp.float32):
        fail("dtype", dtype, f"{x.dtype} or float32")
    given = {
        "norm": (norm, (*layers, x.shape[1]), x.dtype),
        "bias": (bias, (*layers, features * (2 if gated else 1)), x.dtype),
        "residual": (residual, (x.shape[0], features), dtype),
        "live": (None if live is None else live.reshape(1), (1,), jnp.dtype(jnp.int32)),
        "layer": (None if layer is None else layer.reshape(1), (1,), jnp.dtype(jnp.int32)),
    }
    operands = []
    for name, (operand, shape, wanted) in given.items():
        if operand is not None and (operand.shape, operand.dtype) != (shape, wanted):
            fail(name, f"{operand.dtype}{operand.shape}", f"None or {wanted}{shape}")
        operands.append(jnp.zeros(0, wanted) if operand is None else operand)
    call = jax.ffi.ffi_call("jpaged_cpu_linear", [jax.ShapeDtypeStruct((x.shape[0], part), dtype) for part in parts])
    return tuple(call(x, weight, *operands, eps=np.float32(eps), gated=gated, set=instruction_set))


def take_rows(
    weight: jax.Array,
    ids: jax.Array,
    rows: int,
    features: int,
    dtype: jax.typing.DTypeLike,
    *,
    instruction_set: str = "",
) -> jax.Array:
    """Rows `ids` i32[T] of a packed weight [rows, features] of `dtype` or int8: `dtype` [T, features].

    Ids outside are clipped.
    """
    require_library()
    if weight.dtype not in (dtype, jnp.int8):
        fail("weight", weight.dtype, f"{jnp.dtype(dtype)} or int8")
    call = jax.ffi.ffi_call("jpaged_cpu_take_rows", jax.ShapeDtypeStruct((*ids.shape, features), dtype))
    return call(weight, ids, rows=np.int64(rows), set=instruction_set)
