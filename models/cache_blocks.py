"""Whole blocks of the decoder's cache, over all layers at once."""

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import KVPages


def copy_cache_blocks(cache: tuple[KVPages, ...], src: jax.Array, dst: jax.Array) -> tuple[KVPages, ...]:
    """Block ``src[i]`` copied over block ``dst[i]`` in every layer; i32[C] each, (0, 0) does nothing."""
    return tuple(pallas_kernels.copy_blocks(pages, src, dst) for pages in cache)


def read_cache_blocks(cache: tuple[KVPages, ...], ids: jax.Array) -> list[jax.Array]:
    """Blocks ``ids`` i32[C] of every layer, in one array of pages and, if they are quantised, one of scales.

    Arrays [C, 2 * layers, ...]: K and V of each layer in turn.
    """
    kinds = [[pool for pages in cache for pool in (pages.k, pages.v)]]
    scales = [pool for pages in cache for pool in (pages.k_scales, pages.v_scales) if pool is not None]
    kinds += [scales] if scales else []
    return [jnp.stack([pool.at[ids].get(mode="promise_in_bounds") for pool in pools], axis=1) for pools in kinds]


def write_cache_blocks(cache: tuple[KVPages, ...], ids: jax.Array, blocks: list[jax.Array]) -> tuple[KVPages, ...]:
    """What ``read_cache_blocks`` gave, written over blocks ``ids`` i32[C]; ids of N, one past the end, are left out."""

    def put(pool: jax.Array, kind: int, place: int) -> jax.Array:
        return pool.at[ids].set(blocks[kind][:, place], mode="drop")

    layers = []
    for k, pages in zip(range(0, 2 * len(cache), 2), cache, strict=True):
        written = KVPages(put(pages.k, 0, k), put(pages.v, 0, k + 1))
        if pages.k_scales is not None and pages.v_scales is not None:
            written = KVPages(written.k, written.v, put(pages.k_scales, 1, k), put(pages.v_scales, 1, k + 1))
        layers.append(written)
    return tuple(layers)
