"""What one step is to do: made by the scheduler, packed by plan.py, carried out by step.py. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jpaged.request import Request
from jpaged.tiers import StoredBlock

Order = tuple[int, int, int]  # slot, column, name of a block


class Save(NamedTuple):
    """A block to copy to the host before the step: the one called `name`, or, without (0), a place in the tables."""

    slot: int
    column: int
    name: int
    block: StoredBlock


class Load(NamedTuple):
    """A block to copy to the device before the step; from then on it is called `name`."""

    name: int
    block: StoredBlock


@dataclass(slots=True)
class PrefillChunk:
    """Positions [start, start + length) of a request's tokens; `last` if the next token is sampled after it.

    A chunk of no tokens is a fork, which samples from what the chunk before it computed.
    """

    request: Request
    slot: int
    start: int
    length: int
    last: bool


@dataclass(slots=True)
class Schedule:
    """One step. Rows are `decode_slots` in order, then the prefill chunks, the one that does not end last."""

    name_first: list[Order] = field(default_factory=list)  # blocks to name before anything is released
    release: list[int] = field(default_factory=list)  # slots whose blocks go back first
    slide: list[Order] = field(default_factory=list)  # slots that give up blocks: slot, first column they keep, 0
    drop: list[Order] = field(default_factory=list)  # names that go, slot and column 0
    name: list[Order] = field(default_factory=list)  # blocks to name that this step allocates or has
    share: list[Order] = field(default_factory=list)  # blocks that admitted sequences begin with
    fork: list[Order] = field(default_factory=list)  # slots that become copies: slot, slot it is copied from, 1
    beam: list[Order] = field(default_factory=list)  # slots that become beams: slot, slot of beam 0, number + 1
    save: list[Save] = field(default_factory=list)  # blocks that this step gives up and the host wants
    load: list[Load] = field(default_factory=list)  # blocks that admitted sequences begin with and the host has
    admit: list[Request] = field(default_factory=list)  # requests that take a slot in this step
    decode: list[Request] = field(default_factory=list)
    decode_slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    prefill: list[PrefillChunk] = field(default_factory=list)
    has_beams: bool = False  # whether any of the rows may be a beam
    num_steps: int = 1  # decode iterations; 1 whenever there is prefill
    stop_early: bool = False  # leave the loop as soon as a sequence finishes: another waits for its slot
    epochs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # of decode_slots, when scheduled

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(chunk.length for chunk in self.prefill)

    @property
    def size(self) -> int:
        """Tokens, and rows without any: what a program must have room for."""
        return self.num_tokens + sum(not chunk.length for chunk in self.prefill)

    @property
    def has_rows(self) -> bool:
        return bool(self.decode) or bool(self.prefill)

    @property
    def has_work(self) -> bool:
        """Whether the device has anything to do."""
        return self.has_rows or bool(self.release or self.slide or self.drop or self.name_first)

    @property
    def orders(self) -> tuple[list[Order], ...]:
        """About named blocks, in the order of `named_blocks.SECTIONS`."""
        return self.name_first, self.slide, self.drop, self.name, self.share, self.fork, self.beam
