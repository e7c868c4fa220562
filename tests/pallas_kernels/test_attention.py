"""`paged_attention` on XLA against the oracle: every head layout, page dtype, length and mixture of rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from paged_cases import Case, fresh_rng, make_case, relative_error

from pallas_kernels import PagedBatch, check_batch, paged_attention, write_kv
from pallas_kernels.oracle import reference_attention

BOUND = {"float32": 1e-5, "bfloat16": 5e-3, "uint16": 5e-3}

run = jax.jit(partial(paged_attention, backend="xla"), static_argnames=("scale",))


@dataclass(frozen=True)
class Shape:
    """One compiled shape: (KV heads, queries per KV head), sizes, and the longest sequence in blocks."""

    heads: tuple[int, int]
    head_dim: int
    block_size: int
    storage: str
    columns: int = 40
    query: type = np.float32

    def __str__(self) -> str:
        kv_heads, group = self.heads
        return f"{kv_heads}x{group}x{self.head_dim}-block{self.block_size}-{self.storage}-{self.query.__name__}"


SHAPES = [
    Shape((3, 3), 64, 16, "float32"),
    Shape((3, 3), 64, 16, "uint16"),
    Shape((3, 3), 64, 16, "uint16", query=ml_dtypes.bfloat16),
    Shape((1, 4), 128, 16, "uint16"),
    Shape((1, 9), 80, 8, "float32"),
    Shape((2, 2), 128, 32, "float32", columns=20),
    Shape((4, 1), 80, 16, "bfloat16"),
    Shape((2, 1), 8, 4, "uint16", columns=150),
    Shape((2, 4), 8, 1, "float32", columns=300),
]
SEQUENCES, ROWS = 11, 160


def build(rng: np.random.Generator, shape: Shape, lengths: list[int], queries=None, **options) -> Case:
    """A case of this shape, padded to its compiled sizes and checked."""
    case = make_case(
        rng,
        lengths + [0] * (SEQUENCES - len(lengths)),
        None if queries is None else queries + [0] * (SEQUENCES - len(lengths)),
        rows=ROWS,
        columns=shape.columns,
        blocks=3 * shape.columns + SEQUENCES,
        heads=shape.heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        storage=shape.storage,
        **options,
    )
    check_batch(case.batch, len(case.k_pages), shape.block_size)
    return replace(case, q=case.q.astype(shape.query))


def check(case: Case, storage: str) -> np.ndarray:
    """Runs the case, compares it with the oracle, and returns the output f32[T, Hq, D]."""
    got = run(case.q, case.k_pages, case.v_pages, case.batch, scale=case.scale)
    assert got.dtype == case.q.dtype and got.shape == case.q.shape
    got = np.asarray(got).astype(np.float32)
    want = reference_attention(*case.args)
    assert np.isfinite(got).all()
    bound = max(BOUND[storage], 5e-3 if case.q.dtype != np.float32 else 0)
    assert relative_error(got, want) <= bound
    seen = np.abs(want).max(axis=(1, 2)) > 0
    assert (got[~seen] == 0).all(), "padding rows and rows of empty sequences are zeros"
    # A row may not hide behind the others: each on its own is as right.
    errors = np.linalg.norm(got - want, axis=(1, 2))[seen] / np.linalg.norm(want, axis=(1, 2))[seen]
    assert errors.max(initial=0) <= 4 * bound
    return got


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode(shape: Shape) -> None:
    rng = fresh_rng()
    block, longest = shape.block_size, shape.columns * shape.block_size
    for lengths, share in [
        ([1, max(1, block - 1), block, block + 1, 2 * block, 0, 5 * block + 3, 1], False),
        ([0, longest, 0, 0, 1, 2, longest - 1, 1, 1, 0, 3], False),
        ([longest], False),
        ([0] * 10 + [longest // 2], False),
        ([], False),
        ([longest // 2, longest, longest // 2 - 1, longest // 4], True),
        (rng.integers(0, longest // 4, SEQUENCES).tolist(), False),
        (rng.integers(1, longest // 4, SEQUENCES).tolist(), True),
    ]:
        check(build(rng, shape, lengths, share=share), shape.storage)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixed(shape: Shape) -> None:
    rng = fresh_rng()
    longest = shape.columns * shape.block_size
    half, offset = longest // 2, min(longest, 300)
    for lengths, queries, num_decode in [
        ([1, half, 0, 5, longest], [1, 1, 1, 1, 100], 4),  # an empty decode row among the others
        ([min(160, longest)], [min(160, longest)], 0),  # one prompt in one go, every row used
        ([offset, 3], [130, 3], 0),  # a later chunk of a prompt
        ([65, 64, 0, 63, 1], [65, 64, 0, 5, 1], 0),  # around the tile size, an absent sequence in the middle
        ([7] * SEQUENCES, [7] * SEQUENCES, 0),  # many small chunks
        ([9, 20, 0, 0, half], [1] * 5, 5),  # decode rows only
        ([9, 20, half], [1, 1, 1], 0),  # single rows that nothing declares to be decode rows
        ([], [], 0),
    ]:
        check(build(rng, shape, lengths, queries, num_decode=num_decode), shape.storage)
    for _ in range(3):
        num_decode = int(rng.integers(0, 6))
        queries = [1] * num_decode + rng.integers(0, 40, 4).tolist()
        lengths = [n + int(rng.integers(0, longest // 5 - min(40, longest // 8))) for n in queries]
        lengths = [length if n else 0 for length, n in zip(lengths, queries, strict=True)]
        check(build(rng, shape, lengths, queries, num_decode=num_decode, share=True), shape.storage)


def test_more_sequences_than_rows() -> None:
    """The slots of a large engine in a step of few tokens."""
    rng = fresh_rng()
    lengths, queries = [17, 3, 40] + [0] * 20, [1, 1, 6] + [0] * 20
    case = make_case(rng, lengths, queries, num_decode=2, rows=8)
    check_batch(case.batch, len(case.k_pages), 16)
    check(case, "float32")


@pytest.mark.parametrize("queries", [None, [1, 30]], ids=["decode", "mixed"])
def test_lowers_for_every_platform(queries: list[int] | None) -> None:
    case = make_case(fresh_rng(), [20, 30], queries, num_decode=1, storage="bfloat16")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), case.args[:4])
    step = jax.jit(partial(paged_attention, scale=case.scale))
    exported = jax.export.export(step, platforms=("cpu", "cuda", "tpu"))(*shapes)
    assert exported.platforms == ("cpu", "cuda", "tpu")


def test_large_scores_do_not_overflow() -> None:
    """Scores in the thousands: their own float32 rounding, about 1e-4, is what the softmax then amplifies."""
    rng = fresh_rng()
    for case in (make_case(rng, [300, 40, 1], size=30.0), make_case(rng, [300, 40, 1], [200, 7, 1], size=30.0)):
        got = np.asarray(run(case.q, case.k_pages, case.v_pages, case.batch, scale=case.scale))
        assert np.isfinite(got).all()
        assert relative_error(got, reference_attention(*case.args)) < 1e-3


@pytest.mark.parametrize("where", ["q", "k_pages", "v_pages"])
def test_a_nan_stays_in_its_own_sequence(where: str) -> None:
    """A broken request must not harm its neighbours in the batch."""
    rng = fresh_rng()
    for case in (
        make_case(rng, [20, 300, 40, 9]),
        make_case(rng, [20, 300, 40, 9], [1, 1, 30, 9], num_decode=2),
    ):
        good = np.asarray(run(*case.args[:4], scale=case.scale))
        poisoned = getattr(case, where).copy()
        poisoned[1 if where == "q" else case.batch.block_tables[1, 0]] = np.nan
        case = replace(case, **{where: poisoned})
        bad = np.asarray(run(*case.args[:4], scale=case.scale))
        assert np.isnan(bad[1]).any()
        np.testing.assert_array_equal(np.delete(bad, 1, axis=0), np.delete(good, 1, axis=0))


@pytest.mark.parametrize("storage", ["float32", "uint16"])
def test_chunked_prefill_equals_one_shot(storage: str) -> None:
    """A prompt written and attended to chunk by chunk, cut anywhere, the last tokens as decode steps."""
    rng = fresh_rng()
    length, block, columns, heads, head_dim = 150, 16, 12, (2, 3), 64
    whole = make_case(rng, [length], [length], columns=columns, heads=heads, storage=storage)
    k, v = rng.standard_normal((2, length, heads[0], head_dim)).astype(np.float32)
    blank = np.full(whole.k_pages.shape, np.nan, np.float32).astype(ml_dtypes.bfloat16)
    blank = blank.view(np.uint16) if storage == "uint16" else blank.astype(np.float32)
    step = jax.jit(
        lambda q, k, v, pages, batch: (
            pages := write_kv(*pages, k, v, batch.write_slots),
            paged_attention(q, *pages, batch, scale=whole.scale, backend="xla"),
        )
    )
    _, one_shot = step(whole.q, k, v, (blank, blank), whole.batch)
    pad = 64
    cuts = np.sort(rng.choice(np.arange(1, 140), 6, replace=False)).tolist()
    cuts = sorted({*cuts, *range(0, 145, pad), 145, *range(145, length + 1)})
    pages, outs = (jnp.asarray(blank), jnp.asarray(blank)), []
    for first, last in itertools.pairwise(cuts):
        slots = np.arange(pad, dtype=np.int32) % block
        slots[: last - first] = whole.batch.write_slots[first:last]
        batch = PagedBatch(
            whole.batch.block_tables,
            np.array([last], np.int32),
            slots,
            np.array([0, last - first], np.int32),
            np.int32(last - first == 1),
        )
        padded = [np.resize(x[first:last], (pad, *x.shape[1:])) for x in (whole.q, k, v)]
        pages, out = step(*padded, pages, batch)
        outs.append(np.asarray(out)[: last - first])
    assert relative_error(np.concatenate(outs), np.asarray(one_shot)) < 1e-6


def test_mixed_equals_decode_and_prefill_apart() -> None:
    rng = fresh_rng()
    lengths, queries, num_decode = [33, 1, 200, 70, 90], [1, 1, 1, 70, 30], 3
    case = make_case(rng, lengths, queries, num_decode=num_decode, rows=110)
    both = np.asarray(run(*case.args[:4], scale=case.scale))
    tables, kv_lengths, slots, starts, _ = case.batch
    decode = PagedBatch(tables[:3], kv_lengths[:3], slots[:3])
    prefill = PagedBatch(tables[3:], kv_lengths[3:], slots[3:], starts[3:] - 3, np.int32(0))
    first = run(case.q[:3], case.k_pages, case.v_pages, decode, scale=case.scale)
    rest = run(case.q[3:], case.k_pages, case.v_pages, prefill, scale=case.scale)
    assert relative_error(both, np.concatenate([first, rest])) < 1e-6


def test_the_oracle_is_textbook_attention() -> None:
    """Against JAX's own dot_product_attention over a contiguous cache, which knows nothing of pages."""
    rng = fresh_rng()
    for lengths, queries in (([37, 5], None), ([37, 21], [12, 21])):
        case = make_case(rng, lengths, queries)
        got = np.asarray(
            jax.jit(partial(paged_attention, backend="oracle"), static_argnames=("scale",))(
                *case.args[:4], scale=case.scale
            )
        )
        starts = [0, 1, 2] if queries is None else case.batch.query_starts
        for r, length in enumerate(lengths):
            rows = slice(starts[r], starts[r + 1])
            k, v = (
                p[case.batch.block_tables[r]].swapaxes(1, 2).reshape(-1, *p.shape[1::2])[:length]
                for p in (case.k_pages, case.v_pages)
            )
            position = np.arange(length - (rows.stop - rows.start), length)
            mask = np.arange(length) <= position[:, None]
            want = jax.nn.dot_product_attention(case.q[rows], k, v, mask=mask[None], scale=case.scale)
            assert relative_error(got[rows], np.asarray(want)) < 1e-5
