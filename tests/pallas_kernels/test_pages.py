"""Writing and copying pages: the cache holds exactly what NumPy puts there. And what quantisation loses."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from paged_cases import (
    CPU_STORAGES,
    LARGEST,
    STORAGES,
    assert_same,
    beyond_block_0,
    bits,
    fresh_rng,
    make_pages,
    on_device,
    stored,
    values,
)

from pallas_kernels import (
    KV_DTYPES,
    KVPages,
    available_backends,
    copy_blocks,
    init_pages,
    rotate_and_write,
    storage_dtype,
    write_kv,
)

each_backend = pytest.mark.parametrize("backend", (*available_backends(), "triton_interpreted"))


def random_pages(rng: np.random.Generator, storage: str) -> KVPages:
    """9 blocks of 4 tokens, 3 heads of 8; blocks 2 and 3 hold what is not to be read."""
    dead = np.zeros((9, 4), bool)
    dead[2:4] = True
    return make_pages(*rng.standard_normal((2, 9, 3, 4, 8)), storage, dead)


@each_backend
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_write_kv(storage: str, dtype: type, backend: str) -> None:
    rng = fresh_rng()
    pages = random_pages(rng, storage)
    # Multiples of 1/64 with 127/64 as the largest: 127 is an odd prime, so a quotient is never near the middle of two
    # numbers, where rounding may go either way.
    k, v = (rng.integers(-60, 60, (2, 12, 3, 8)) / 64).astype(dtype)
    k[..., 0] = v[..., 0] = 127 / 64
    v[4] = 0.0
    if storage not in LARGEST:
        k[3], v[4] = np.inf, -0.0
    slots = np.concatenate([4 + rng.choice(32, 9, replace=False), [0, 1, 9 * 4]]).astype(np.int32)
    want = jax.tree.map(np.copy, pages)
    for pool, scales, x in ((want.k, want.k_scales, k), (want.v, want.v_scales, v)):
        for row, slot in enumerate(slots[:-1]):  # the last slot lies outside the pool: dropped
            numbers, scale = stored(x[row].astype(np.float32), storage)
            pool[slot // 4, :, slot % 4] = numbers
            if scales is not None:
                scales[slot // 4, :, slot % 4] = scale
    write = jax.jit(partial(write_kv, backend=backend), donate_argnums=0)
    assert_same(beyond_block_0(write(on_device(pages), k, v, slots)), beyond_block_0(want))


@each_backend
@pytest.mark.parametrize("storage", ["float32", "uint16", "int8"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_rotate_and_write(storage: str, dtype: type, backend: str) -> None:
    """Equal to turning complex numbers and then writing; quantised rows within their last place."""
    rng = fresh_rng()
    pages = random_pages(rng, storage)
    q, k, v = (rng.standard_normal((20, heads, 8)).astype(dtype) for heads in (6, 3, 3))
    slots = np.concatenate([4 + rng.permutation(32)[:18], [0, 2]]).astype(np.int32)
    angles = rng.uniform(-3, 3, (20, 4))
    rotary = (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))

    def turned(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x.astype(np.float64), 2, axis=-1)
        z = (a + 1j * b) * np.exp(1j * angles)[:, None]
        return np.concatenate([z.real, z.imag], axis=-1).astype(dtype)

    turn = jax.jit(partial(rotate_and_write, backend=backend), donate_argnums=0)
    got, rotated = turn(on_device(pages), q, k, v, slots, rotary)
    tolerance = 1e-5 if dtype is np.float32 else 1e-2  # a bfloat16 may round the other way
    assert rotated.dtype == q.dtype
    np.testing.assert_allclose(
        np.asarray(rotated)[:18].astype(float), turned(q)[:18].astype(float), tolerance, tolerance
    )
    want = write_kv(on_device(pages), turned(k), v, slots, backend="xla")
    pairs = zip(jax.tree.leaves(beyond_block_0(got)), jax.tree.leaves(beyond_block_0(want)), strict=True)
    for g, w in pairs:
        if storage == "float32":
            np.testing.assert_allclose(g, w, tolerance, tolerance)
        else:
            wide = np.float32 if g.dtype == np.float32 else np.int32
            np.testing.assert_allclose(np.asarray(g).astype(wide), np.asarray(w).astype(wide), 1e-2, 1.01)


def test_padding_rows_touch_block_0_only() -> None:
    rng = fresh_rng()
    pages = random_pages(rng, "int8")
    x = rng.standard_normal((6, 3, 8)).astype(np.float32)
    got = write_kv(on_device(pages), x, x, np.array([0, 0, 0, 3, 3, 8], np.int32))
    want = jax.tree.map(np.copy, pages)
    for pool, scales in ((want.k, want.k_scales), (want.v, want.v_scales)):
        pool[2, :, 0], scales[2, :, 0] = stored(x[5], "int8")
    assert_same(*(jax.tree.map(lambda pool: pool[1:], pages) for pages in (got, want)))


@each_backend
@pytest.mark.parametrize("storage", STORAGES)
def test_copy_blocks(storage: str, backend: str) -> None:
    rng = fresh_rng()
    pages = random_pages(rng, storage)
    # Block 5 is read and overwritten in one call: sources are read first. (0, 0) pads.
    src, dst = np.array([[5, 1, 0, 2, 0], [6, 5, 0, 8, 0]], np.int32)
    want = jax.tree.map(np.copy, pages)
    for pool, old in zip(jax.tree.leaves(want), jax.tree.leaves(pages), strict=True):
        pool[[6, 5, 8]] = old[[5, 1, 2]]
    got = jax.jit(partial(copy_blocks, backend=backend), donate_argnums=0)(on_device(pages), src, dst)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(bits(g), bits(w))


def test_storage_dtype() -> None:
    on_cpu = [storage_dtype(name, "cpu").name for name in KV_DTYPES]
    assert on_cpu == ["float32", "uint16", "float16", "int8", "uint8"] and set(on_cpu) == set(CPU_STORAGES)
    for platform in ("gpu", "tpu"):
        elsewhere = [storage_dtype(name, platform).name for name in KV_DTYPES]
        assert elsewhere == ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]
    assert storage_dtype(np.float32, "cpu") == storage_dtype(jnp.float32, "tpu") == np.float32
    assert storage_dtype(jnp.bfloat16, "gpu") == jnp.bfloat16 == storage_dtype("bfloat16", "gpu")
    assert storage_dtype(jnp.float8_e4m3fn, "gpu") == jnp.float8_e4m3fn


@pytest.mark.parametrize("name", KV_DTYPES)
def test_init_pages(name: str) -> None:
    pages = init_pages(5, 2, 16, 8, name)
    stored_as = storage_dtype(name, jax.default_backend())
    assert pages.k.shape == pages.v.shape == (5, 2, 16, 8) and pages.k.dtype == pages.v.dtype == stored_as
    leaves = jax.tree.leaves(pages)
    assert not any(np.asarray(x).any() for x in leaves)
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves), "each is donated on its own"
    if name in ("int8", "fp8"):
        assert pages.k_scales is not None and pages.v_scales is not None
        assert pages.k_scales.shape == pages.v_scales.shape == (5, 2, 16)
    else:
        assert pages.k_scales is pages.v_scales is None


ROW = arrays(np.float32, (4, 2, 8), elements=st.floats(-1, 1, width=32))
write_jitted = jax.jit(write_kv)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@settings(max_examples=60, deadline=None)
@given(x=ROW, exponents=arrays(np.int32, (4, 2, 1), elements=st.integers(-130, 120)))
def test_quantisation_loses_half_a_step_at_most(name: str, x: np.ndarray, exponents: np.ndarray) -> None:
    """Per token and head: int8 has 127 equal steps; fp8 three bits after the first, or steps of 2^-9 near zero."""
    x = np.ldexp(x, exponents)
    x[np.abs(x) < np.finfo(np.float32).tiny] = 0  # the hardware's rounding of subnormals to zero is not at issue
    pages = write_jitted(init_pages(2, 2, 4, 8, name), x, -x, np.arange(4, 8, dtype=np.int32))
    largest = np.abs(x).max(axis=-1, keepdims=True).astype(np.float64)
    if name == "int8":
        half_step = largest / 127 / 2
    else:
        half_step = np.maximum(np.abs(x) * 2.0**-4, largest / 448 * 2.0**-10)
    # float32 rounding of the scale and the product; and a scale that underflows is taken for zero
    room = half_step * (1 + 1e-5) + largest * 1e-6 + np.where(largest < 1e-35, largest, 0)
    for pool, scales, sign in ((pages.k, pages.k_scales, 1), (pages.v, pages.v_scales, -1)):
        read = values(pool, scales)[1].swapaxes(0, 1)
        assert np.isfinite(read).all()
        assert (np.abs(sign * read.astype(np.float64) - x) <= room).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rows_without_numbers(name: str) -> None:
    """Zeros are stored as zeros with scale 0. A NaN or an infinity is not read back as a number."""
    x = np.ones((4, 1, 8), np.float32)
    x[0], x[1, 0, 3], x[2, 0, 3] = 0, np.nan, np.inf
    pages = write_kv(init_pages(2, 1, 4, 8, name), x, x, np.arange(4, 8, dtype=np.int32))
    read = values(pages.v, pages.v_scales)[1, 0]
    assert (read[0] == 0).all() and np.asarray(pages.v_scales)[1, 0, 0] == 0
    assert not np.isfinite(read[1:3]).any()
    np.testing.assert_allclose(read[3], 1.0, rtol=1e-6)


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_zeros_are_zeros_where_memory_was_used_before(name: str) -> None:
    """Megabytes of pages, which the system gives out anew, and a few bytes before and after what it can."""
    for _ in range(3):
        pages = init_pages(99, 3, 64, 96, name)
        assert pages.k.nbytes > 3 << 20 or name == "int8"
        for array in jax.tree.leaves(pages):
            assert not np.asarray(array).any()
        jax.block_until_ready(jax.tree.map(lambda x: jnp.ones_like(x), pages))
        del pages
