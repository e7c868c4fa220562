"""`paged_attention` against the oracle: every backend, head layout, page dtype, length, mixture of rows and option."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from paged_cases import Case, attend, fresh_rng, make_case, make_pages, relative_error, widen

from pallas_kernels import KVPages, PagedBatch, available_backends, check_batch, paged_attention, write_kv
from pallas_kernels.oracle import reference_attention
from pallas_kernels.xla import decode, prefill

TRITON, TPU = ("triton_interpreted",), ("tpu_interpreted",)  # kernels for other devices, on XLA's operations
BOTH = TRITON + TPU
each_backend = pytest.mark.parametrize("backend", (*available_backends(), *BOTH))
each_quick_backend = pytest.mark.parametrize("backend", available_backends())


@dataclass(frozen=True)
class Shape:
    """One compiled shape: (KV heads, queries per KV head), sizes, the longest sequence in blocks, and options."""

    heads: tuple[int, int]
    head_dim: int
    block_size: int
    storage: str
    columns: int = 40
    query: type = np.float32
    options: dict[str, Any] = field(default_factory=dict)
    interpreted: tuple[str, ...] = ()  # kernels that it is run on too, interpreted, which take seconds to compile

    def __str__(self) -> str:
        kv_heads, group = self.heads
        options = "-".join(name if value is True else f"{name}{value}" for name, value in self.options.items())
        query = "" if self.query is np.float32 else f"-q-{self.query.__name__}"
        return f"{kv_heads}x{group}x{self.head_dim}-block{self.block_size}-{self.storage}{query}-{options or 'plain'}"

    @property
    def bound(self) -> float:
        """Relative error. Quantised pages are exact here: the oracle reads the same stored numbers."""
        exact = self.query is np.float32 and self.storage in ("float32", "int8", "uint8", "float8_e4m3fn")
        return 1e-5 if exact else 5e-3


BF16, F16 = ml_dtypes.bfloat16, np.float16
EVERY_OPTION = dict(window=24, soft_cap=3.0, sinks=True, return_lse=True)
# Each page dtype, head size, query dtype and option is there more than once, each pair of options at least once.
SHAPES = [
    Shape((3, 3), 64, 16, "float32"),
    Shape((3, 3), 64, 16, "uint16"),
    Shape((3, 3), 64, 16, "uint16", query=BF16),
    Shape((1, 9), 80, 8, "float32", options=dict(sinks=True, return_lse=True), interpreted=BOTH),
    Shape((2, 2), 128, 32, "float32", columns=20, options=dict(window=7)),
    Shape((1, 4), 128, 16, "uint16", options=dict(window=40, return_lse=True)),
    Shape((4, 1), 80, 16, "bfloat16", options=dict(soft_cap=1.5)),
    Shape((2, 1), 8, 4, "uint16", columns=150, options=dict(window=9, sinks=True)),
    Shape((2, 4), 8, 1, "float32", columns=300, options=dict(window=5, soft_cap=2.0), interpreted=TRITON),
    Shape((2, 3), 96, 16, "int8"),
    Shape((2, 4), 32, 16, "int8", query=BF16, options=EVERY_OPTION, interpreted=TRITON),
    Shape((2, 4), 128, 16, "bfloat16", query=BF16, interpreted=BOTH),
    Shape((4, 1), 64, 8, "int8", options=dict(window=10**6, return_lse=True)),
    Shape((2, 2), 192, 16, "uint8", options=dict(window=17, sinks=True, return_lse=True), interpreted=TRITON),
    Shape((2, 2), 64, 16, "uint8", query=BF16),
    Shape((1, 2), 96, 16, "float8_e4m3fn", options=dict(soft_cap=1.5, return_lse=True), interpreted=TRITON),
    Shape((1, 8), 256, 16, "float16", query=F16, options=dict(window=50, soft_cap=2.0), interpreted=TRITON),
    Shape((4, 1), 32, 16, "float16", options=dict(soft_cap=2.0, sinks=True)),
    Shape((1, 1), 256, 16, "float32", columns=12),
    Shape((2, 3), 96, 128, "int8", columns=8, query=BF16, options=EVERY_OPTION, interpreted=TPU),
    Shape((1, 2), 192, 128, "float8_e4m3fn", columns=8, options=dict(soft_cap=2.0), interpreted=TPU),
]
SEQUENCES, ROWS = 11, 160
CHUNKED = [("float32", None), ("uint16", None), ("int8", 37)]
each_shape = pytest.mark.parametrize(
    ("shape", "backend"),
    [(shape, backend) for shape in SHAPES for backend in available_backends()]
    + [(shape, backend) for shape in SHAPES for backend in shape.interpreted],
    ids=str,
)


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
        **shape.options,
        **options,
    )
    check_batch(case.batch, len(case.pages.k), shape.block_size)
    return replace(case, q=case.q.astype(shape.query))


def check(case: Case, backend: str, bound: float) -> None:
    """Runs the case and compares it with the oracle."""
    out, lse = attend(case, backend)
    assert out.dtype == case.q.dtype and out.shape == case.q.shape
    got = np.asarray(out).astype(np.float32)
    want, want_lse = reference_attention(*case.args)
    assert np.isfinite(got).all()
    assert relative_error(got, want) <= bound
    seen = np.isfinite(want_lse).all(axis=1)
    assert (got[~seen] == 0).all(), "padding rows and rows of empty sequences are zeros"
    # A row may not hide behind the others: each on its own is as right.
    errors = np.linalg.norm(got - want, axis=(1, 2))[seen] / np.linalg.norm(want, axis=(1, 2))[seen]
    assert errors.max(initial=0) <= 4 * bound
    if case.spec.return_lse:
        assert lse is not None and lse.dtype == jnp.float32 and lse.shape == case.q.shape[:2]
        np.testing.assert_allclose(lse, want_lse, rtol=bound, atol=bound)
    else:
        assert lse is None


@each_shape
def test_decode(shape: Shape, backend: str) -> None:
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
        check(build(rng, shape, lengths, share=share), backend, shape.bound)


@each_shape
def test_mixed(shape: Shape, backend: str) -> None:
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
        check(build(rng, shape, lengths, queries, num_decode=num_decode), backend, shape.bound)
    for _ in range(3):
        num_decode = int(rng.integers(0, 6))
        queries = [1] * num_decode + rng.integers(0, 40, 4).tolist()
        lengths = [n + int(rng.integers(0, longest // 5 - min(40, longest // 8))) for n in queries]
        lengths = [length if n else 0 for length, n in zip(lengths, queries, strict=True)]
        check(build(rng, shape, lengths, queries, num_decode=num_decode, share=True), backend, shape.bound)


@each_backend
def test_more_sequences_than_rows(backend: str) -> None:
    """The slots of a large engine in a step of few tokens."""
    rng = fresh_rng()
    lengths, queries = [17, 3, 40] + [0] * 20, [1, 1, 6] + [0] * 20
    case = make_case(rng, lengths, queries, num_decode=2, rows=8, return_lse=True)
    check_batch(case.batch, len(case.pages.k), 16)
    check(case, backend, 1e-5)


@pytest.mark.parametrize("queries", [None, [1, 30]], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    ("storage", "options"),
    [("bfloat16", {}), ("float8_e4m3fn", dict(window=20, soft_cap=2.0, sinks=True, return_lse=True))],
    ids=["plain", "all options"],
)
def test_xla_lowers_for_every_platform(storage: str, options: dict[str, Any], queries: list[int] | None) -> None:
    case = make_case(fresh_rng(), [20, 30], queries, num_decode=1, storage=storage, **options)
    arrays = case.q, case.pages, case.batch, case.sinks
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), arrays)
    options = {name: value for name, value in options.items() if name != "sinks"}
    step = jax.jit(
        lambda q, pages, batch, sinks: paged_attention(
            q, pages, batch, sinks=sinks, scale=case.spec.scale, backend="xla", **options
        )
    )
    exported = jax.export.export(step, platforms=("cpu", "cuda", "tpu"))(*shapes)
    assert exported.platforms == ("cpu", "cuda", "tpu")


@pytest.mark.parametrize("backend", (*available_backends(), *TRITON))
def test_large_scores_do_not_overflow(backend: str) -> None:
    """Scores in the thousands: their own float32 rounding, about 1e-4, is what the softmax then amplifies."""
    rng = fresh_rng()
    options = dict(size=30.0, sinks=True, return_lse=True)
    for case in (make_case(rng, [300, 40, 1], **options), make_case(rng, [300, 40, 1], [200, 7, 1], **options)):
        got, lse = (np.asarray(x) for x in attend(case, backend))
        assert np.isfinite(got).all() and np.isfinite(lse).all()
        want, want_lse = reference_attention(*case.args)
        assert relative_error(got, want) < 1e-3
        # A score near 0 is a sum of terms in the thousands, which leave it their rounding: 2 ** -23 of 8,192.
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("where", "backend"),
    [
        *itertools.product(["q", "k", "v", "k_scales", "v_scales"], available_backends()),
        *[("v", "triton_interpreted"), ("v_scales", "triton_interpreted"), ("q", "tpu_interpreted")],
    ],
)
def test_a_nan_stays_in_its_own_sequence(where: str, backend: str) -> None:
    """A broken request must not harm its neighbours in the batch."""
    rng = fresh_rng()
    storage = "int8" if "scales" in where else "float32"
    for case in (
        make_case(rng, [20, 300, 40, 9], storage=storage),
        make_case(rng, [20, 300, 40, 9], [1, 1, 30, 9], num_decode=2, storage=storage),
    ):
        good, _ = attend(case, backend)
        poisoned = (case.q if where == "q" else getattr(case.pages, where)).copy()
        poisoned[1 if where == "q" else case.batch.block_tables[1, 0]] = np.nan
        bad, _ = attend(case.with_values(**{where: poisoned}), backend)
        assert np.isnan(bad[1]).any()
        np.testing.assert_array_equal(np.delete(bad, 1, axis=0), np.delete(good, 1, axis=0))


@pytest.mark.parametrize(
    ("storage", "window", "backend"),
    [(*options, backend) for options in CHUNKED for backend in available_backends()]
    + [("float32", None, backend) for backend in BOTH],
)
def test_chunked_prefill_equals_one_shot(storage: str, window: int | None, backend: str) -> None:
    """A prompt written and attended to chunk by chunk, cut anywhere, the last tokens as decode steps."""
    rng = fresh_rng()
    length, block, columns, heads, head_dim = 150, 16, 12, (2, 3), 64
    whole = make_case(rng, [length], [length], columns=columns, heads=heads, storage=storage)
    k, v = rng.standard_normal((2, length, heads[0], head_dim)).astype(np.float32)
    shape = whole.pages.k.shape
    blank = widen(make_pages(np.zeros(shape), np.zeros(shape), storage, np.ones((shape[0], block), bool)), backend)

    @jax.jit
    def step(q: Any, k: Any, v: Any, pages: KVPages, batch: PagedBatch) -> tuple[KVPages, jax.Array]:
        pages = write_kv(pages, k, v, batch.write_slots, backend=backend)
        return pages, paged_attention(q, pages, batch, scale=whole.spec.scale, window=window, backend=backend)

    _, one_shot = step(whole.q, k, v, blank, whole.batch)
    pad = 64
    cuts = np.sort(rng.choice(np.arange(1, 140), 6, replace=False)).tolist()
    cuts = sorted({*cuts, *range(0, 145, pad), 145, *range(145, length + 1)})
    pages, outs = jax.tree.map(jnp.asarray, blank), []
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


@each_quick_backend
def test_mixed_equals_decode_and_prefill_apart(backend: str) -> None:
    rng = fresh_rng()
    lengths, queries, num_decode = [33, 1, 200, 70, 90], [1, 1, 1, 70, 30], 3
    case = make_case(rng, lengths, queries, num_decode=num_decode, rows=110)
    both, _ = attend(case, backend)
    tables, kv_lengths, slots, starts, _ = case.batch
    decode = PagedBatch(tables[:3], kv_lengths[:3], slots[:3])
    prefill = PagedBatch(tables[3:], kv_lengths[3:], slots[3:], starts[3:] - 3, np.int32(0))
    first, _ = attend(case.with_values(q=case.q[:3], batch=decode), backend)
    rest, _ = attend(case.with_values(q=case.q[3:], batch=prefill), backend)
    assert relative_error(both, np.concatenate([first, rest])) < 1e-6


@each_quick_backend
def test_parts_of_a_sequence_join_by_their_lse(backend: str) -> None:
    """Why one asks for the LSE: attention over two halves of the keys, weighted by exp(lse), is that over all."""
    rng = fresh_rng()
    near, length = 32, 100  # the last `near` keys are also what a window sees
    whole = make_case(rng, [length], return_lse=True)
    blocks = whole.batch.block_tables
    parts = [
        replace(whole, spec=replace(whole.spec, window=near)),
        whole.with_values(batch=whole.batch._replace(kv_lengths=np.array([length - near], np.int32))),
    ]
    assert blocks.shape == (1, 7)
    outs, lses = zip(*(attend(part, backend) for part in parts), strict=True)
    weights = jax.nn.softmax(jnp.stack(lses), axis=0)
    out, lse = attend(whole, backend)
    assert relative_error(sum(w[..., None] * o for w, o in zip(weights, outs, strict=True)), out) < 1e-5
    np.testing.assert_allclose(jnp.logaddexp(*lses), lse, rtol=1e-5)


@pytest.mark.parametrize("queries", [None, [40]], ids=["decode", "prefill"])
def test_work_of_xla_grows_with_the_window(queries: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the tiles that are attended to, where both ends of a window lie anywhere on a page."""
    for module in (decode, prefill):

        def counting(*args: Any, real=module.attend_tile) -> Any:
            jax.debug.callback(lambda: tiles.append(1))
            return real(*args)

        monkeypatch.setattr(module, "attend_tile", counting)
    columns, needed = 123, []  # a number of columns that no other test compiles for
    for length, window in [(1900, None), (1900, 33), (1901, 33), (1930, 33), (40, 33)]:
        tiles: list[int] = []
        case = make_case(fresh_rng(), [length], queries, columns=columns, window=window)
        jax.block_until_ready(attend(case, "xla"))
        jax.effects_barrier()
        needed.append(len(tiles))
    assert needed[0] >= (10 if queries else 2)
    assert max(needed[1:]) <= (4 if queries else 1)


def test_the_oracle_is_textbook_attention() -> None:
    """Against JAX's own dot_product_attention over a contiguous cache, which knows nothing of pages."""
    rng = fresh_rng()
    for lengths, queries, window in (([37, 5], None, None), ([37, 21], [12, 21], None), ([37, 21], [12, 21], 9)):
        case = make_case(rng, lengths, queries, window=window)
        got, _ = attend(case, "oracle")
        starts = [0, 1, 2] if queries is None else case.batch.query_starts
        for r, length in enumerate(lengths):
            rows = slice(starts[r], starts[r + 1])
            k, v = (
                np.nan_to_num(p[case.batch.block_tables[r]].swapaxes(1, 2).reshape(-1, *p.shape[1::2])[:length])
                for p in case.pages[:2]
            )
            position = np.arange(length - (rows.stop - rows.start), length)[:, None]
            mask = np.arange(length) <= position
            if window is not None:
                mask &= np.arange(length) > position - window
            want = jax.nn.dot_product_attention(case.q[rows], k, v, mask=mask[None], scale=case.spec.scale)
            assert relative_error(got[rows], np.asarray(want)) < 1e-5


def test_the_oracle_with_soft_cap_and_sink_by_hand() -> None:
    """One query, two keys of one number each: the formulas written out."""
    k = np.array([2.0, -1.0]).reshape(1, 1, 2, 1)
    v = np.array([10.0, 20.0]).reshape(1, 1, 2, 1)
    pages = KVPages(*(np.concatenate([np.zeros_like(x), x]).astype(np.float32) for x in (k, v)))
    batch = PagedBatch(np.array([[1]], np.int32), np.array([2], np.int32), np.array([3], np.int32))
    q, sink = np.full((1, 1, 1), 3.0, np.float32), np.array([0.5], np.float32)
    out, lse = paged_attention(q, pages, batch, scale=0.5, soft_cap=4.0, sinks=sink, return_lse=True, backend="oracle")
    first, second = (np.exp(4.0 * np.tanh(s / 4.0)) for s in (3.0, -1.5))
    total = first + second + np.exp(0.5)
    np.testing.assert_allclose(out.item(), (10 * first + 20 * second) / total, rtol=1e-6)
    np.testing.assert_allclose(lse.item(), np.log(total), rtol=1e-6)
