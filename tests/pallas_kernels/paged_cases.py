"""Random paged batches: shuffled tables, shared blocks, and NaN in every slot that must not be read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import AttentionSpec, KVPages, PagedBatch, paged_attention

STORAGES = ("float32", "float16", "bfloat16", "uint16", "int8", "float8_e4m3fn", "uint8")
CPU_STORAGES = ("float32", "float16", "uint16", "int8", "uint8")
LARGEST = {"int8": 127, "float8_e4m3fn": 448, "uint8": 448}  # of the numbers stored in quantised pages
_HELD = {  # what a pool's numbers are, before they are taken as bits
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "uint16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "uint8": np.dtype(ml_dtypes.float8_e4m3fn),
}


def fresh_rng() -> np.random.Generator:
    """A new seed each run, printed so that a failure can be repeated."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed = {seed}")
    return np.random.default_rng(seed)


def stored(x: np.ndarray, storage: str) -> tuple[np.ndarray, np.ndarray | None]:
    """float32 values [..., D] as a pool of dtype `storage` holds them, and their scales f32[...] if it is quantised."""
    held = _HELD[storage]
    scales = None
    x = x.astype(np.float32)
    if storage in LARGEST:
        scales = np.abs(x).max(axis=-1) / np.float32(LARGEST[storage])
        x = x / np.where(scales == 0, np.float32(1), scales)[..., None]
        x = np.clip(np.rint(x) if storage == "int8" else x, -LARGEST[storage], LARGEST[storage])
    x = x.astype(held)
    return (x.view(storage) if storage in ("uint16", "uint8") else x), scales


def values(pool: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """The inverse of `stored`: f32[..., D]."""
    x = np.asarray(pool).view(_HELD[np.asarray(pool).dtype.name]).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return x if scales is None else x * np.asarray(scales)[..., None]


def make_pages(k: np.ndarray, v: np.ndarray, storage: str, dead: np.ndarray) -> KVPages:
    """Pages of f32[N, Hkv, B, D] with the worst that can be stored in the slots that are dead bool[N, B]."""
    pools: list[Any] = []
    for x in (k, v):
        pool, scales = stored(x, storage)
        worst = np.full(1, 113, np.int8) if storage == "int8" else np.full(1, np.nan).astype(_HELD[storage])
        pool = np.where(dead[:, None, :, None], worst.view(pool.dtype), pool)
        pools.append((pool, None if scales is None else np.where(dead[:, None], np.float32(np.nan), scales)))
    (k, k_scales), (v, v_scales) = pools
    return KVPages(k, v, k_scales, v_scales)


@dataclass(frozen=True)
class Case:
    """One call's arguments, in NumPy: q [T, Hq, D], pages [N, Hkv, B, D], a batch, the options."""

    q: np.ndarray
    pages: KVPages
    batch: PagedBatch
    spec: AttentionSpec
    sinks: np.ndarray | None = None

    @property
    def args(self) -> tuple[np.ndarray, KVPages, PagedBatch, AttentionSpec, np.ndarray | None]:
        """What the oracle takes."""
        return self.q, self.pages, self.batch, self.spec, self.sinks

    def with_values(self, **changes: Any) -> Case:
        """With other arrays; k, v, k_scales, v_scales are those of the pages."""
        pages = {name: changes.pop(name) for name in KVPages._fields if name in changes}
        return replace(self, pages=self.pages._replace(**pages), **changes)


@partial(jax.jit, static_argnames=("spec", "backend"))
def _attend(q: Any, pages: Any, batch: Any, sinks: Any, spec: AttentionSpec, backend: str) -> Any:
    options = dict(scale=spec.scale, window=spec.window, soft_cap=spec.soft_cap, return_lse=spec.return_lse)
    return paged_attention(q, pages, batch, sinks=sinks, backend=backend, **options)


def widen(pages: KVPages, backend: str) -> KVPages:
    """The pages as `init_pages` lays them out for the backend: on TPUs 128 columns wide, filled up with zeros."""
    if not backend.startswith("tpu"):
        return pages
    spare = ((0, 0), (0, 0), (0, 0), (0, -pages.k.shape[3] % 128))
    return pages._replace(k=np.pad(pages.k, spare), v=np.pad(pages.v, spare))


def attend(case: Case, backend: str) -> tuple[jax.Array, jax.Array | None]:
    """(out, lse or None) of a jitted call."""
    result = _attend(case.q, widen(case.pages, backend), case.batch, case.sinks, case.spec, backend)
    return result if case.spec.return_lse else (result, None)


def make_case(
    rng: np.random.Generator,
    lengths: list[int],
    queries: list[int] | None = None,
    *,
    num_decode: int = 0,
    rows: int | None = None,
    columns: int | None = None,
    blocks: int | None = None,
    heads: tuple[int, int] = (2, 3),
    head_dim: int = 64,
    block_size: int = 16,
    storage: str = "float32",
    share: bool = False,
    size: float = 1.0,
    sinks: bool = False,
    **options: Any,
) -> Case:
    """A batch with `lengths` tokens a sequence, of which `queries` are this step's rows (None: decode batch).

    `rows`, `columns` and `blocks` pad the packed rows, the tables and the pool to fixed sizes, so that many
    cases share one compiled program. `heads` is (KV heads, query heads per KV head). `share`: sequences share
    the full blocks of the first one. `options`: of AttentionSpec.
    Blocks are handed out in random order; NaN fills block 0, every unused block, every slot past the end, and
    every slot before the windows of all its sequence's rows.
    """
    kv_heads, group = heads
    spec = AttentionSpec(**{"scale": head_dim**-0.5, **options})
    needed = [-(-n // block_size) for n in lengths]
    columns = columns or max([1, *needed])
    blocks = blocks or 1 + sum(needed) + 3
    counts = [min(1, n) for n in lengths] if queries is None else queries
    tables = np.zeros((len(lengths), columns), np.int32)
    free = list(rng.permutation(np.arange(1, blocks)))
    dead = np.ones((blocks, block_size), bool)
    for r, length in enumerate(lengths):
        begin = 0 if spec.window is None else max(0, length - counts[r] - spec.window + 1)
        for i in range(needed[r]):
            full = (i + 1) * block_size <= min(length, lengths[0])
            tables[r, i] = tables[0, i] if share and r > 0 and full else free.pop()
            position = i * block_size + np.arange(block_size)
            dead[tables[r, i]] &= (position < begin) | (position >= length)
        # Entries past the end are valid ids of blocks that must not matter.
        tables[r, needed[r] :] = rng.integers(0, blocks, columns - needed[r])
    shape = (blocks, kv_heads, block_size, head_dim)
    k, v = size * rng.standard_normal((2, *shape))

    if queries is None:
        starts = None
        first = list(range(len(lengths)))
        rows = len(lengths)
    else:
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        first = list(starts[:-1])
        rows = rows or int(starts[-1])
    slots = rng.integers(0, block_size, rows).astype(np.int32)
    for r, (start, count) in enumerate(zip(first, counts, strict=True)):
        position = np.arange(lengths[r] - count, lengths[r])
        if lengths[r]:
            slots[start : start + count] = tables[r, position // block_size] * block_size + position % block_size
    batch = PagedBatch(
        tables,
        np.array(lengths, np.int32),
        slots,
        starts,
        None if queries is None else np.int32(num_decode),
    )
    q = size * rng.standard_normal((rows, kv_heads * group, head_dim)).astype(np.float32)
    logits = (2 * size * rng.standard_normal(kv_heads * group)).astype(np.float32) if sinks else None
    return Case(q, make_pages(k, v, storage, dead), batch, spec, logits)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def bits(x: Any) -> np.ndarray:
    """The array's bytes, so that NaN equals NaN and -0 does not equal 0."""
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


def assert_same(got: KVPages, want: KVPages) -> None:
    """Bit for bit; scales to the last bit but one, for division by a constant may be done as a product."""
    for g, w in zip(got[:2], want[:2], strict=True):
        np.testing.assert_array_equal(bits(g), bits(w))
    for g, w in zip(got[2:], want[2:], strict=True):
        assert (g is None) == (w is None)
        if g is not None and w is not None:
            np.testing.assert_allclose(g, w, rtol=2e-7)


def on_device(pages: KVPages) -> KVPages:
    return jax.tree.map(jnp.asarray, pages)


def beyond_block_0(pages: KVPages) -> KVPages:
    """What may be read: whether padding rows are stored in block 0 is the backend's affair."""
    return jax.tree.map(lambda pool: pool[1:], pages)
