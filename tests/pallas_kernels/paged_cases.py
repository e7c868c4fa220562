"""Random paged batches: shuffled tables, shared blocks, and NaN in every slot that must not be read."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from pallas_kernels import PagedBatch


def fresh_rng() -> np.random.Generator:
    """A new seed each run, printed so that a failure can be repeated."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed = {seed}")
    return np.random.default_rng(seed)


def stored(x: np.ndarray, storage: str) -> np.ndarray:
    """float32 values as a pool of dtype `storage` holds them."""
    if storage == "float32":
        return x.astype(np.float32)
    bits = x.astype(ml_dtypes.bfloat16)
    return bits.view(np.uint16) if storage == "uint16" else bits


@dataclass(frozen=True)
class Case:
    """One call's arguments, in NumPy: q f32[T, Hq, D], pages [N, Hkv, B, D], a batch, and the scale."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    batch: PagedBatch
    scale: float

    @property
    def args(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, PagedBatch, float]:
        return self.q, self.k_pages, self.v_pages, self.batch, self.scale


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
) -> Case:
    """A batch with `lengths` tokens a sequence, of which `queries` are this step's rows (None: decode batch).

    `rows`, `columns` and `blocks` pad the packed rows, the tables and the pool to fixed sizes, so that many
    cases share one compiled program. `heads` is (KV heads, query heads per KV head). `share`: sequences share
    the full blocks of the first one.
    Blocks are handed out in random order; NaN fills block 0, every unused block and every slot past the end.
    """
    kv_heads, group = heads
    needed = [-(-n // block_size) for n in lengths]
    columns = columns or max([1, *needed])
    blocks = blocks or 1 + sum(needed) + 3
    tables = np.zeros((len(lengths), columns), np.int32)
    free = list(rng.permutation(np.arange(1, blocks)))
    full = np.zeros(blocks, np.int32)  # how many slots of each block hold tokens
    for r, length in enumerate(lengths):
        for i in range(needed[r]):
            here = min(block_size, length - i * block_size)
            shared = share and r > 0 and here == block_size and (i + 1) * block_size <= lengths[0]
            tables[r, i] = tables[0, i] if shared else free.pop()
            full[tables[r, i]] = here
        # Entries past the end are valid ids of blocks that must not matter.
        tables[r, needed[r] :] = rng.integers(0, blocks, columns - needed[r])
    live = (np.arange(block_size) < full[:, None])[:, None, :, None]
    shape = (blocks, kv_heads, block_size, head_dim)
    k, v = (np.where(live, size * rng.standard_normal(shape), np.nan) for _ in range(2))

    if queries is None:
        starts, counts = None, [min(1, n) for n in lengths]
        first = list(range(len(lengths)))
        rows = len(lengths)
    else:
        counts = queries
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
    return Case(q, stored(k, storage), stored(v, storage), batch, head_dim**-0.5)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))
