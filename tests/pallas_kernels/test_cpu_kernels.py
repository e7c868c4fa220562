"""The native CPU kernels on every instruction set that this processor has: products, attention, what they refuse."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_cases import fresh_rng, make_case, relative_error

from pallas_kernels.cpu.attention import attention
from pallas_kernels.cpu.library import find_library, instruction_sets, panel_width, xla_interface
from pallas_kernels.cpu.linear import linear, pack_weight, quantize_weight, split_linear, take_rows
from pallas_kernels.oracle import reference_attention

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native CPU kernels are not built: no C++ compiler")
each_set = pytest.mark.parametrize("instruction_set", instruction_sets())
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
BOUND = {"float32": 1e-6, "bfloat16": 4e-3}  # of results rounded to the dtype


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def draw(rng: np.random.Generator, dtype: str, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


@each_set
@each_dtype
@pytest.mark.parametrize(
    "rows, k, n", [(1, 576, 96), (3, 33, 70), (8, 64, 64), (15, 7, 1), (37, 100, 96), (130, 96, 200)]
)
def test_products(instruction_set: str, dtype: str, rows: int, k: int, n: int) -> None:
    """Plain, and with everything that may be fused, beside NumPy in float64."""
    rng = fresh_rng()
    x, w, norm = draw(rng, dtype, rows, k), draw(rng, dtype, n, k), draw(rng, dtype, k)
    bias, residual = draw(rng, dtype, n), draw(rng, dtype, rows, n)
    run, packed = partial(linear, instruction_set=instruction_set), pack_weight(w, instruction_set=instruction_set)
    plain = run(x, packed, n, dtype="float32")
    assert plain.dtype == jnp.float32
    assert relative_error(plain, wide(x) @ wide(w).T) < 1e-6
    scaled = wide(x) / np.sqrt((wide(x) ** 2).mean(axis=1, keepdims=True) + 1e-5) * wide(norm)
    want = wide(jnp.asarray(scaled, dtype)) @ wide(w).T + wide(bias) + wide(residual)
    fused = run(x, packed, n, norm=norm, eps=1e-5, bias=bias, residual=residual)
    assert fused.dtype == x.dtype
    assert relative_error(wide(fused), want) < BOUND[dtype]


def round_groups(x, size: int = 10**9) -> np.ndarray:
    """Each `size` values of a row rounded to 127 parts of the largest of them."""
    x = np.asarray(x).astype(np.float32)
    parts = []
    for start in range(0, x.shape[1], size):
        part = x[:, start : start + size]
        scales = np.abs(part).max(axis=1, keepdims=True) / np.float32(127)
        parts.append(np.rint(part / np.where(scales > 0, scales, 1)) * scales)
    return np.concatenate(parts, axis=1)


@each_set
@each_dtype
@pytest.mark.parametrize("rows, k, n", [(1, 576, 96), (3, 33, 70), (15, 6, 1), (37, 100, 96), (130, 97, 200)])
def test_int8_products(instruction_set: str, dtype: str, rows: int, k: int, n: int) -> None:
    """Beside NumPy, where a value of x may round the other way at a tie; a row and an output of zeros."""
    rng = fresh_rng()
    x, w, norm = draw(rng, dtype, rows, k), draw(rng, dtype, n, k), draw(rng, dtype, k)
    x, w = x.at[rows // 2].multiply(rows == 1), w.at[n // 2].multiply(n == 1)
    bias, residual = draw(rng, dtype, n), draw(rng, dtype, rows, n)
    run, packed = partial(linear, instruction_set=instruction_set), quantize_weight(w, instruction_set=instruction_set)
    got = run(x, packed, n, dtype="float32")
    assert relative_error(got, round_groups(x, 64) @ round_groups(w).T) < 4e-3
    assert relative_error(got, wide(x) @ wide(w).T) < 0.02
    scaled = jnp.asarray(wide(x) / np.sqrt((wide(x) ** 2).mean(axis=1, keepdims=True) + 1e-5) * wide(norm), dtype)
    want = round_groups(scaled, 64) @ round_groups(w).T + wide(bias) + wide(residual)
    fused = run(x, packed, n, norm=norm, eps=1e-5, bias=bias, residual=residual)
    assert fused.dtype == x.dtype
    assert relative_error(wide(fused), want) < BOUND[dtype] + 4e-3


@each_set
@each_dtype
def test_gated_products(instruction_set: str, dtype: str) -> None:
    rng = fresh_rng()
    x, w, bias = draw(rng, dtype, 21, 50), draw(rng, dtype, 140, 50), draw(rng, dtype, 140)
    options = dict(gated=True, instruction_set=instruction_set)
    got = linear(x, pack_weight(w, **options), 70, bias=bias, **options)
    gate, up = np.split(wide(x) @ wide(w).T + wide(bias), 2, axis=1)
    assert relative_error(wide(got), gate / (1 + np.exp(-gate)) * up) < BOUND[dtype]
    got = linear(x, quantize_weight(w, **options), 70, bias=bias, **options)
    assert relative_error(wide(got), gate / (1 + np.exp(-gate)) * up) < 0.03


@each_set
@each_dtype
@pytest.mark.parametrize("pack", [pack_weight, quantize_weight])
def test_a_row_does_not_depend_on_its_neighbours(instruction_set: str, dtype: str, pack) -> None:
    """To the last bit: alone, anywhere in a batch of any size, beside NaN and before padding."""
    rng = fresh_rng()
    weight = pack(draw(rng, dtype, 96, 150), instruction_set=instruction_set)
    run = partial(linear, weight=weight, features=96, instruction_set=instruction_set)
    row = draw(rng, dtype, 1, 150)
    alone = np.asarray(run(row))
    for rows in (2, 9, 14, 15, 31, 120):
        at = int(rng.integers(rows))
        x = jnp.full((rows, 150), jnp.nan, dtype).at[at].set(row[0])
        live = int(rng.integers(at + 1, rows + 1))
        got = np.asarray(run(x, live=jnp.int32(live)))
        np.testing.assert_array_equal(got[at], alone[0])
        assert np.isnan(wide(got[:live])).all(axis=1).sum() == live - 1
    for live in (-3, 0):
        run(x, live=jnp.int32(live)).block_until_ready()
    assert np.isnan(wide(run(x, live=jnp.int32(500)))).sum() == 119 * 96  # beyond the end: all rows


@each_set
@each_dtype
@pytest.mark.parametrize("parts", [(150,), (64, 32, 54), (5, 145), (20, 3, 127)])
def test_split_products(instruction_set: str, dtype: str, parts: tuple[int, ...]) -> None:
    """Equal to one array cut in parts, wherever panels end."""
    rng = fresh_rng()
    x, w, bias = draw(rng, dtype, 19, 40), draw(rng, dtype, 300, 40), draw(rng, dtype, 300)
    options = dict(bias=bias, gated=True, dtype="float32", instruction_set=instruction_set)
    packed = pack_weight(w, gated=True, instruction_set=instruction_set)
    got = split_linear(x, packed, parts, **options)
    whole = linear(x, packed, 150, **options)
    assert tuple(part.shape[1] for part in got) == parts
    np.testing.assert_array_equal(np.concatenate(got, axis=1), whole)


@each_set
@each_dtype
def test_take_rows(instruction_set: str, dtype: str) -> None:
    rng = fresh_rng()
    table = draw(rng, dtype, 70, 33)
    ids = jnp.asarray([0, 69, 31, 32, 70, -1, 5] * 6, jnp.int32)
    run = partial(take_rows, ids=ids, rows=70, features=33, dtype=dtype, instruction_set=instruction_set)
    packed = pack_weight(table, instruction_set=instruction_set)
    np.testing.assert_array_equal(wide(run(packed)), wide(table)[np.clip(ids, 0, 69)])
    want = jnp.asarray(round_groups(table), dtype)[np.clip(ids, 0, 69)]
    packed = quantize_weight(table, instruction_set=instruction_set)
    np.testing.assert_array_equal(wide(run(packed)), wide(want))


@each_set
@pytest.mark.parametrize("storage", ["float32", "float16", "uint16", "int8", "uint8"])
def test_attention_on_every_instruction_set(instruction_set: str, storage: str) -> None:
    rng = fresh_rng()
    options = dict(storage=storage, head_dim=80, window=150, soft_cap=5.0, sinks=True, return_lse=True)
    for lengths, queries, rows in (
        ([1, 40, 700, 0, 1300, 17], None, None),
        ([9, 600, 30, 1030], [1, 1, 30, 70], 110),
    ):
        case = make_case(rng, lengths, queries, num_decode=0 if queries is None else 2, rows=rows, **options)
        run = jax.jit(partial(attention, spec=case.spec, sinks=case.sinks, instruction_set=instruction_set))
        got, lse = run(case.q, case.pages, case.batch)
        want, want_lse = reference_attention(*case.args)
        bound = 1e-5 if storage in ("float32", "int8", "uint8") else 5e-3
        assert relative_error(got, want) < bound
        np.testing.assert_allclose(lse, want_lse, rtol=bound, atol=bound)


def test_attention_does_not_depend_on_the_rest_of_the_batch() -> None:
    """A long sequence, cut into parts for the threads, alone and among others: the same bits."""
    rng = fresh_rng()
    case = make_case(rng, [1200, 3, 700, 40, 1, 5, 900, 64], storage="uint16")
    together, _ = attention(case.q, case.pages, case.batch, case.spec, None)
    for r in range(8):
        batch = case.batch._replace(
            block_tables=case.batch.block_tables[r : r + 1],
            kv_lengths=case.batch.kv_lengths[r : r + 1],
            write_slots=case.batch.write_slots[r : r + 1],
        )
        alone, _ = attention(case.q[r : r + 1], case.pages, batch, case.spec, None)
        np.testing.assert_array_equal(np.asarray(alone)[0], np.asarray(together)[r])


def test_many_calls_at_once() -> None:
    """Programs that run side by side share the threads that help."""
    rng = fresh_rng()
    x, w = draw(rng, "float32", 40, 64), draw(rng, "float32", 640, 64)
    packed = pack_weight(w)
    run = jax.jit(lambda x: linear(x, packed, 640))
    want = np.asarray(run(x))
    with ThreadPoolExecutor(6) as pool:
        for got in pool.map(lambda _: np.asarray(run(x)), range(200)):
            np.testing.assert_array_equal(got, want)


def test_what_products_refuse() -> None:
    rng = fresh_rng()
    x, w = draw(rng, "float32", 4, 8), pack_weight(draw(rng, "float32", 40, 8))
    with pytest.raises(ValueError, match=r"weight: got float32\(3, 4, 5\); allowed is \[N, K\]"):
        pack_weight(np.zeros((3, 4, 5), np.float32))
    with pytest.raises(ValueError, match="weight: got 3 rows"):
        pack_weight(np.zeros((3, 4), np.float32), gated=True)
    panel = panel_width()
    got, allowed = ((-(-n // panel), 8, panel, 1) for n in (40, 70))
    with pytest.raises(ValueError, match=re.escape(f"weight: got float32{got}; allowed is float32{allowed}")):
        linear(x, w, 70)
    with pytest.raises(ValueError, match="x: got int32"):
        linear(x.astype(jnp.int32), w, 40)
    with pytest.raises(ValueError, match=r"bias: got float32\(39,\); allowed is None or float32\(40,\)"):
        linear(x, w, 40, bias=jnp.zeros(39))
    with pytest.raises(ValueError, match="dtype: got bfloat16; allowed is float32"):
        linear(x, w, 40, dtype="bfloat16")
    with pytest.raises(ValueError, match=f"instruction_set: got 'mmx'; allowed is one of .*{instruction_sets()[0]}"):
        linear(x, w, 40, instruction_set="mmx")


def test_the_library_for_the_newest_interface_that_xla_takes(tmp_path: Path) -> None:
    assert find_library(tmp_path, (0, 3)) is None
    for name in ("_native_0_002.so", "_native_0_010.so", "_native_0_003.so", "_native_1_000.so", "other.so"):
        (tmp_path / name).touch()
    for interface, name in (
        ((0, 3), "_native_0_003.so"),
        ((0, 9), "_native_0_003.so"),
        ((0, 10), "_native_0_010.so"),
        ((1, 2), "_native_1_000.so"),
    ):
        assert find_library(tmp_path, interface) == tmp_path / name
    assert find_library(tmp_path, (0, 1)) is None
    assert xla_interface() >= (0, 3)


def test_loading_comes_before_or_after_the_start_of_xla() -> None:
    """The first thing a process does with JAX may be to ask for the kernels."""
    code = "from pallas_kernels.cpu import library; library.load_library(); import jax; print(jax.default_backend())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "cpu\n", done.stderr
