"""Writing and copying pages with Triton, in place: a program a token or a chunk of a block, all else is untouched."""

from __future__ import annotations

import functools
import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.pages import KVPages, take_blocks
from pallas_kernels.storage import quantise, to_storage
from pallas_kernels.tiles import arange
from pallas_kernels.triton.choices import power_of_two
from pallas_kernels.triton.tiles import Ref, flatten, load_rows, store_rows

CHUNK = 2048  # elements of a block that a program moves


@partial(jax.jit, static_argnames="interpret")
def write_kv(pages: KVPages, k: jax.Array, v: jax.Array, write_slots: jax.Array, interpret: bool = False) -> KVPages:
    """`pallas_kernels.write_kv`. Rounding and quantisation are XLA's; a program stores a token's heads."""
    dtype = pages.k.dtype
    k_scales = v_scales = None
    if pages.k_scales is None:
        k, v = to_storage(k, dtype), to_storage(v, dtype)
    else:
        (k, k_scales), (v, v_scales) = quantise(k, dtype), quantise(v, dtype)
    rows, kv_heads, head_dim = k.shape
    if rows == 0:
        return pages
    blocks, _, block_size, _ = pages.k.shape
    flat = flatten(pages)
    new = flatten(KVPages(k[:, :, None], v[:, :, None], k_scales, v_scales))
    count = len(jax.tree.leaves(flat))
    kernel = functools.partial(
        _write_token, kv_heads=kv_heads, block_size=block_size, head_dim=head_dim, slots=blocks * block_size
    )
    written = pl.pallas_call(
        kernel,
        grid=(rows,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(flat)],
        input_output_aliases={1 + count + i: i for i in range(count)},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_write",
    )(write_slots, new, flat)
    return KVPages(*(x.reshape(old.shape) for x, old in zip(written, jax.tree.leaves(pages), strict=True)))


def _write_token(
    write_slots: Ref,
    new: Ref,
    _: Ref,
    *pools: Ref,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    slots: int,
) -> None:
    """Row t of new [T * Hkv, D] to its slot in pools [N * Hkv * B, D]; a slot outside the pool is dropped."""
    pages: Ref = KVPages(*pools)
    token = pl.program_id(0)
    slot = write_slots[token]
    head = arange(power_of_two(kv_heads))
    live = (head < kv_heads) & (slot >= 0) & (slot < slots)
    size = jnp.int32(block_size)
    source = token * kv_heads + head
    target = (lax.div(slot, size) * kv_heads + head) * size + lax.rem(slot, size)
    lanes = power_of_two(head_dim)
    for pool, rows in ((pages.k, new.k), (pages.v, new.v)):
        store_rows(pool, target, load_rows(rows, source, live, head_dim, lanes), live, head_dim)
    for scales, each in ((pages.k_scales, new.k_scales), (pages.v_scales, new.v_scales)):
        if scales is not None and each is not None:
            plgpu.store(scales.at[target], plgpu.load(each.at[source], mask=live, other=jnp.float32(0)), mask=live)


@partial(jax.jit, static_argnames="interpret")
def copy_blocks(pages: KVPages, src: jax.Array, dst: jax.Array, interpret: bool = False) -> KVPages:
    """`pallas_kernels.copy_blocks`: all sources are read before any destination is written."""
    return put_blocks(pages, take_blocks(pages, src), dst, interpret)


def put_blocks(pages: KVPages, blocks: KVPages, ids: jax.Array, interpret: bool = False) -> KVPages:
    """The pools with `blocks`, pages of C blocks, at ids i32[C], in place. Id 0 and ids outside are dropped."""

    def put(pool: jax.Array, some: jax.Array) -> jax.Array:
        if len(ids) == 0:
            return pool
        count, size = pool.shape[0], math.prod(pool.shape[1:])
        return pl.pallas_call(
            functools.partial(_put_chunk, count=count, size=size),
            grid=(len(ids), -(-size // CHUNK)),
            out_shape=jax.ShapeDtypeStruct((count, size), pool.dtype),
            input_output_aliases={2: 0},
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name="paged_put_block",
        )(ids, some.reshape(-1, size), pool.reshape(count, size)).reshape(pool.shape)

    return jax.tree.map(put, pages, blocks)


def _put_chunk(ids: Ref, blocks: Ref, _: Ref, pool: Ref, *, count: int, size: int) -> None:
    """A chunk of blocks [C, size] to pool [N, size]."""
    row = pl.program_id(0)
    block = ids[row]
    column = pl.program_id(1) * CHUNK + arange(CHUNK)
    live = (column < size) & (block > 0) & (block < count)
    some = plgpu.load(
        blocks.at[jnp.broadcast_to(row, column.shape), column], mask=live, other=jnp.zeros((), pool.dtype)
    )
    plgpu.store(pool.at[jnp.broadcast_to(block, column.shape), column], some, mask=live)
