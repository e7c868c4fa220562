"""How a ragged batch is cut into tiles of query rows: what the kernels for GPUs and TPUs have in common."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import PagedBatch
from pallas_kernels.indexing import gather


class Tiles(NamedTuple):
    """Some neighbouring query rows of one sequence each; i32[I], real ones first, sequence by sequence.

    Attributes:
        sequence: whose rows they are.
        row: the first of them in the batch.
        rows: how many there are; 0: no tile.
        position: of the first row in its sequence.
    """

    sequence: jax.Array
    row: jax.Array
    rows: jax.Array
    position: jax.Array


def arange(n: int) -> jax.Array:
    return lax.iota(jnp.int32, n)


def ceil_div(a: jax.Array, b: int | jax.Array) -> jax.Array:
    """ceil(a / b) of int32, a >= 0, b > 0."""
    b = jnp.asarray(b, jnp.int32)
    return lax.div(a + (b - 1), b)


def cut_tiles(batch: PagedBatch, begin: jax.Array, rows: int, rows_each: int) -> Tiles:
    """Tiles of at most `rows_each` rows of the sequences from `begin` i32[] on; the batch has `rows` rows in all.

    There are `rows / rows_each + R` places for tiles, as many as can be needed.
    """
    starts, lengths = batch.query_starts, batch.kv_lengths
    assert starts is not None
    sequences = lengths.shape[0]
    counts = jnp.where((arange(sequences) >= begin) & (lengths > 0), starts[1:] - starts[:-1], 0)
    tiles = ceil_div(counts, rows_each)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    tile = arange(rows // rows_each + min(sequences, rows))
    sequence = jnp.searchsorted(ends, tile, side="right", method="compare_all").astype(jnp.int32)

    def of_sequence(x: jax.Array) -> jax.Array:
        return gather(x, sequence)

    before = (tile - of_sequence(ends - tiles)) * rows_each  # rows of the sequence before the tile
    real = tile < ends[-1]
    fields = (
        sequence,
        of_sequence(starts[:-1]) + before,
        jnp.minimum(of_sequence(counts) - before, rows_each),
        of_sequence(lengths - counts) + before,
    )
    return Tiles(*(jnp.where(real, x, 0) for x in fields))
