"""The kernel benchmark's points: the work they are, their arrays on the device, what the oracle says of some rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_attention import Work

from pallas_kernels import AttentionSpec, KVPages, PagedBatch, storage_dtype
from pallas_kernels.oracle import reference_attention
from pallas_kernels.storage import from_storage, to_storage

KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128  # Llama 3 8B's
HEADS = KV_HEADS * GROUP
SCALE = HEAD_DIM**-0.5
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # of keys and values, bfloat16
CACHES = 256 << 20  # bytes of KV that no device's caches keep from one call to the next
MOST_LAYERS = 8


@dataclass(frozen=True)
class Point:
    """Work over pages of one block size."""

    work: Work
    block_size: int

    @property
    def kind(self) -> str:
        return "prefill" if self.work.new else "decode"

    @property
    def rows(self) -> int:
        return self.work.sequences * (self.work.new or 1)

    @property
    def kv_tokens(self) -> int:
        return self.work.sequences * self.work.tokens

    @property
    def layers(self) -> int:
        """Layers with KV of their own that a call goes through: enough that memory is read, as in a model."""
        return min(MOST_LAYERS, max(1, -(-CACHES // (self.kv_tokens * TOKEN_BYTES))))

    @property
    def bytes(self) -> int:
        """That one layer must read and write: KV once, queries and outputs."""
        return self.kv_tokens * TOKEN_BYTES + 2 * self.rows * HEADS * HEAD_DIM * 2

    @property
    def flops(self) -> int:
        """Of one layer's two products, over the keys that each row sees."""
        offset, new = self.work.offset, self.work.new
        seen = offset * new + new * (new + 1) // 2 if new else self.work.tokens
        return 4 * HEADS * HEAD_DIM * self.work.sequences * seen


class Shapes:
    """A point's arrays without content, as a platform stores them: to compile for it.

    Attributes:
        q: [T, Hq, D], bfloat16.
        batch: PagedBatch.
        layers: KVPages of each layer.
    """

    def __init__(self, point: Point, platform: str) -> None:
        work, block = point.work, point.block_size
        columns = -(-work.tokens // block)
        self.point = point
        self.q = _shape((point.rows, HEADS, HEAD_DIM), jnp.bfloat16)
        tables, lengths, rows = ((work.sequences, columns), (work.sequences,), (point.rows,))
        self.batch = PagedBatch(*(_shape(shape, jnp.int32) for shape in (tables, lengths, rows)))
        if work.new:
            starts = _shape((work.sequences + 1,), jnp.int32)
            self.batch = self.batch._replace(query_starts=starts, num_decode=_shape((), jnp.int32))
        pool = (work.sequences * columns + 1, KV_HEADS, block, HEAD_DIM)
        pages = KVPages(*(_shape(pool, storage_dtype("bfloat16", platform)) for _ in "kv"))
        self.layers = [pages] * point.layers


class Arrays:
    """A point's arrays: random queries, keys and values, tables in random order. Made on the device; attributes as
    those of `Shapes`."""

    def __init__(self, point: Point, seed: int) -> None:
        work, block = point.work, point.block_size
        shapes = Shapes(point, jax.default_backend())
        self.point = point
        self.rng = np.random.default_rng(seed)
        columns = -(-work.tokens // block)
        order = 1 + self.rng.permutation(work.sequences * columns)
        tables = order.astype(np.int32).reshape(work.sequences, columns)
        batch = PagedBatch(tables, np.full(work.sequences, work.tokens, np.int32), np.zeros(point.rows, np.int32))
        if work.new:
            starts = np.arange(work.sequences + 1, dtype=np.int32) * work.new
            batch = batch._replace(query_starts=starts, num_decode=np.int32(0))
        self.batch = jax.tree.map(jnp.asarray, batch)
        keys = iter(jax.random.split(jax.random.key(seed), 1 + 2 * point.layers))
        self.q, self.layers = jax.tree.map(lambda x: _draw(next(keys), x.shape, x.dtype), (shapes.q, shapes.layers))

    @cached_property
    def contiguous(self) -> list[tuple[jax.Array, jax.Array]]:
        """Each layer's (k, v) [R, S, Hkv, D], bfloat16."""
        tables, tokens = self.batch.block_tables, self.point.work.tokens
        return [(_line_up(x.k, tables, tokens), _line_up(x.v, tables, tokens)) for x in self.layers]

    def sample(self, most_keys: int = 1 << 15, most_rows: int = 8) -> np.ndarray:
        """Some rows: the last one, then random ones while all of them see at most so many keys."""
        positions = self._positions()
        order = np.concatenate([[len(positions) - 1], self.rng.permutation(len(positions) - 1)])
        keys = np.cumsum(1 + positions[order])
        return order[: max(1, min(most_rows, int((keys <= most_keys).sum())))]

    def expect(self, rows: np.ndarray) -> np.ndarray:
        """The first layer's output f32[n, Hq, D] for these rows, by the oracle: each is a decode row of its own."""
        work, block = self.point.work, self.point.block_size
        positions = self._positions()[rows]
        tables = np.asarray(self.batch.block_tables)[rows // (work.new or 1)]
        used = np.arange(tables.shape[1]) <= positions[:, None] // block
        blocks, local = np.unique(np.where(used, tables, tables[0, 0]), return_inverse=True)
        pages = jax.tree.map(lambda pool: np.asarray(pool[blocks]), self.layers[0])
        batch = PagedBatch(local.reshape(tables.shape), positions + 1, np.zeros(len(rows), np.int32))
        return reference_attention(np.asarray(self.q[rows]), pages, batch, AttentionSpec(SCALE))[0]

    def _positions(self) -> np.ndarray:
        """i64[T], each row's position in its sequence."""
        work = self.point.work
        return np.tile(work.tokens - (work.new or 1) + np.arange(work.new or 1), work.sequences)


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm over norm; NaN if anything found is."""
    return float(np.linalg.norm(found.astype(np.float32) - expected) / np.linalg.norm(expected))


@partial(jax.jit, static_argnames=("shape", "stored"))
def _draw(key: jax.Array, shape: tuple[int, ...], stored: np.dtype) -> jax.Array:
    """Normal numbers, as pages of this dtype hold bfloat16."""
    return to_storage(jax.random.normal(key, shape, jnp.bfloat16), stored)


@partial(jax.jit, static_argnames="tokens")
def _line_up(pool: jax.Array, tables: jax.Array, tokens: int) -> jax.Array:
    """[N, Hkv, B, D] by tables i32[R, M] -> bfloat16 [R, tokens, Hkv, D]."""
    rows = pool.at[tables].get(mode="promise_in_bounds").swapaxes(2, 3)
    return from_storage(rows, jnp.dtype(jnp.bfloat16)).reshape(len(tables), -1, *rows.shape[3:])[:, :tokens]
