"""What the public functions refuse, and that the message names the argument. And `check_batch`, rule by rule."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_cases import fresh_rng, make_case

from pallas_kernels import (
    KVPages,
    available_backends,
    check_batch,
    copy_blocks,
    init_pages,
    paged_attention,
    rotate_and_write,
    storage_dtype,
    write_kv,
)
from pallas_kernels.dispatch import BACKENDS, FOR_TESTS


def bad_attention(**changes):
    """Calls paged_attention on a good mixed case with some arguments, pages or batch fields replaced."""
    case = make_case(fresh_rng(), [20, 5, 9], [1, 5, 3], num_decode=1, storage=changes.pop("storage", "float32"))
    parts = {"batch": case.batch, "pages": case.pages}
    for name, part in parts.items():
        parts[name] = part._replace(**{k: changes.pop(k) for k in part._fields if k in changes})
    arguments = {"q": case.q, **parts, "scale": 0.1}
    return paged_attention(**(arguments | changes))


def ints(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "cuda"}, "backend: got 'cuda'.*'auto', 'cpu', 'xla', .*'oracle'"),
        ({"q": np.zeros((9, 6, 32), np.float32)}, r"q: got shape \(9, 6, 32\).*\[T, Hq, 64\]"),
        ({"q": np.zeros((9, 5, 64), np.float32)}, "q: got 5 query heads.*multiple of the 2 KV heads"),
        ({"q": np.zeros((9, 6, 64), np.int32)}, "q: got dtype int32.*float32, bfloat16, float16"),
        ({"q": np.zeros((9, 6, 64), np.float64)}, "q: got dtype float64.*float32, bfloat16, float16"),
        ({"pages": (np.zeros(3), np.zeros(3))}, "pages: got tuple; allowed is KVPages"),
        ({"k": np.zeros((9, 2, 64), np.float32)}, "pages.k: got shape"),
        (
            {"k": np.zeros((9, 2, 16, 64), np.int32)},
            "pages.k: got dtype int32.*float32, bfloat16, float16, uint16, int8",
        ),
        ({"v": np.zeros((9, 2, 16, 64), np.uint16)}, "pages.v: got uint16.*pages.k"),
        ({"k_scales": np.zeros((9, 2, 16), np.float32)}, "pages.k_scales: got an array.*None for float32"),
        ({"storage": "int8", "v_scales": None}, r"pages.v_scales: got None.*float32\(\d+, 2, 16\) for int8"),
        ({"storage": "uint8", "k_scales": np.zeros((9, 2), np.float32)}, r"pages.k_scales: got float32\(9, 2\)"),
        ({"block_tables": ints(3)}, r"block_tables: got shape \(3,\).*\[R, M\]"),
        ({"block_tables": np.zeros((3, 2))}, "block_tables: got dtype float64.*int32"),
        ({"kv_lengths": ints(4)}, "kv_lengths: got shape"),
        ({"write_slots": ints(8)}, "write_slots: got shape"),
        ({"query_starts": ints(3)}, r"query_starts: got shape \(3,\).*\(4,\)"),
        ({"num_decode": ints(1)}, "num_decode: got shape"),
        ({"query_starts": None}, "q: got 9 rows.*3 rows"),
        ({"scale": float("nan")}, "scale: got nan.*finite"),
        ({"scale": None}, "scale: got None.*finite"),
        ({"window": 0}, "window: got 0; allowed is None or an integer of at least 1"),
        ({"window": 2.5}, "window: got 2.5"),
        ({"soft_cap": 0.0}, "soft_cap: got 0.0; allowed is None or a finite number above 0"),
        ({"soft_cap": float("inf")}, "soft_cap: got inf"),
        ({"sinks": np.zeros(2, np.float32)}, r"sinks: got float32\(2,\); allowed is None or float32\(6,\)"),
        ({"sinks": np.zeros(6, np.float16)}, r"sinks: got float16\(6,\)"),
        ({"return_lse": 1}, "return_lse: got 1; allowed is True or False"),
    ],
)
def test_attention_refuses(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bad_attention(**changes)


def test_attention_refuses_num_decode_in_a_decode_batch() -> None:
    case = make_case(fresh_rng(), [20, 5])
    with pytest.raises(ValueError, match="num_decode"):
        paged_attention(case.q, case.pages, case.batch._replace(num_decode=ints()), scale=1.0)


def test_available_backends_are_backends() -> None:
    names = available_backends()
    assert not set(names) & set(FOR_TESTS) and set(FOR_TESTS) < set(BACKENDS)
    assert "xla" in names and "oracle" not in names and set(names) <= set(BACKENDS)


def test_pages_refuse() -> None:
    pages = init_pages(4, 2, 16, 8, "float32")
    row, slots = jnp.zeros((3, 2, 8)), jnp.zeros(3, jnp.int32)
    for dtype in (jnp.int16, "fp4", "float64", None):
        with pytest.raises(ValueError, match=r"dtype: got .* one of 'float32', 'bfloat16', 'float16', 'int8', 'fp8'"):
            storage_dtype(dtype, "cpu")
    with pytest.raises(ValueError, match="block_size: got 0; allowed is at least 1"):
        init_pages(4, 2, 0, 8, jnp.float32)
    with pytest.raises(ValueError, match=r"k: got shape \(3, 1, 8\).*\[T, 2, 8\]"):
        write_kv(pages, row[:, :1], row, slots)
    with pytest.raises(ValueError, match=r"v: got float32\(2, 2, 8\).*k, float32\(3, 2, 8\)"):
        write_kv(pages, row, row[:2], slots)
    with pytest.raises(ValueError, match="v: got dtype int32"):
        write_kv(pages, row, row.astype(jnp.int32), slots)
    with pytest.raises(ValueError, match="write_slots: got shape"):
        write_kv(pages, row, row, slots[:2])
    with pytest.raises(ValueError, match="write_slots: got dtype float32"):
        write_kv(pages, row, row, jnp.zeros(3))
    with pytest.raises(ValueError, match=r"pages\.k_scales: got None"):
        write_kv(init_pages(4, 2, 16, 8, "int8")._replace(k_scales=None), row, row, slots)
    with pytest.raises(ValueError, match="pages: got ArrayImpl"):
        copy_blocks(pages.k, slots, slots)
    with pytest.raises(ValueError, match="dst: got shape"):
        copy_blocks(pages, slots, slots[:2])
    half = jnp.zeros((3, 4))
    with pytest.raises(ValueError, match=r"q: got float32\(2, 2, 8\); allowed is float32\(3, Hq, 8\)"):
        rotate_and_write(pages, row[:2], row, row, slots, (half, half))
    with pytest.raises(ValueError, match=r"sin: got float32\(3, 8\); allowed is float32\(3, 4\)"):
        rotate_and_write(pages, row, row, row, slots, (half, jnp.zeros((3, 8))))
    with pytest.raises(ValueError, match="backend: got 'mps'"):
        write_kv(pages, row, row, slots, backend="mps")


def test_refusals_come_while_tracing_too() -> None:
    """Before any device work: the shapes alone are enough."""
    case = make_case(fresh_rng(), [20, 5])
    with pytest.raises(ValueError, match="q: got"):
        jax.eval_shape(
            lambda q: paged_attention(q, case.pages, case.batch, scale=1.0),
            jax.ShapeDtypeStruct((2, 5, 64), "float32"),
        )


def test_what_a_kernel_lacks_matters_where_it_runs() -> None:
    """Quantised pools of 2 to 4 GiB are too much for Pallas' offsets on GPUs, not for any other backend."""
    case = make_case(fresh_rng(), [20, 5], storage="int8")
    pool = jax.ShapeDtypeStruct((2**31 // (2 * 16 * 64) + 1, 2, 16, 64), jnp.int8)
    scales = jax.ShapeDtypeStruct(pool.shape[:3], jnp.float32)
    pages = KVPages(pool, pool, scales, scales)
    traced = jax.jit(lambda q, pages: paged_attention(q, pages, case.batch, scale=1.0)).trace(case.q, pages)
    traced.lower(lowering_platforms=("cpu",))
    with pytest.raises(ValueError, match=r"pages.k: got \d+ elements of one byte; allowed by the triton backend"):
        traced.lower(lowering_platforms=("cuda",))


def test_check_batch() -> None:
    case = make_case(fresh_rng(), [20, 0, 5, 40, 3], [1, 1, 5, 2, 0], num_decode=2, rows=11)
    batch, blocks = case.batch, len(case.pages.k)
    check_batch(batch, blocks, 16)

    def changed(field: str, index: object, value: int):
        array = getattr(batch, field).copy()
        array[index] = value
        return batch._replace(**{field: array})

    for broken, message in [
        (changed("kv_lengths", 2, 49), "kv_lengths must be in 0..48"),
        (changed("kv_lengths", 2, -1), "kv_lengths must be"),
        (changed("kv_lengths", 2, 4), "sequence 2 has 5 rows but only 4 tokens"),
        (changed("block_tables", (0, 0), blocks), "block_tables must hold ids"),
        (changed("block_tables", (3, 1), 0), "sequence 3 reads block 0"),
        (changed("write_slots", 0, blocks * 16), "write_slots must be in"),
        (changed("write_slots", 3, 5), "write_slots: row 3 is position 1 of sequence 2"),
        (changed("write_slots", 10, 16), "padding row 10 points outside block 0"),
        (changed("query_starts", 0, 1), "query_starts must rise from 0"),
        (changed("query_starts", 5, 12), "query_starts must rise from 0 to at most 11"),
        (batch._replace(num_decode=np.int32(3)), "num_decode=3"),
        (batch._replace(query_starts=None), "num_decode must be None"),
        (batch._replace(query_starts=None, num_decode=None), "got 11 rows, 5 sequences"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_batch(broken, blocks, 16)
