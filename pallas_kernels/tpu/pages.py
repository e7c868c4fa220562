"""Writing and copying pages on TPUs, in place.

The least that a copy can move is a tile of registers, not the row of a token, so a page is read, changed and written
back. Tokens are sorted by block first: what goes to one block is one *run*, so no block is under way twice, and while a
run's page is changed the next one's is read and the last one's written.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexing import scatter
from pallas_kernels.pages import KVPages, take_blocks
from pallas_kernels.storage import quantise, to_storage
from pallas_kernels.tiles import arange
from pallas_kernels.tpu.flash import VMEM_LIMIT, check_pages_fit

CHUNK = 128  # tokens a step of the grid: their numbers are in fast memory together
Ref = Any


@partial(jax.jit, static_argnames="interpret")
def write_kv(pages: KVPages, k: jax.Array, v: jax.Array, write_slots: jax.Array, interpret: bool = False) -> KVPages:
    """`pallas_kernels.write_kv`. Rounding and quantisation are XLA's. Nothing is written to block 0."""
    check_pages_fit(pages)
    dtype = pages.k.dtype
    rows = len(k)
    if rows == 0:
        return pages
    scales: list[jax.Array] = []
    if pages.k_scales is None:
        k, v = to_storage(k, dtype), to_storage(v, dtype)
    else:
        (k, k_scales), (v, v_scales) = quantise(k, dtype), quantise(v, dtype)
        scales = [k_scales, v_scales]
    blocks, _, block_size, _ = pages.k.shape
    chunk = min(CHUNK, -(-rows // 8) * 8)
    pad = -rows % chunk
    slots = jnp.pad(write_slots, (0, pad))
    block = lax.div(slots, jnp.int32(block_size))
    block = jnp.where((block > 0) & (block < blocks), block, 0)
    order = jnp.argsort(block, stable=True)
    block, offset = block[order], lax.rem(slots, jnp.int32(block_size))[order]
    first_run, run_block, run_first = _cut_runs(block, chunk)

    def arrange(x: jax.Array) -> jax.Array:  # as float32: what every dtype can be selected in
        x = jnp.pad(x, ((0, pad), *((0, 0) for _ in x.shape[1:])))
        return x[order].astype(jnp.float32)

    numbers = [arrange(x) for x in (k, v)] + [arrange(x)[..., None] for x in scales]
    pools = jax.tree.leaves(pages)
    results = pl.pallas_call(
        functools.partial(_write_chunk, chunk=chunk, pools=len(pools)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(len(block) // chunk,),
            in_specs=[pl.BlockSpec((chunk, *x.shape[1:]), lambda i, *_: (i, 0, 0)) for x in numbers]
            + [pl.BlockSpec(memory_space=pl.ANY)] * len(pools),
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(pools),
            scratch_shapes=[
                *(pltpu.VMEM((2, *pool.shape[1:]), pool.dtype) for pool in pools),
                pltpu.SemaphoreType.DMA((2, len(pools))),
                pltpu.SemaphoreType.DMA((2, len(pools))),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        input_output_aliases={4 + len(numbers) + i: i for i in range(len(pools))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT),
        interpret=interpret,
        name="paged_write",
    )(first_run, run_block, run_first, offset, *numbers, *pools)
    return KVPages(*results)


def _cut_runs(block: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs of equal ids in sorted block i32[T], cut at multiples of `chunk`; those of block 0 are none.

    Returns (first_run i32[T / chunk + 1]: chunk c has the runs first_run[c]..first_run[c + 1] - 1,
    run_block i32[T], run_first i32[T + 1]: run r is the tokens run_first[r]..run_first[r + 1] - 1).
    """
    rows = block.shape[0]
    token = arange(rows)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), block[:-1]])
    begins = (block > 0) & ((block != before) | (token % chunk == 0))
    run = jnp.cumsum(begins, dtype=jnp.int32)  # runs up to and with this token
    at = jnp.where(begins, run - 1, rows + 1)
    run_first = scatter(jnp.full(rows + 1, rows, jnp.int32), at, token)
    run_block = scatter(jnp.zeros(rows, jnp.int32), at, block)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), run[chunk - 1 :: chunk]]), run_block, run_first


def _write_chunk(
    first_run: Ref, run_block: Ref, run_first: Ref, offsets: Ref, *refs: Ref, chunk: int, pools: int
) -> None:
    """The runs of one chunk.

    Scalars: as `_cut_runs` gives them, offsets [T]. refs: new numbers [chunk, Hkv, D] for k and v, scales
    [chunk, Hkv, 1] if any; the pools; the same as results; buffers [2, ...] of a page each; semaphores [2, pools] of
    what is read and written.
    """
    news, refs = refs[:pools], refs[2 * pools :]
    targets, buffers, (reads, writes) = refs[:pools], refs[pools : 2 * pools], refs[2 * pools :]
    step = pl.program_id(0)
    begin, end = first_run[step], first_run[step + 1]

    def copies(run: jax.Array, act: str) -> None:
        slot, block = lax.rem(run, jnp.int32(2)), run_block[run]
        for n, (target, buffer) in enumerate(zip(targets, buffers, strict=True)):
            if "read" in act:
                copy = pltpu.make_async_copy(target.at[block], buffer.at[slot], reads.at[slot, n])
            else:
                copy = pltpu.make_async_copy(buffer.at[slot], target.at[block], writes.at[slot, n])
            copy.wait() if "wait" in act else copy.start()

    pl.when(begin < end)(lambda: copies(begin, "read"))

    def each(run: jax.Array, _: None) -> None:
        pl.when(run > begin)(lambda: copies(run - 1, "wait: write"))  # it had the buffer that is read into next
        pl.when(run + 1 < end)(lambda: copies(run + 1, "read"))
        copies(run, "wait: read")
        slot = lax.rem(run, jnp.int32(2))
        last = run_first[run + 1]
        for new, buffer in zip(news, buffers, strict=True):
            _change_page(new, buffer, slot, run_first[run], last, step * chunk, offsets)
        copies(run, "write")

    lax.fori_loop(begin, end, each, None)
    pl.when(begin < end)(lambda: copies(end - 1, "wait: write"))


def _change_page(
    new: Ref, buffer: Ref, slot: jax.Array, first: jax.Array, last: jax.Array, base: jax.Array, offsets: Ref
) -> None:
    """Tokens first..last-1 into the page in buffer[slot]: [Hkv, B, D], or [Hkv, B] of scales."""
    kv_heads, block_size = buffer.shape[1:3]
    if len(buffer.shape) == 3:

        def put_scales(i: jax.Array, page: jax.Array) -> jax.Array:
            place = lax.broadcasted_iota(jnp.int32, page.shape, 1)
            return jnp.where(place == offsets[i], new[i - base], page)

        buffer[slot] = lax.fori_loop(first, last, put_scales, buffer[slot])
        return
    head_dim = buffer.shape[3]
    place = lax.broadcasted_iota(jnp.int32, (block_size, head_dim), 0)

    def put(i: jax.Array, page: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        row = new[i - base]
        here = place == offsets[i]
        return tuple(jnp.where(here, row[head : head + 1], page[head]) for head in range(kv_heads))

    page = tuple(buffer[slot, head].astype(jnp.float32) for head in range(kv_heads))
    page = lax.fori_loop(first, last, put, page)
    for head in range(kv_heads):
        buffer[slot, head] = page[head].astype(buffer.dtype)


@partial(jax.jit, static_argnames="interpret")
def copy_blocks(pages: KVPages, src: jax.Array, dst: jax.Array, interpret: bool = False) -> KVPages:
    """`pallas_kernels.copy_blocks`: all sources are read before any destination is written."""
    return put_blocks(pages, take_blocks(pages, src), dst, interpret)


def put_blocks(pages: KVPages, blocks: KVPages, ids: jax.Array, interpret: bool = False) -> KVPages:
    """The pools with `blocks`, pages of C blocks, at ids i32[C], in place. Id 0 and ids outside are dropped."""
    check_pages_fit(pages)
    if len(ids) == 0:
        return pages
    pools, some = jax.tree.leaves(pages), jax.tree.leaves(blocks)
    anywhere = [pl.BlockSpec(memory_space=pl.ANY)] * len(pools)
    results = pl.pallas_call(
        functools.partial(_put_blocks, count=len(ids), blocks=pages.k.shape[0], pools=len(pools)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[*anywhere, *anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        input_output_aliases={1 + len(some) + i: i for i in range(len(pools))},
        interpret=interpret,
        name="paged_put_blocks",
    )(ids, *some, *pools)
    return KVPages(*results)


def _put_blocks(ids: Ref, *refs: Ref, count: int, blocks: int, pools: int) -> None:
    """All copies are started, then all are awaited."""
    sources, targets, semaphore = refs[:pools], refs[2 * pools : 3 * pools], refs[3 * pools]

    def each(act: str) -> None:
        def move(i: jax.Array, carry: None) -> None:
            @pl.when((ids[i] > 0) & (ids[i] < blocks))
            def _() -> None:
                for source, target in zip(sources, targets, strict=True):
                    copy = pltpu.make_async_copy(source.at[i], target.at[ids[i]], semaphore)
                    copy.start() if act == "start" else copy.wait()

        lax.fori_loop(0, count, move, None)

    each("start")
    each("wait")
