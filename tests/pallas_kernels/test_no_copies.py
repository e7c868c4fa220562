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

from pallas_kernels import PagedBatch, copy_blocks, paged_attention, write_kv

LAYERS, POOL_BYTES = 2, 2**30
HEADS, GROUP, HEAD_DIM, BLOCK, SEQUENCES, COLUMNS, ROWS = 3, 3, 64, 16, 256, 128, 512

Pools = tuple[tuple[jax.Array, jax.Array], ...]


def layers(q: jax.Array, pools: Pools, batch: PagedBatch) -> tuple[jax.Array, Pools]:
    done = []
    for k_pages, v_pages in pools:
        k = q[:, ::GROUP]
        k_pages, v_pages = write_kv(k_pages, v_pages, k, k + 1, batch.write_slots)
        q = paged_attention(q, k_pages, v_pages, batch, scale=0.125, backend="xla")
        done.append((k_pages, v_pages))
    return q, tuple(done)


def many_steps(q: jax.Array, pools: Pools, batch: PagedBatch) -> tuple[jax.Array, Pools]:
    def step(carry):
        i, q, pools, batch = carry
        q, pools = layers(q, pools, batch)
        return i + 1, q, pools, batch._replace(kv_lengths=batch.kv_lengths + 1)

    carry = lax.while_loop(lambda carry: (carry[0] < 8) & jnp.any(carry[1] > 0), step, (jnp.int32(0), q, pools, batch))
    return carry[1], carry[2]


def copy_on_write(q: jax.Array, pools: Pools, batch: PagedBatch) -> tuple[jax.Array, Pools]:
    src, dst = batch.block_tables[:, 0], batch.block_tables[:, 1]
    pools = jax.tree.map(lambda pages: copy_blocks(pages, src, dst), pools)
    return layers(q, pools, batch)


@pytest.mark.parametrize("storage", ["float32", "uint16"])
@pytest.mark.parametrize(
    ("program", "mixed"),
    [(layers, False), (layers, True), (many_steps, False), (copy_on_write, False)],
    ids=["decode", "mixed", "while-loop", "copy-on-write"],
)
def test_pools_are_never_copied(program: Callable, mixed: bool, storage: str) -> None:
    rows = ROWS if mixed else SEQUENCES
    blocks = POOL_BYTES // (HEADS * BLOCK * HEAD_DIM * jnp.dtype(storage).itemsize)
    pages = Array((blocks, HEADS, BLOCK, HEAD_DIM), storage)
    batch = PagedBatch(
        Array((SEQUENCES, COLUMNS), "int32"),
        Array((SEQUENCES,), "int32"),
        Array((rows,), "int32"),
        Array((SEQUENCES + 1,), "int32") if mixed else None,
        Array((), "int32") if mixed else None,
    )
    q = Array((rows, HEADS * GROUP, HEAD_DIM), "float32")
    compiled = jax.jit(program, donate_argnums=1).lower(q, ((pages, pages),) * LAYERS, batch).compile()

    memory = compiled.memory_analysis()
    pool_bytes = math.prod(pages.shape) * pages.dtype.itemsize
    assert memory.alias_size_in_bytes >= 2 * LAYERS * pool_bytes, "every pool is donated to its result"
    assert memory.temp_size_in_bytes < 0.02 * pool_bytes, f"{memory.temp_size_in_bytes / 2**20:.1f} MiB of temporaries"

    # Whatever yields a pool-sized array may only pass a pool on or update it in place.
    allowed = {"parameter", "get-tuple-element", "bitcast", "scatter", "while", "tuple", "call"}
    for line in compiled.as_text().splitlines():
        made = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = (\w+)\[([\d,]*)\]\S* ([\w-]+)\((.*)", line)
        if not made or math.prod(int(n) for n in made[2].split(",") if n) < math.prod(pages.shape):
            continue
        if made[3] == "fusion":
            assert "scatter" in made[4], f"a fusion makes a pool-sized array: {line.strip()[:200]}"
        else:
            assert made[3] in allowed, f"a pool-sized {made[3]}: {line.strip()[:200]}"
