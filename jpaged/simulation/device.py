"""A device that computes nothing: carries out plans by counting, in the order in which the real step does.

What the scheduler is told is what a real device would tell it: which rows got how many tokens, and who has ended. Token
values are made up, no two sequences' alike, and where an output ends is known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jpaged.beam_groups import group_beams
from jpaged.config import EngineConfig
from jpaged.request import Request
from jpaged.schedule import Schedule
from jpaged.simulation.page_pool import PagePool
from jpaged.simulation.shape import StepShape, measure_step
from jpaged.stats import BlockCounts
from jpaged.tiers import HostStore

END = 0  # the token that ends an output
NO_DATA = np.zeros(0, np.uint8)  # what a block on the host holds here


# parents(first of the group's requests, tokens generated) -> of each beam, the number of the one that it goes on from
Parents = Callable[[Request, int], Sequence[int]]


class Step(NamedTuple):
    """A step's result: tokens i32[K, R], remaining i64[R] and beams i32[K, R, 6] as `Scheduler.update` takes them, and
    what the step was."""

    tokens: np.ndarray
    remaining: np.ndarray
    counts: BlockCounts
    shape: StepShape
    beams: np.ndarray | None = None


class SimulatedDevice:
    """Runs plans. `outputs(request)` is how many tokens the request samples before its output ends."""

    def __init__(
        self,
        config: EngineConfig,
        store: HostStore,
        outputs: Callable[[Request], int],
        parents: Parents | None = None,
    ) -> None:
        self.config = config
        self.store = store
        self.outputs = outputs
        self.parents = parents
        self.pool = PagePool(config)
        self.left = np.zeros(config.max_num_seqs, np.int64)  # tokens that the slot's sequence still samples
        self.steps = 0

    def run(self, plan: Schedule) -> Step:
        """Raises ValueError for beams if nothing says which of them go on: a real device goes by logits."""
        if plan.has_beams and self.parents is None:
            raise ValueError("beam search goes by logits, which a simulated device lacks: give it `parents`")
        self.steps += 1
        pool, copies = self.pool, self.pool.copies
        self._follow_orders(plan)
        lengths = pool.length[plan.decode_slots]
        if plan.prefill:
            left = self.left[plan.decode_slots]
            decoded, iterations = np.minimum(left, 1), 1
        else:
            decoded, iterations = self._count_iterations(plan)
        shape = measure_step(plan, self.config, decoded, lengths, iterations)
        records = self._write(plan, decoded)
        shape.copied = pool.copies - copies
        slots = np.array([*plan.decode_slots, *(chunk.slot for chunk in plan.prefill)], np.int64)
        drawn = np.concatenate([decoded, [chunk.last for chunk in plan.prefill]]).astype(np.int64)
        self.left[slots] -= drawn
        remaining = self.left[slots]
        return Step(self._make_tokens(drawn, remaining), remaining, pool.counts(), shape, records)

    def _follow_orders(self, plan: Schedule) -> None:
        """Everything a plan says before anything is computed."""
        pool = self.pool
        for save in plan.save:
            if save.block.data is None:
                self.store.arrive(save.block, NO_DATA)
        for load in plan.load:
            pool.load(load.name)
        for order in plan.name_first:
            pool.name(*order)
        for slot in plan.release:
            pool.release(slot)
            self.left[slot] = 0
        for slot, first, _ in plan.slide:
            pool.slide(slot, first)
        for _, _, name in plan.drop:
            pool.drop(name)
        for request in plan.admit:
            self.left[request.slot] = self.outputs(request) - len(request.output_token_ids)

    def _count_iterations(self, plan: Schedule) -> tuple[np.ndarray, int]:
        """(tokens of each row, iterations) of a decode loop, which ends early when `plan.stop_early` says so."""
        left = self.left[plan.decode_slots]
        steps = plan.num_steps
        if plan.stop_early and len(left):
            steps = min(steps, max(int(left.min()), 1))
        counts = np.minimum(left, steps)
        return counts, int(counts.max(initial=0))

    def _write(self, plan: Schedule, decoded: np.ndarray) -> np.ndarray | None:
        """Blocks, names, tokens, then forks: as the step does. Returns records of beams i32[K, R, 6], if any."""
        pool = self.pool
        opened: dict[int, list[int]] = {}
        for slot, column, _ in plan.share:
            opened.setdefault(slot, []).append(column)
        for slot, columns in opened.items():
            pool.open_row(slot, columns[0], columns[-1] + 1)
        chunks = [chunk for chunk in plan.prefill if chunk.length]
        slots = np.array([*plan.decode_slots, *(chunk.slot for chunk in chunks)], np.int64)
        first = np.minimum(decoded, 1) if plan.has_beams else decoded  # beams change places after every token
        tokens = np.concatenate([first, [chunk.length for chunk in chunks]]).astype(np.int64)
        pool.make_room(slots, tokens)  # before anything is shared: a block that fills up now is not copied for that
        for order in plan.name:
            pool.name(*order)
        for order in plan.share:
            pool.share(*order)
        pool.write(slots, tokens)
        for slot, parent, _ in plan.fork:
            pool.fork(slot, parent)
        if not plan.has_beams:
            return None
        records = [self._advance_beams(plan, decoded, 0)]
        for iteration in range(1, int(decoded.max(initial=0))):
            slots = plan.decode_slots[decoded > iteration].astype(np.int64)
            pool.make_room(slots, np.ones(len(slots), np.int64))
            pool.write(slots, np.ones(len(slots), np.int64))
            records.append(self._advance_beams(plan, decoded, iteration))
        return np.stack(records)

    def _advance_beams(self, plan: Schedule, decoded: np.ndarray, iteration: int) -> np.ndarray:
        """Give each beam the blocks of the one it goes on from. Returns records i32[R, 6] (see beams.py)."""
        assert self.parents is not None
        records = np.full((len(plan.decode) + len(plan.prefill), 6), -1, np.int32)
        active = [(row, plan.decode[row]) for row in np.flatnonzero(decoded > iteration).tolist()]
        if not iteration:
            active += [(row, c.request) for row, c in enumerate(plan.prefill, len(plan.decode)) if c.last]
        slots = [*plan.decode_slots.tolist(), *(chunk.slot for chunk in plan.prefill)]
        rows: list[int] = []
        origins: list[int] = []  # slots
        scores: list[int] = []
        left = self.left.tolist()
        for group in group_beams(active).values():
            members = [row for _, row, _ in group]
            first = group[0][2].group[0]
            generated = self.outputs(first) - left[slots[members[0]]] + iteration
            rows += members
            origins += [slots[members[parent]] for parent in self.parents(first, generated)]
            scores += range(generated + 1, generated + 1 + len(members))
        slots_of = np.array(slots, np.int64)[rows]
        self.pool.reorder(slots_of, np.array(origins, np.int64))
        bits = (-np.array(scores, np.float32)).view(np.int32)
        records[rows, :3] = np.stack([np.array(origins, np.int32), np.ones(len(rows), np.int32), bits], 1)
        return records

    def _make_tokens(self, drawn: np.ndarray, remaining: np.ndarray) -> np.ndarray:
        """i32[K, R]: -1 where nothing was drawn, END where an output ends."""
        steps = np.arange(max(int(drawn.max(initial=1)), 1))[:, None]
        tokens = 1 + (self.steps * 7919 + np.arange(len(drawn))) % 100_000 + steps
        tokens[steps >= drawn] = -1
        ends = np.flatnonzero((remaining == 0) & (drawn > 0))
        tokens[drawn[ends] - 1, ends] = END
        return tokens
