"""The description of one step's batch that every attention backend reads, and its host-side check.

A *row* is one query token of the packed batch; a *sequence* owns some consecutive rows and one row of the
block table. `T` counts rows, `R` sequences, `M` table columns, `N` blocks, `B` tokens per block:

    rows        0    1    2  |  3   4   5   6  |  7   8   9  | 10 ...   T-1
    sequence    0    1    2  |        3        |      4      |  padding
                `- decode -'   `--- prefill chunks, in row order ---'
    num_decode = 3, query_starts = [0, 1, 2, 3, 7, 10]
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np


class PagedBatch(NamedTuple):
    """Where each sequence's KV lives and which rows query it. A pytree: every field is data, none is static.

    Attributes:
        block_tables: i32[R, M], physical block ids in sequence order. Entries past a sequence's last block are
            ids that are valid but never attended to (0 by convention).
        kv_lengths: i32[R], tokens of the sequence in the cache, including those this step writes. 0: empty.
        write_slots: i32[T], `block * B + offset` for each row's K and V. Padding rows point into block 0.
        query_starts: i32[R + 1], sequence r owns rows `query_starts[r]:query_starts[r + 1]`; rows from
            `query_starts[R]` on are padding. None: a decode batch, T == R and row r belongs to sequence r.
        num_decode: i32[], the first `num_decode` sequences own exactly one row each, so that row r is sequence
            r. None with `query_starts`: none is known to be, every sequence is treated as a prefill chunk.
    """

    block_tables: jax.Array
    kv_lengths: jax.Array
    write_slots: jax.Array
    query_starts: jax.Array | None = None
    num_decode: jax.Array | None = None


def check_batch(batch: PagedBatch, num_blocks: int, block_size: int) -> None:
    """Checks the *values* of a batch on the host; for tests and debugging, never inside a jitted step.

    The jitted functions check shapes and dtypes only: they cannot raise on data. This fetches the arrays and
    raises `ValueError` naming the first broken rule of `PagedBatch`.
    """
    tables, lengths, slots = (np.asarray(x) for x in batch[:3])
    sequences, columns = tables.shape
    rows = len(slots)
    if lengths.min(initial=0) < 0 or lengths.max(initial=0) > columns * block_size:
        raise ValueError(
            f"kv_lengths must be in 0..{columns * block_size} ({columns} table columns x {block_size} tokens), "
            f"got {lengths.min()}..{lengths.max()}"
        )
    if tables.min(initial=0) < 0 or tables.max(initial=0) >= num_blocks:
        raise ValueError(f"block_tables must hold ids in 0..{num_blocks - 1}, got {tables.min()}..{tables.max()}")
    if slots.min(initial=0) < 0 or slots.max(initial=0) >= num_blocks * block_size:
        raise ValueError(f"write_slots must be in 0..{num_blocks * block_size - 1}, got {slots.min()}..{slots.max()}")
    used = np.arange(columns) < -(-lengths[:, None] // block_size)
    if (tables[used] == 0).any():
        bad = int(np.argwhere(used & (tables == 0))[0, 0])
        raise ValueError(f"block_tables: sequence {bad} reads block 0, which is the null block")

    if batch.query_starts is None:
        if batch.num_decode is not None:
            raise ValueError("num_decode must be None when query_starts is None (a decode batch)")
        if rows != sequences:
            raise ValueError(f"a decode batch has one row a sequence: got {rows} rows, {sequences} sequences")
        starts = np.arange(sequences + 1)
        queries = np.minimum(1, lengths)
    else:
        starts = np.asarray(batch.query_starts)
        queries = np.diff(starts)
        if starts[0] != 0 or (queries < 0).any() or starts[-1] > rows:
            raise ValueError(f"query_starts must rise from 0 to at most {rows}, got {starts.tolist()}")
        num_decode = 0 if batch.num_decode is None else int(batch.num_decode)
        if not 0 <= num_decode <= sequences or (queries[:num_decode] != 1).any():
            raise ValueError(
                f"num_decode={num_decode}: that many first sequences must own exactly one row each, "
                f"query counts are {queries.tolist()}"
            )
        queries[:num_decode] = np.minimum(1, lengths[:num_decode])
    if (queries > lengths).any():
        bad = int(np.argmax(queries > lengths))
        raise ValueError(
            f"kv_lengths: sequence {bad} has {queries[bad]} rows but only {lengths[bad]} tokens in the cache"
        )

    expected = np.zeros(rows, np.int64)  # the block each row must write to; 0 for padding
    for r in range(sequences):
        for i in range(queries[r]):
            position = lengths[r] - queries[r] + i
            row = starts[r] + i
            expected[row] = tables[r, position // block_size]
            if slots[row] != expected[row] * block_size + position % block_size:
                raise ValueError(
                    f"write_slots: row {row} is position {position} of sequence {r}, slot "
                    f"{expected[row] * block_size + position % block_size}; got {slots[row]}"
                )
    stray = (expected == 0) & (slots >= block_size)
    if stray.any():
        raise ValueError(f"write_slots: padding row {int(np.argmax(stray))} points outside block 0")
