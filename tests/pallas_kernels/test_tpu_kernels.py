"""What is special about pages on TPUs: they are as wide as registers, written page by page, and some are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from paged_cases import assert_same, beyond_block_0, fresh_rng, make_pages, on_device, widen

from pallas_kernels import KVPages, PagedBatch, copy_blocks, init_pages, paged_attention, rotate_and_write, write_kv
from pallas_kernels.tpu.pages import CHUNK

BLOCK_SIZES = {"float32": 8, "bfloat16": 16, "int8": 128, "float8_e4m3fn": 128}  # the least of each
each_storage = pytest.mark.parametrize("storage", BLOCK_SIZES)
BACKEND = "tpu_interpreted"


def random_pages(rng: np.random.Generator, storage: str, blocks: int, head_dim: int = 128) -> KVPages:
    """With two heads, as TPUs have them; block 2 holds what is not to be read."""
    dead = np.zeros((blocks, BLOCK_SIZES[storage]), bool)
    dead[2] = True
    numbers = rng.standard_normal((2, blocks, 2, BLOCK_SIZES[storage], head_dim))
    return widen(make_pages(*numbers, storage, dead), BACKEND)


@each_storage
def test_write(storage: str) -> None:
    """Tokens of whole blocks, of parts of blocks, of blocks in turn, over several steps of the grid; and padding."""
    rng = fresh_rng()
    size, blocks = BLOCK_SIZES[storage], 70 if storage in ("float32", "bfloat16") else 9
    pages = random_pages(rng, storage, blocks)
    rows = 2 * CHUNK + 40
    some = rng.choice((blocks - 1) * size, rows - size - 2, replace=False)
    slots = np.concatenate([(blocks - 1) * size + np.arange(size), some[some < (blocks - 1) * size - size] + size])
    slots = rng.permutation(np.unique(slots)).astype(np.int32)
    slots = np.concatenate([slots, [0, 3, blocks * size]]).astype(np.int32)  # the null block, and outside the pool
    k, v = rng.standard_normal((2, len(slots), 2, 128)).astype(ml_dtypes.bfloat16)
    write = jax.jit(partial(write_kv, backend=BACKEND), donate_argnums=0)
    want = write_kv(on_device(pages), k, v, slots, backend="xla")
    assert_same(beyond_block_0(write(on_device(pages), k, v, slots)), beyond_block_0(want))


def test_no_token_to_write() -> None:
    pages = random_pages(fresh_rng(), "float32", 4)
    x = np.zeros((9, 2, 128), np.float32)
    assert_same(write_kv(on_device(pages), x, x, np.zeros(9, np.int32), backend=BACKEND), pages)
    assert_same(write_kv(on_device(pages), x[:0], x[:0], np.zeros(0, np.int32), backend=BACKEND), pages)


@each_storage
def test_copy_blocks(storage: str) -> None:
    pages = random_pages(fresh_rng(), storage, 9)
    # Block 5 is read and overwritten in one call: sources are read first. (0, 0) pads.
    src, dst = np.array([[5, 1, 0, 2, 0], [6, 5, 0, 8, 0]], np.int32)
    want = jax.tree.map(lambda x: np.concatenate([x[:5], x[1:2], x[5:6], x[7:8], x[2:3]]), pages)
    assert_same(jax.jit(partial(copy_blocks, backend=BACKEND), donate_argnums=0)(on_device(pages), src, dst), want)


@pytest.mark.parametrize("backend", ["xla", BACKEND])
def test_heads_narrower_than_pages(backend: str) -> None:
    """Turned as a head of 80, then stored 128 wide with zeros, whatever the backend."""
    rng = fresh_rng()
    pages = random_pages(rng, "float32", 4, 80)
    q, k, v = rng.standard_normal((3, 7, 2, 80)).astype(np.float32)
    slots = np.array([8, 9, 10, 17, 31, 24, 0], np.int32)
    angles = rng.uniform(-3, 3, (7, 40)).astype(np.float32)
    rotary = np.cos(angles), np.sin(angles)
    narrow = KVPages(pages.k[..., :80], pages.v[..., :80])
    want, turned = rotate_and_write(on_device(narrow), q, k, v, slots, rotary, backend="xla")
    got, also = rotate_and_write(on_device(pages), q, k, v, slots, rotary, backend=backend)
    assert_same(beyond_block_0(got), beyond_block_0(widen(want, BACKEND)))
    np.testing.assert_allclose(also, turned, rtol=1e-6)


@pytest.mark.parametrize(
    ("pages", "columns", "message"),
    [
        (((4, 2, 16, 128), "float16"), 4, "pages.k: got dtype float16; allowed is float32, bfloat16, int8"),
        (((4, 2, 8, 128), "bfloat16"), 4, "block_size: got 8; allowed is a multiple of 16 for bfloat16"),
        (((4, 2, 32, 128), "int8"), 4, "block_size: got 32; allowed is a multiple of 128 for int8"),
        (((4, 2, 8, 64), "float32"), 4, "a last axis of a multiple of 128"),
        (((4, 2, 8, 128), "float32"), 1 << 17, "block_tables: got 1048576 bytes; allowed is at most 524288"),
    ],
)
def test_refuses(pages: tuple, columns: int, message: str) -> None:
    pool = jnp.zeros(*pages)
    scales = jnp.zeros(pool.shape[:3]) if pool.dtype == jnp.int8 else None
    batch = PagedBatch(np.zeros((2, columns), np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32))
    q = np.zeros((2, 4, pool.shape[3]), np.float32)

    def attend(pages: Any) -> jax.Array:
        return paged_attention(q, pages, batch, scale=1.0, backend="tpu")

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(attend, KVPages(pool, pool, scales, scales))


def test_init_pages_is_as_wide_as_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    shapes = {head_dim: init_pages(2, 1, 16, head_dim, "bfloat16").k.shape[3] for head_dim in (32, 80, 128, 192)}
    assert shapes == {32: 128, 80: 128, 128: 128, 192: 256}
