"""What the Triton kernels share: the geometry of a tile, fetching keys and values, and the running softmax.

Triton's tensors have a power of two of elements, and its matrix products take at least 16 rows, columns and terms. So a
head of D numbers lies in `lanes` columns, the least power of two that is enough, and what is beyond D is neither loaded
nor stored. Pools are seen as [N * Hkv * B, D], a row a token of one head; row and column indices are all a load needs.

Scores are kept in units of log 2, because the hardware has 2^x and not e^x.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.tiles import arange
from pallas_kernels.triton.choices import LEAST, power_of_two, product_dtype

MASKED = -1e30  # finite, or a tile without a visible key would give inf - inf
LOG2_E = math.log2(math.e)
Ref = Any


class Geometry(NamedTuple):
    """The static sizes of an attention call."""

    kv_heads: int
    group: int  # query heads a KV head
    head_dim: int
    block_size: int
    span: int  # keys in a step of the inner loop
    dtype: jnp.dtype  # operands of the products

    @property
    def lanes(self) -> int:
        return max(LEAST, power_of_two(self.head_dim))

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def get_geometry(q: jax.Array, pages: KVPages, span: int) -> Geometry:
    _, kv_heads, block_size, head_dim = pages.k.shape
    return Geometry(kv_heads, q.shape[1] // kv_heads, head_dim, block_size, span, product_dtype(q, pages))


def flatten(pages: KVPages) -> KVPages:
    """Pools as [N * Hkv * B, D] and scales as [N * Hkv * B]: the same memory.

    Raises ValueError for a pool that Pallas would index wrongly: it takes 32-bit offsets up to 2^32 bytes.
    """
    if pages.k.dtype.itemsize == 1 and 2**31 < pages.k.size <= 2**32:
        raise ValueError(
            f"pages.k: got {pages.k.size} elements of one byte; allowed by the triton backend are at most {2**31} or "
            f"more than {2**32}"
        )
    head_dim = pages.k.shape[3]
    return KVPages(
        pages.k.reshape(-1, head_dim),
        pages.v.reshape(-1, head_dim),
        None if pages.k_scales is None else pages.k_scales.reshape(-1),
        None if pages.v_scales is None else pages.v_scales.reshape(-1),
    )


def load_rows(ref: Ref, rows: jax.Array, live: jax.Array | None, head_dim: int, lanes: int) -> jax.Array:
    """Rows i32[n] of a [*, D] array -> [n, lanes]; zeros in rows that are not live bool[n] and columns from D on."""
    column = arange(lanes)
    mask = None if live is None else live[:, None]
    if lanes != head_dim:
        inside = (column < head_dim)[None, :]
        mask = inside if mask is None else mask & inside
    other = None if mask is None else jnp.zeros((), ref.dtype)
    where = ref.at[rows[:, None], column[None, :]]
    return plgpu.load(where, mask=None if mask is None else _full(mask, (rows.shape[0], lanes)), other=other)


def store_rows(ref: Ref, rows: jax.Array, x: jax.Array, live: jax.Array, head_dim: int) -> None:
    """The inverse of `load_rows`: x [n, lanes] to rows that are live bool[n]."""
    column = arange(x.shape[1])
    mask = live[:, None] & (column < head_dim)[None, :]
    plgpu.store(ref.at[rows[:, None], column[None, :]], x.astype(ref.dtype), mask=_full(mask, x.shape))


def _full(mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.broadcast_to(mask, shape)


def decode_stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Stored numbers, not yet multiplied by their scales, as operands of a product."""
    if x.dtype == jnp.uint16:
        x = lax.bitcast_convert_type(x, jnp.bfloat16)
    elif x.dtype == jnp.uint8:
        x = decode_fp8_bits(x)
    return x.astype(dtype)


def decode_fp8_bits(x: jax.Array) -> jax.Array:
    """float8_e4m3fn bits as float32. Shifted by 7, exponent and mantissa are those of a float16 that is 2^8 too small;
    the format's only NaN, all bits set, has no such twin."""
    bits = x.astype(jnp.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * 256.0
    return jnp.where((bits & 0x7F) == 0x7F, jnp.float32(jnp.nan), value)


def dot(a: jax.Array, b: jax.Array, contract_b: int) -> jax.Array:
    """a [m, k] times b over b's axis `contract_b`, with a float32 result: [m, n]."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (contract_b,)), ((), ())), precision=exact, preferred_element_type=jnp.float32)


class Softmax(NamedTuple):
    """The running softmax of m queries: top f32[m] (in units of log 2), total f32[m], acc f32[m, lanes]."""

    top: jax.Array
    total: jax.Array
    acc: jax.Array

    @staticmethod
    def empty(queries: int, lanes: int) -> Softmax:
        return Softmax(
            jnp.full(queries, MASKED, jnp.float32),
            jnp.zeros(queries, jnp.float32),
            jnp.zeros((queries, lanes), jnp.float32),
        )

    def output(self) -> jax.Array:
        return self.acc / self.total[:, None]


def attend_keys(
    queries: jax.Array,
    pages: Ref,
    tables: Ref,
    sequence: jax.Array,
    head: jax.Array,
    first: jax.Array,
    length: jax.Array | None,
    position: jax.Array | None,
    softmax: Softmax,
    spec: AttentionSpec,
    geometry: Geometry,
) -> Softmax:
    """The running softmax, with the `span` keys from `first` on of one sequence and KV head.

    Args:
        queries: [m, lanes] of geometry.dtype.
        pages: KVPages of refs, as `flatten` lays them out.
        tables: ref of i32[R, M].
        sequence, head, first: i32[].
        length: i32[], keys from there on are not read. None: all span keys are there.
        position: i32[m], each query's; it sees the keys up to there, within its window. None: every key that is read.
    """
    g = geometry
    key = first + arange(g.span)
    live = None if length is None else key < length
    size = jnp.int32(g.block_size)
    ids = plgpu.load(
        tables.at[jnp.broadcast_to(sequence, key.shape), lax.div(key, size)],
        mask=live,
        other=None if live is None else jnp.int32(0),
    )
    rows = (ids * g.kv_heads + head) * size + lax.rem(key, size)
    k = decode_stored(load_rows(pages.k, rows, live, g.head_dim, g.lanes), g.dtype)
    scores = dot(queries, k, 1)
    unit = 1.0 if spec.soft_cap is not None else LOG2_E
    if pages.k_scales is None:
        scores = scores * (spec.scale * unit)
    else:
        scales = plgpu.load(pages.k_scales.at[rows], mask=live, other=None if live is None else jnp.float32(0))
        scores = scores * (scales * (spec.scale * unit))[None, :]
    if spec.soft_cap is not None:
        scores = (spec.soft_cap * LOG2_E) * tanh(scores * (1.0 / spec.soft_cap))
    visible = None if live is None else live[None, :]
    if position is not None:
        seen = key[None, :] <= position[:, None]
        if spec.window is not None:
            seen &= key[None, :] > position[:, None] - spec.window
        visible = seen if visible is None else visible & seen
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    top = jnp.maximum(softmax.top, scores.max(axis=1))
    weights = jnp.exp2(scores - top[:, None])
    rescale = jnp.exp2(softmax.top - top)
    total = softmax.total * rescale + weights.sum(axis=1)
    if pages.v_scales is not None:
        scales = plgpu.load(pages.v_scales.at[rows], mask=live, other=None if live is None else jnp.float32(0))
        weights = weights * scales[None, :]
    v = decode_stored(load_rows(pages.v, rows, live, g.head_dim, g.lanes), g.dtype)
    acc = softmax.acc * rescale[:, None] + dot(weights.astype(g.dtype), v, 0)
    return Softmax(top, total, acc)


def tanh(x: jax.Array) -> jax.Array:
    """By 2^x, which needs no library. Its absolute error is a few 2^-24, all that matters to a score."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2.0 * LOG2_E)) + 1.0)
