"""Writing and copying pages: the cache holds exactly what NumPy puts there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from paged_cases import fresh_rng, stored

from pallas_kernels import copy_blocks, init_pages, storage_dtype, write_kv

STORAGES = ["float32", "uint16", "bfloat16"]


def bits(x) -> np.ndarray:
    """The array's bytes, so that NaN equals NaN and -0 does not equal 0."""
    x = np.asarray(x)
    return x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


def random_pages(rng: np.random.Generator, storage: str) -> np.ndarray:
    pages = rng.standard_normal((9, 3, 4, 8))
    pages[2:4] = np.nan
    return stored(pages, storage)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("given", [np.float32, ml_dtypes.bfloat16])
def test_write_kv(storage: str, given: type) -> None:
    rng = fresh_rng()
    k_pages, v_pages = random_pages(rng, storage), random_pages(rng, storage)
    k, v = rng.standard_normal((2, 12, 3, 8)).astype(given)
    k[3], v[4] = np.inf, -0.0
    slots = np.concatenate([4 + rng.choice(32, 9, replace=False), [0, 1, 9 * 4]]).astype(np.int32)
    want = k_pages.copy(), v_pages.copy()
    for pages, x in zip(want, (k, v), strict=True):
        for row, slot in enumerate(slots[:-1]):  # the last slot lies outside the pool: dropped
            pages[slot // 4, :, slot % 4] = stored(x[row], storage)
    got = jax.jit(write_kv, donate_argnums=(0, 1))(jnp.asarray(k_pages), jnp.asarray(v_pages), k, v, slots)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(bits(g), bits(w))


def test_padding_rows_touch_block_0_only() -> None:
    rng = fresh_rng()
    pages = random_pages(rng, "float32")
    x = rng.standard_normal((6, 3, 8)).astype(np.float32)
    got, _ = write_kv(jnp.asarray(pages), jnp.asarray(pages), x, x, np.array([0, 0, 0, 3, 3, 8], np.int32))
    pages[2, :, 0] = x[5]
    np.testing.assert_array_equal(bits(got[1:]), bits(pages[1:]))


@pytest.mark.parametrize("storage", STORAGES)
def test_copy_blocks(storage: str) -> None:
    rng = fresh_rng()
    pages = random_pages(rng, storage)
    # Block 5 is read and overwritten in one call: sources are read first. (0, 0) pads.
    src, dst = np.array([[5, 1, 0, 2, 0], [6, 5, 0, 8, 0]], np.int32)
    want = pages.copy()
    want[[6, 5, 8]] = pages[[5, 1, 2]]
    got = jax.jit(copy_blocks, donate_argnums=0)(jnp.asarray(pages), src, dst)
    np.testing.assert_array_equal(bits(got), bits(want))


def test_storage_dtype() -> None:
    assert storage_dtype(jnp.bfloat16, "cpu") == np.uint16
    assert storage_dtype("bfloat16", "gpu") == jnp.bfloat16
    assert storage_dtype(jnp.float32, "cpu") == storage_dtype(np.float32, "tpu") == np.float32
    pages = init_pages(5, 2, 16, 8, jnp.bfloat16)
    assert pages.shape == (5, 2, 16, 8) and pages.dtype == storage_dtype(jnp.bfloat16, jax.default_backend())
    assert not np.asarray(pages).any()
