"""Blocks read from the device and written back, in two small programs beside the step: for swapping (swapping.py).

`COPIED_AT_ONCE` blocks a call (K), what is left of them padding. Content travels as arrays [K, n, ...] that hold all
layers (see `read_cache_blocks`), and lies on the host as the bytes of one block after the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jpaged_models import KVPages, read_cache_blocks, write_cache_blocks

from jpaged.allocator import BlockPool, BlockTables
from jpaged.named_blocks import NamedBlocks
from jpaged.tiers import StoredBlock
from pallas_kernels.indexing import gather, scatter

COPIED_AT_ONCE = 8


def save_blocks(
    cache: tuple[KVPages, ...], tables: BlockTables, named: NamedBlocks, places: jax.Array
) -> list[jax.Array]:
    """The content of blocks. places i32[3, K]: slot, column, name; slot and column count where the name is 0.

    Padding (slot S) reads the null block.
    """
    slots, columns, names = places
    by_place = gather(tables.blocks, (slots, columns))
    ids = jnp.where(names > 0, gather(named.block, names), by_place)
    return read_cache_blocks(cache, ids, named.held.shape[0])


def load_blocks(
    cache: tuple[KVPages, ...], pool: BlockPool, named: NamedBlocks, names: jax.Array, content: list[jax.Array]
) -> tuple[tuple[KVPages, ...], BlockPool, NamedBlocks, jax.Array]:
    """Take a free block for each of the names i32[K], padded with 0 at the end, and fill it.

    Returns (cache, pool, named, ok bool[]); ok is False and nothing changes where too few blocks are free, or a name is
    in use or unknown: a bug of the host's count.
    """
    num_blocks, num_names = named.held.shape[0], named.block.shape[0]
    used = names > 0
    count = jnp.cumsum(used, dtype=jnp.int32)
    taken = gather(named.block, names, fill=1) > 0
    ok = (count[-1] <= pool.num_free) & ~jnp.any(used & taken)
    used = used & ok
    ids = gather(pool.free, jnp.where(used, pool.num_free - count, num_blocks), fill=num_blocks)
    one = jnp.where(used, ids, num_blocks)
    pool = BlockPool(pool.free, pool.num_free - jnp.where(ok, count[-1], 0), scatter(pool.refcount, one, 1))
    named = NamedBlocks(scatter(named.block, jnp.where(used, names, num_names), ids), scatter(named.held, one, 1))
    return write_cache_blocks(cache, one, content, num_blocks), pool, named, ok


def content_shapes(cache: tuple[KVPages, ...], num_blocks: int) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the content of K blocks."""
    read = functools.partial(read_cache_blocks, num_blocks=num_blocks)
    return jax.eval_shape(read, cache, jax.ShapeDtypeStruct((COPIED_AT_ONCE,), jnp.int32))


def split_content(arrays: Sequence[jax.Array], count: int) -> list[np.ndarray]:
    """The first `count` blocks of arrays [K, ...], each as u8[block_bytes] of its own."""
    flat = [_as_bytes(np.asarray(array)) for array in arrays]
    return [np.concatenate([each[row] for each in flat]) for row in range(count)]


def join_content(blocks: Sequence[StoredBlock], shapes: Sequence[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
    """Arrays of `shapes` from blocks that have arrived, what is left of them undefined."""
    arrays = [np.empty(shape.shape, shape.dtype) for shape in shapes]
    flat = [_as_bytes(array) for array in arrays]
    ends = np.cumsum([each.shape[1] for each in flat])
    for row, block in enumerate(blocks):
        assert block.data is not None
        for each, part in zip(flat, np.split(block.data, ends[:-1]), strict=True):
            each[row] = part
    return arrays


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """A view u8[K, bytes] of a contiguous array [K, ...]."""
    return array.reshape(len(array), math.prod(array.shape[1:])).view(np.uint8)
