"""What each slot's sequence has and may still get, in tokens and blocks: the scheduler's arithmetic. Imports no JAX.

The device allocates blocks inside the step; the host only counts them. `reserved[slot]` is the most blocks that the
slot's sequence can own once every step already dispatched has run, `named[slot]` how many of them have a name (see
prefix_index.py). Named blocks are counted once, by the index, whoever shares them, so

    blocks in use  <=  sum(reserved - named) + blocks with a name

and a schedule that keeps the right side within the pool cannot make the device run out. Counts do not depend on token
values, which is why a step can be planned before the tokens of the one before it are read.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jpaged.config import EngineConfig

UNBOUNDED = 1 << 40


class SlotCounts:
    """Arrays with one entry for each slot."""

    def __init__(self, config: EngineConfig) -> None:
        slots = config.max_num_seqs
        self.block_size = config.block_size
        self.reserved = np.zeros(slots, np.int64)  # blocks
        self.named = np.zeros(slots, np.int64)  # of them, those with a name
        # Columns whose blocks do not count here: a window left them behind, or another beam's slot counts them too.
        self.elsewhere = np.zeros(slots, np.int64)
        # Most blocks without a name: of a prompt that is computed chunk by chunk behind a window.
        self.most_private = np.full(slots, UNBOUNDED)
        self.private = 0  # blocks without a name, over all slots
        self.kv_known = np.zeros(slots, np.int64)  # tokens in the cache by the last results read
        self.left_known = np.zeros(slots, np.int64)  # tokens still to sample, likewise
        self.in_flight = np.zeros(slots, np.int64)  # decode iterations dispatched since
        self.decoding = np.zeros(slots, bool)
        self.structured = np.zeros(slots, bool)  # one token a dispatch: the host writes a mask for each
        self.held = np.zeros(slots, bool)  # structured, and the mask for the next token is not on the device yet
        self.epoch = np.zeros(slots, np.int64)  # counts the owners of a slot
        self.order = np.zeros(slots, np.int64)  # admission number of the owner
        self.admissions = 0

    @property
    def ready(self) -> np.ndarray:
        """Slots whose sequences can go on by a token."""
        return self.decoding & ~self.held

    def left(self, slots: np.ndarray) -> np.ndarray:
        """Tokens each slot still has to sample if every dispatched iteration yields one."""
        return np.maximum(self.left_known[slots] - self.in_flight[slots], 0)

    def kv_tokens(self, slots: np.ndarray) -> np.ndarray:
        """Most tokens each slot has in the cache once the dispatched steps have run."""
        return self.kv_known[slots] + np.minimum(self.left_known[slots], self.in_flight[slots])

    def growth(self, slots: np.ndarray, tokens: int | np.ndarray) -> np.ndarray:
        """Blocks each slot would have to add to hold `tokens` more."""
        wanted = -(-(self.kv_tokens(slots) + tokens) // self.block_size) - self.elsewhere[slots]
        return np.maximum(wanted - self.reserved[slots], 0)

    def begin(
        self,
        slot: int,
        tokens: int,
        left: int,
        named: int,
        structured: bool = False,
        slid: int = 0,
        most_private: int = UNBOUNDED,
    ) -> None:
        """A sequence takes the slot: `tokens` to compute, `left` tokens to sample.

        Of its blocks it never has the first `slid`, `named` others are shared, and at most `most_private` are without a
        name at once until it decodes.
        """
        self.structured[slot] = structured
        self.epoch[slot] += 1
        self.admissions += 1
        self.order[slot] = self.admissions
        self.kv_known[slot] = tokens
        self.left_known[slot] = left
        self.named[slot], self.elsewhere[slot], self.most_private[slot] = named, slid, most_private
        self._recount(slot, 0)

    def begin_decoding(self, slot: int) -> None:
        """The step that is planned computes the last of the prompt and samples a token: that one is certain."""
        self.decoding[slot] = True
        self.held[slot] = self.structured[slot]
        self.left_known[slot] -= 1
        self.most_private[slot] = UNBOUNDED
        self._recount(slot, int(self.reserved[slot] - self.named[slot]))

    def add_named(self, slot: int) -> None:
        """One of the slot's blocks got a name."""
        self.named[slot] += 1
        self.private -= 1

    def slide(self, slot: int, columns: int, named: int) -> None:
        """The slot gives up its next `columns` blocks, `named` of which have a name of its own chain."""
        private = int(self.reserved[slot] - self.named[slot])
        self.elsewhere[slot] += columns
        self.named[slot] -= named
        self._recount(slot, private)

    def count_elsewhere(self, doubled: Mapping[int, int]) -> None:
        """Of the slot of each beam, by slot: how many of its blocks another beam's slot counts."""
        slots, columns = np.array(list(doubled), np.int64), np.array(list(doubled.values()), np.int64)
        fewer = columns - self.elsewhere[slots]
        self.elsewhere[slots] = columns
        self.reserved[slots] -= fewer
        self.private -= int(fewer.sum())

    def is_bounded(self, slot: int) -> bool:
        """Whether a block that gets a name leaves as many without one to come."""
        return self._unnamed(slot) > self.most_private[slot]

    def end(self, slot: int) -> None:
        """The plan that is being made releases the slot's blocks before it allocates."""
        self.private -= int(self.reserved[slot] - self.named[slot])
        self.reserved[slot] = self.named[slot] = self.elsewhere[slot] = 0
        self.most_private[slot] = UNBOUNDED
        self.decoding[slot] = self.structured[slot] = self.held[slot] = False
        self.kv_known[slot] = self.left_known[slot] = self.in_flight[slot] = 0
        self.epoch[slot] += 1

    def plan_iterations(self, slots: np.ndarray, steps: int) -> None:
        """Each slot decodes up to `steps` times, a structured one once."""
        structured = self.structured[slots]
        self.in_flight[slots] += np.where(structured, 1, steps)
        self.held[slots] = structured
        self._reserve(slots)

    def settle(self, slots: np.ndarray, epochs: np.ndarray, steps: int, counts: np.ndarray) -> None:
        """Replace what a step was planned to do by what it did: it may have left its loop early."""
        live = self.epoch[slots] == epochs
        slots, counts = slots[live], counts[live]
        self.in_flight[slots] -= np.where(self.structured[slots], 1, steps)
        self.kv_known[slots] += counts
        self.left_known[slots] -= counts
        self._reserve(slots)

    def _reserve(self, slots: np.ndarray) -> None:
        """Decoding slots: what they have at most when the steps under way are done."""
        reserved = -(-self.kv_tokens(slots) // self.block_size) - self.elsewhere[slots]
        self.private += int((reserved - self.reserved[slots]).sum())
        self.reserved[slots] = reserved

    def _recount(self, slot: int, private: int) -> None:
        """One slot, whatever it does; `private` is what it counted of `self.private` before."""
        unnamed = min(self._unnamed(slot), int(self.most_private[slot]))
        self.reserved[slot] = self.named[slot] + unnamed
        self.private += unnamed - private

    def _unnamed(self, slot: int) -> int:
        """Blocks of the whole sequence from the first that it has not given up, without those that have a name."""
        tokens = int(self.kv_known[slot] + min(self.left_known[slot], self.in_flight[slot]))
        return -(-tokens // self.block_size) - int(self.elsewhere[slot] + self.named[slot])
