"""Whole blocks of the decoder's cache, over all layers at once.

Pages of a run of L layers are [L N, ...], N the blocks that block tables tell apart: block b of layer l is at l N + b.
"""

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import KVPages
from pallas_kernels.indexing import gather, scatter
from pallas_kernels.storage import from_storage


def copy_cache_blocks(
    cache: tuple[KVPages, ...], src: jax.Array, dst: jax.Array, num_blocks: int
) -> tuple[KVPages, ...]:
    """Block ``src[i]`` copied over block ``dst[i]`` in every layer; i32[C] each, (0, 0) does nothing."""

    def copy(pages: KVPages) -> KVPages:
        wanted = jnp.tile(dst > 0, len(pages.k) // num_blocks)
        places = (jnp.where(wanted, find_in_layers(pages.k, ids, num_blocks).ravel(), 0) for ids in (src, dst))
        return pallas_kernels.copy_blocks(pages, *places)

    return tuple(copy(pages) for pages in cache)


def read_cache_blocks(cache: tuple[KVPages, ...], ids: jax.Array, num_blocks: int) -> list[jax.Array]:
    """Blocks ``ids`` i32[C] of every layer, in one array of pages and, if they are quantised, one of scales.

    Arrays [C, 2 * layers, ...]: for each run, K of its layers and then V.
    """

    def take(pool: jax.Array) -> jax.Array:
        return gather(pool, find_in_layers(pool, ids, num_blocks).T, mode="promise_in_bounds")

    kinds = [[pool for pages in cache for pool in (pages.k, pages.v)]]
    scales = [pool for pages in cache for pool in (pages.k_scales, pages.v_scales) if pool is not None]
    kinds += [scales] if scales else []
    return [jnp.concatenate([take(pool) for pool in pools], axis=1) for pools in kinds]


def read_sequence(
    cache: tuple[KVPages, ...], blocks: jax.Array, length: int, num_blocks: int, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """The first ``length`` keys (rotated) and values in blocks i32[C], in order: f32[layers, length, Hkv, D] each."""

    def take(pool: jax.Array, scales: jax.Array | None) -> jax.Array:
        at = find_in_layers(pool, blocks, num_blocks)  # [L, C]
        found = from_storage(pool[at], jnp.dtype(jnp.float32))[..., :head_dim]  # [L, C, Hkv, B, D]
        if scales is not None:
            found *= scales[at][..., None]
        found = jnp.swapaxes(found, 2, 3)
        return found.reshape(found.shape[0], -1, *found.shape[3:])[:, :length]

    keys = [take(pages.k, pages.k_scales) for pages in cache]
    values = [take(pages.v, pages.v_scales) for pages in cache]
    return jnp.concatenate(keys), jnp.concatenate(values)


def write_cache_blocks(
    cache: tuple[KVPages, ...], ids: jax.Array, blocks: list[jax.Array], num_blocks: int
) -> tuple[KVPages, ...]:
    """What ``read_cache_blocks`` gave, written over blocks ``ids`` i32[C]; ids of N, one past the end, are left out."""

    def put(pool: jax.Array, kind: int, first: int) -> jax.Array:
        layers = len(pool) // num_blocks
        places = jnp.where(ids < num_blocks, find_in_layers(pool, ids, num_blocks), len(pool))
        return scatter(pool, places.T, blocks[kind][:, first : first + layers])

    written, first = [], 0
    for pages in cache:
        k, v = first, first + len(pages.k) // num_blocks
        first += 2 * (v - k)
        new = KVPages(put(pages.k, 0, k), put(pages.v, 0, v))
        if pages.k_scales is not None and pages.v_scales is not None:
            new = KVPages(new.k, new.v, put(pages.k_scales, 1, k), put(pages.v_scales, 1, v))
        written.append(new)
    return tuple(written)


def find_in_layers(pool: jax.Array, ids: jax.Array, num_blocks: int) -> jax.Array:
    """Where blocks ``ids`` i32[C] of each of a pool's layers are in it, i32[L, C]."""
    return jnp.arange(0, len(pool), num_blocks, dtype=jnp.int32)[:, None] + ids
