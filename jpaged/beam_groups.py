"""Groups of beams in the scheduler's plans: which rows belong together, and what a group may need. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jpaged.beam_search import BeamGroup
from jpaged.config import EngineConfig
from jpaged.prefix_index import PrefixIndex
from jpaged.request import Request
from jpaged.schedule import Schedule
from jpaged.slots import SlotCounts


def check_group(request: Request, config: EngineConfig, room: int) -> None:
    """ValueError for a group of beams that could not finish even if it ran alone with `room` blocks."""
    width, size = len(request.group), config.block_size
    if width > config.max_num_seqs:
        raise ValueError(f"beam_width={width} is more than max_num_seqs={config.max_num_seqs}")
    if len(request.stop_ids) > config.max_stop_ids:
        raise ValueError(
            f"beam search looks for {len(request.stop_ids)} tokens that end the text, "
            f"but at most {config.max_stop_ids} are allowed (max_stop_ids)"
        )
    prompt = len(request.prompt_token_ids)
    shared = max(prompt // size - 1, 0)
    most = shared + width * (-(-(prompt + request.max_tokens) // size) - shared)
    if most > room:
        raise ValueError(
            f"{width} beams of a prompt of {prompt} tokens with max_tokens={request.max_tokens} may need {most} "
            f"blocks of {size} tokens, but only {room} can be had"
        )


def blocks_to_start(request: Request, index: PrefixIndex, block_size: int) -> tuple[int, int]:
    """(blocks that the other beams of a group count when they start, blocks that get a name only then)."""
    # Full blocks that get no name of their own, because another sequence has them: each beam counts a copy.
    columns = request.block_keys[len(request.chain) : request.prefill_target // block_size]
    known = [index.blocks.get(key) for key in columns]
    unnamed = sum(block is not None and block.locks > 0 for block in known)
    own = (len(request.group) - 1) * (unnamed + (request.prefill_target % block_size > 0))
    return own, 0 if request.block_keys else request.prefill_target // block_size


def group_beams(rows: Iterable[tuple[int, Request]]) -> dict[BeamGroup, list[tuple[int, int, Request]]]:
    """Of (row, request), those that are beams, by group: (beam, row, request) in order of the beams."""
    groups: dict[BeamGroup, list[tuple[int, int, Request]]] = {}
    for row, request in rows:
        if request.beams is not None:
            groups.setdefault(request.beams, []).append((request.index, row, request))
    for members in groups.values():
        members.sort()
    return groups


def advance_groups(plan: Schedule, counts: SlotCounts, tokens: np.ndarray, records: np.ndarray) -> list[list[Request]]:
    """Take the iterations of every group in a plan that was read. Returns the groups that are done.

    counts   is told of the others' slots how many of their blocks another slot counts
    tokens   i32[K, R], -1 where a row did not run
    records  i32[K, R, 6], see beams.py
    """
    live = counts.epoch[plan.decode_slots] == plan.epochs  # slots that still belong to whom they were planned for
    rows = [(row, request) for row, (request, here) in enumerate(zip(plan.decode, live.tolist(), strict=True)) if here]
    for row, chunk in enumerate(plan.prefill, len(plan.decode)):
        if chunk.last and chunk.request.slot == chunk.slot:
            rows.append((row, chunk.request))
    done: list[list[Request]] = []
    doubled: dict[int, int] = {}
    for beams, group in group_beams(rows).items():
        at = [row for _, row, _ in group]
        members = {request.slot: index for index, _, request in group}
        prompt = len(group[0][2].prompt_token_ids)
        for sampled, record in zip(tokens, records, strict=True):
            if beams.done or sampled[at[0]] < 0:
                break
            if beams.length and (prompt + beams.length) % counts.block_size == 0:
                beams.blocks.fill()
            beams.advance(record[at], members)
        if beams.done:
            done.append([request for _, _, request in group])
        else:
            doubled |= zip(members, beams.blocks.doubled(), strict=True)
    counts.count_elsewhere(doubled)
    return done


def take_results(group: list[Request]) -> None:
    """Give the finished sequences of a group that is done to its requests, the best to the first.

    Only once the requests have left their slots: a slot's blocks are not those of the sequence that its request gets.
    Where fewer sequences were found than there are beams, the last requests get none.
    """
    beams = group[0].beams
    assert beams is not None
    for request, found in zip(group, beams.finished, strict=False):
        request.output_token_ids = found.beam.tokens()
        request.finish(found.reason)
