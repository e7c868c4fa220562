"""The sizes of the Triton kernels' tiles: what may be chosen, and what is chosen unless a caller says otherwise.

The defaults are what the compilers' reports say fits (`scripts/aot_check.py h200 --triton`: registers, spills, shared
memory); `scripts/bench_kernels.py --tune` tries others on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.checks import QUANTISED
from pallas_kernels.pages import KVPages

HOPPER = 90  # sm_90
READS_SHARED_MEMORY = range(HOPPER, 120)  # tensor cores that need not have their operands in registers, as others do
LEAST = 16  # rows, columns and terms of a matrix product


class DecodeTiles(NamedTuple):
    """Of `decode`.

    span: keys in a step of the inner loop, a power of two.
    programs: (item, KV head) programs to aim at, when there are keys enough.
    least_keys: an item has at least so many keys, a multiple of `span`.
    warps, stages: of a program, and of its pipeline of loads.
    """

    span: int
    programs: int = 2048  # about 8 for each place that 132 multiprocessors have
    least_keys: int = 256  # an item's partial result is then 2 % of the keys and values it read, or less
    warps: int = 4
    stages: int = 3


class PrefillTiles(NamedTuple):
    """Of `prefill`.

    height: rows of a tile's products, a power of two: its query rows times the query heads of a KV head.
    span, warps, stages: as for decode.
    """

    height: int
    span: int
    warps: int
    stages: int = 2


class KernelTiles(NamedTuple):
    """Of both kernels; None: as this module chooses."""

    decode: DecodeTiles | None = None
    prefill: PrefillTiles | None = None


def choose_decode(q: jax.Array, pages: KVPages) -> DecodeTiles:
    return DecodeTiles(choose_span(q, pages))


def choose_prefill(q: jax.Array, pages: KVPages, architecture: int | None = None) -> PrefillTiles:
    """For a batch of q's rows: the tallest tile that registers hold without spilling, on a GPU of this architecture (80
    for sm_80, ...). None: the one that is here, or Hopper."""
    rows, heads, _ = q.shape
    group, lanes = heads // pages.k.shape[1], count_lanes(pages)
    most = 128 if lanes <= 128 else 64  # two warp groups of 64 rows, or one
    if product_dtype(q, pages) == jnp.float32:
        most = LEAST
    height = max(LEAST, power_of_two(group), min(most, power_of_two(rows * group)))
    span, stages = choose_span(q, pages), 2
    if lanes == 128 and (architecture or find_architecture()) not in READS_SHARED_MEMORY:
        span, stages = min(span, 32), 3  # with two stages a head of 80 numbers spills
    return PrefillTiles(height, span, warps=8 if height * max(lanes, 128) >= 128 * 128 else 4, stages=stages)


def choose_span(q: jax.Array, pages: KVPages) -> int:
    """A step's keys and values, 64 of 128 numbers in bfloat16, take 32 KB of shared memory for each stage of the
    pipeline. Products of float32 are not for the tensor cores; what matters there is that their operands, which every
    thread has whole rows of, fit in registers."""
    if product_dtype(q, pages) == jnp.float32:
        return LEAST
    return 64 if count_lanes(pages) <= 128 else 32


def find_architecture() -> int:
    """Of the GPU that is here; Hopper's where there is none, for those who compile ahead of time."""
    if jax.default_backend() != "gpu":
        return HOPPER
    return round(10 * float(jax.local_devices()[0].compute_capability))


def product_dtype(q: jax.Array, pages: KVPages) -> jnp.dtype:
    """The queries' 16-bit dtype where it holds the pages' numbers, for the tensor cores; else float32."""
    stored = pages.k.dtype.name
    if q.dtype == jnp.bfloat16 and stored in ("bfloat16", "uint16", *QUANTISED):
        return jnp.dtype(jnp.bfloat16)
    return jnp.dtype(jnp.float16 if q.dtype == jnp.float16 and stored == "float16" else jnp.float32)


def count_lanes(pages: KVPages) -> int:
    """Columns that a head of numbers lies in."""
    return max(LEAST, power_of_two(pages.k.shape[3]))


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
