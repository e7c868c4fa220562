"""The pools are updated in place: read off the compiled program, of 1 GB pools that are never allocated.

The program is a small decode or mixed step, two layers of write_kv and paged_attention, each with its own pools,
once through and inside a `lax.while_loop` (several decode steps in one dispatch).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Array
from jax import lax
from optimised import compile_optimised
from paged_cases import CPU_STORAGES, LARGEST

from pallas_kernels import KVPages, PagedBatch, available_backends, copy_blocks, paged_attention, write_kv

LAYERS, POOL_BYTES = 2, 2**30
HEADS, GROUP, HEAD_DIM, BLOCK, SEQUENCES, COLUMNS, ROWS = 3, 3, 64, 16, 256, 128, 512

Pools = tuple[KVPages, ...]


def layers(q: jax.Array, pools: Pools, batch: PagedBatch, **options) -> tuple[jax.Array, Pools]:
    done = []
    for pages in pools:
        k = q[:, ::GROUP]
        pages = write_kv(pages, k, k + 1, batch.write_slots)
        q = paged_attention(q, pages, batch, scale=0.125, **options)
        done.append(pages)
    return q, tuple(done)


def all_options(q: jax.Array, pools: Pools, batch: PagedBatch, **options) -> tuple[jax.Array, Pools]:
    sinks = jnp.ones(HEADS * GROUP)
    return layers(q, pools, batch, window=100, soft_cap=30.0, sinks=sinks, **options)


def many_steps(q: jax.Array, pools: Pools, batch: PagedBatch, **options) -> tuple[jax.Array, Pools]:
    def step(carry):
        i, q, pools, batch = carry
        q, pools = layers(q, pools, batch, **options)
        return i + 1, q, pools, batch._replace(kv_lengths=batch.kv_lengths + 1)

    carry = lax.while_loop(lambda carry: (carry[0] < 8) & jnp.any(carry[1] > 0), step, (jnp.int32(0), q, pools, batch))
    return carry[1], carry[2]


def copy_on_write(q: jax.Array, pools: Pools, batch: PagedBatch, **options) -> tuple[jax.Array, Pools]:
    src, dst = batch.block_tables[:, 0], batch.block_tables[:, 1]
    return layers(q, tuple(copy_blocks(pages, src, dst) for pages in pools), batch, **options)


PLAIN = [(layers, False), (layers, True), (many_steps, False), (copy_on_write, False)]
OTHER = [(many_steps, False), (all_options, True)]
CASES = [
    (storage, *case)
    for storage in CPU_STORAGES
    for case in (PLAIN if storage in ("float32", "uint16") else [(copy_on_write, False), *OTHER])
]


@pytest.mark.parametrize("backend", available_backends())
@pytest.mark.parametrize(
    ("storage", "program", "mixed"),
    CASES,
    ids=lambda x: {True: "mixed", False: "decode"}.get(x, getattr(x, "__name__", x)),
)
def test_pools_are_never_copied(storage: str, program: Callable, mixed: bool, backend: str) -> None:
    rows = ROWS if mixed else SEQUENCES
    blocks = POOL_BYTES // (HEADS * BLOCK * HEAD_DIM * jnp.dtype(storage).itemsize)
    pool = Array((blocks, HEADS, BLOCK, HEAD_DIM), storage)
    scales = Array(pool.shape[:3], "float32") if storage in LARGEST else None
    pages = KVPages(pool, pool, scales, scales)
    batch = PagedBatch(
        Array((SEQUENCES, COLUMNS), "int32"),
        Array((SEQUENCES,), "int32"),
        Array((rows,), "int32"),
        Array((SEQUENCES + 1,), "int32") if mixed else None,
        Array((), "int32") if mixed else None,
    )
    q = Array((rows, HEADS * GROUP, HEAD_DIM), "float32")
    step = jax.jit(lambda *args: program(*args, backend=backend), donate_argnums=1)
    compiled = compile_optimised(step.lower(q, (pages,) * LAYERS, batch))

    memory = compiled.memory_analysis()
    pages_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
    assert memory.alias_size_in_bytes >= LAYERS * pages_bytes, "every pool is donated to its result"
    assert memory.temp_size_in_bytes < 0.01 * pages_bytes, f"{memory.temp_size_in_bytes / 2**20:.1f} MiB of temporaries"

    # Whatever yields a pool-sized array may only pass a pool on or update it in place.
    allowed = {"parameter", "get-tuple-element", "bitcast", "scatter", "while", "tuple", "call"}
    smallest = min(x.size for x in jax.tree.leaves(pages))
    for line in compiled.as_text().splitlines():
        made = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = (\w+)\[([\d,]*)\]\S* ([\w-]+)\((.*)", line)
        if not made or math.prod(int(n) for n in made[2].split(",") if n) < smallest:
            continue
        if made[3] == "fusion":
            assert "scatter" in made[4], f"a fusion makes a pool-sized array: {line.strip()[:200]}"
        else:
            assert made[3] in allowed, f"a pool-sized {made[3]}: {line.strip()[:200]}"
