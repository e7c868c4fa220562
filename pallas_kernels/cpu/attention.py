"""Attention, and writing keys and values, by the native kernels (`src/attention.h`, `src/pages.h`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.batch import PagedBatch
from pallas_kernels.cpu.library import require_library
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec


def attention(
    q: jax.Array,
    pages: KVPages,
    batch: PagedBatch,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    *,
    instruction_set: str = "",
) -> tuple[jax.Array, jax.Array | None]:
    """See `pallas_kernels.paged_attention`. `instruction_set`: one of `instruction_sets()`, or the best ("")."""
    require_library()
    rows, heads, _ = q.shape
    call = jax.ffi.ffi_call(
        "jpaged_cpu_attention",
        (
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((rows, heads) if spec.return_lse else (0,), jnp.float32),
        ),
    )
    out, lse = call(
        q,
        *_operands(pages),
        batch.block_tables,
        batch.kv_lengths,
        _or_nothing(batch.query_starts, jnp.int32),
        _or_nothing(sinks, jnp.float32),
        scale=np.float32(spec.scale),
        window=spec.window or 0,
        soft_cap=np.float32(spec.soft_cap or 0.0),
        set=instruction_set,
    )
    return out, lse if spec.return_lse else None


def write_kv(
    pages: KVPages, k: jax.Array, v: jax.Array, write_slots: jax.Array, *, instruction_set: str = ""
) -> KVPages:
    """See `pallas_kernels.write_kv`. Padding rows, those that go to block 0, are not stored."""
    nothing = jnp.zeros(0, k.dtype)
    return rotate_and_write(pages, nothing, k, v, write_slots, None, instruction_set=instruction_set)[0]


def rotate_and_write(
    pages: KVPages,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    write_slots: jax.Array,
    rotary: tuple[jax.Array, jax.Array] | None,
    *,
    instruction_set: str = "",
) -> tuple[KVPages, jax.Array]:
    """See `pallas_kernels.rotate_and_write`. Padding rows of q are not written; without `rotary` q has no elements."""
    require_library()
    operands = _operands(pages)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*operands, q)]
    aliases = {i: i for i, x in enumerate(operands) if x.size}
    call = jax.ffi.ffi_call("jpaged_cpu_write_kv", shapes, input_output_aliases=aliases)
    cos, sin = rotary or (jnp.zeros(0, jnp.float32),) * 2
    new_k, new_v, k_scales, v_scales, q = call(*operands, q, k, v, write_slots, cos, sin, set=instruction_set)
    if pages.k_scales is None:
        return KVPages(new_k, new_v), q
    return KVPages(new_k, new_v, k_scales, v_scales), q


def _operands(pages: KVPages) -> tuple[jax.Array, ...]:
    return (
        pages.k,
        pages.v,
        _or_nothing(pages.k_scales, jnp.float32),
        _or_nothing(pages.v_scales, jnp.float32),
    )


def _or_nothing(x: jax.Array | None, dtype: jax.typing.DTypeLike) -> jax.Array:
    """How an operand that is left out is passed: as an array without elements."""
    return jnp.zeros(0, dtype) if x is None else x
