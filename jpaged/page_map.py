"""A picture of the paging at one moment: the state of every physical block, and the block table of every sequence.

It is read from the device between two steps, so it waits for the step under way: look a few times a second, not at
every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jpaged.engine import Engine

NULL, FREE, CACHED = "0", ".", "c"  # a block's state; in use by sequences: their number, "1" to "9", from 10 on "+"
MANY = "+"


@dataclass(frozen=True)
class SequenceMap:
    """A sequence that owns blocks. `request_id` and what follows are None for one that has just ended."""

    slot: int
    blocks: list[int]  # physical ids, in the order of its tokens; 0 where a sliding window has left it behind
    tokens: int  # in the cache
    request_id: str | None = None
    index: int | None = None  # among the outputs of its prompt
    status: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt, found in the cache
    output_tokens: int | None = None


@dataclass(frozen=True)
class PageMap:
    states: str  # a character a block
    sequences: list[SequenceMap]  # by slot


def take_page_map(engine: Engine) -> PageMap:
    """Read an engine's map, in its thread."""
    state, size = engine.runner.state, engine.config.block_size
    # Copies: a view would keep the buffers from being given on to the next step.
    refcount, held = np.array(state.pool.refcount), np.array(state.named.held)
    tables, lengths = np.array(state.tables.blocks), np.array(state.tables.length)
    sequences = []
    for slot in np.flatnonzero(lengths).tolist():
        blocks = tables[slot, : -(-int(lengths[slot]) // size)].tolist()
        request = engine.scheduler.running.get(slot)
        if request is None:
            sequences.append(SequenceMap(slot, blocks, int(lengths[slot])))
            continue
        sequences.append(
            SequenceMap(
                slot,
                blocks,
                int(lengths[slot]),
                request.request_id,
                request.index,
                request.status.value,
                len(request.prompt_token_ids),
                request.num_cached_tokens or 0,
                len(request.output_token_ids),
            )
        )
    return PageMap(describe_blocks(refcount, held), sequences)


def describe_blocks(refcount: np.ndarray, held: np.ndarray) -> str:
    """A character for each block from the counts of its owners i32[N] and of its names i32[N]."""
    owners = refcount - held
    letters = np.array([FREE, *"123456789", MANY])[np.clip(owners, 0, 10)]
    letters[(owners == 0) & (held > 0)] = CACHED
    letters[0] = NULL
    return "".join(letters.tolist())
