"""Whole blocks of the decoder's cache, over all layers at once."""

import jax

import pallas_kernels
from pallas_kernels import KVPages


def copy_cache_blocks(cache: tuple[KVPages, ...], src: jax.Array, dst: jax.Array) -> tuple[KVPages, ...]:
    """Block ``src[i]`` copied over block ``dst[i]`` in every layer; i32[C] each, (0, 0) does nothing."""
    return tuple(pallas_kernels.copy_blocks(pages, src, dst) for pages in cache)
