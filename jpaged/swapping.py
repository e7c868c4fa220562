"""Blocks on their way between device and host, in the plan under way. Imports no JAX.

A block leaves the device when the prefix index evicts it: its name goes (`Schedule.drop`), and if the host wants it, it
is copied first (`Schedule.save`). It comes back under a new name (`Schedule.load`), before the step that shares it with
the sequence which begins with it. So a sequence that was preempted finds its beginning like any prompt does: what the
device still has costs nothing, what is on the host is copied, the rest is computed.

Copies run as programs of their own right before the step of their plan: saves first, when what the plan releases or
drops still is what it was, then loads. Loads take blocks that are free before the step itself frees any, which
`begin` counts; if there are too few, `make_room` evicts for the next plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jpaged.prefix_index import NamedBlock, PrefixIndex, no_block
from jpaged.request import Request
from jpaged.schedule import Load, Save, Schedule
from jpaged.sliding import first_column
from jpaged.tiers import HostStore


class Found(NamedTuple):
    """Blocks that a prompt can begin with, from column `first` on: what is before them no window sees."""

    first: int
    keys: list[bytes]
    blocks: list[NamedBlock | None]  # None: on the host

    @property
    def end(self) -> int:
        return self.first + len(self.keys)

    @property
    def here(self) -> list[NamedBlock]:
        return [block for block in self.blocks if block is not None]

    @property
    def stored(self) -> int:
        return sum(block is None for block in self.blocks)


NOTHING_FOUND = Found(0, [], [])


class Swapping:
    """What the scheduler decides about copies, beside the index it takes the blocks from."""

    def __init__(self, index: PrefixIndex, store: HostStore, pays: Callable[[int], bool]) -> None:
        """pays(blocks): whether to copy that many to the host and back rather than compute them again."""
        self.index = index
        self.store = store
        self.pays = pays
        self.free = 0  # blocks free before the plan under way, and not yet loaded into
        self.named: dict[int, tuple[int, int]] = {}  # blocks that the plan names first: name -> (slot, column)
        self.saved = 0  # blocks copied to the host
        self.restored = 0  # blocks copied back
        self.swapped = 0  # preemptions that kept blocks
        self.cache_hits = 0  # blocks copied back for prompts that begin like others

    def begin(self, free: int) -> None:
        """A new plan; `free` blocks are free once every step already dispatched has run."""
        self.free = free
        self.named = {}

    def evict(self, plan: Schedule) -> None:
        """Drop the block that is to go next, saved if the host wants it."""
        name, key = self.index.evict()
        plan.drop.append((0, 0, name))
        block = self.store.put(key) if key is not None else None
        if block is None:
            return
        if len(self.named) != len(plan.name_first):
            self.named = {name: (slot, column) for slot, column, name in plan.name_first}
        # The device does not know yet of a name that this very plan gives: it is told the place.
        place = self.named.get(name)
        plan.save.append(Save(*(place or (0, 0)), 0 if place else name, block))
        self.saved += 1

    def find(self, request: Request, block_size: int, window: int | None) -> Found:
        """The longest beginning of a request's tokens, but for the last one, that need not be computed.

        With a window only what it sees of that beginning must be there.
        """
        # At least one token is computed, for there must be something to sample from.
        keys = request.block_keys[: (request.num_tokens - 1) // block_size]
        first = end = since = 0
        for column, key in enumerate(keys):
            if key not in self.index.blocks and not self.store.match([key]):
                if window is None:
                    break
                since = column + 1
            needed = min(first_column((column + 1) * block_size, window, block_size), column)
            if since <= needed:
                first, end = needed, column + 1
        keys = keys[first:end]
        return Found(first, keys, [self.index.blocks.get(key) for key in keys])

    def make_room(self, plan: Schedule, found: Found, growth: int, most: int) -> bool:
        """Whether what the host has of `found` can be loaded in this plan. If not, up to `most` are evicted for the
        next one.

        growth: blocks that the sequences running may take until then.
        """
        if found.stored <= self.free:
            return True
        self.index.touch(found.here)  # the last to be evicted for it
        for _ in range(min(found.stored + growth - self.free, self.index.reclaimable, most)):
            self.evict(plan)
        return False

    def take(self, plan: Schedule, request: Request, found: Found) -> list[NamedBlock] | None:
        """Lock the blocks that were found for a request, and load those that the host has.

        None, and nothing is done, if a file turns out to be damaged: what is found without it is another matter.
        """
        stored = self.store.fetch([key for key, block in zip(found.keys, found.blocks, strict=True) if block is None])
        if len(stored) < found.stored:
            return None
        if request.num_cached_tokens is None:  # not so after a preemption
            self.cache_hits += len(stored)
        self.index.lock(found.here)
        chain = [no_block() for _ in range(found.first)]
        coming = iter(stored)
        for key, block in zip(found.keys, found.blocks, strict=True):
            if block is None:
                parent = chain[-1] if chain and chain[-1].key is not None else None
                block = self.index.add(key, parent)
                plan.load.append(Load(block.name, next(coming)))
            chain.append(block)
        self.free -= len(stored)
        self.restored += len(stored)
        return chain

    def keep(self, request: Request, keys: Sequence[bytes]) -> None:
        """A request that had the blocks `keys` is preempted: keep them for it, as far as the host has room."""
        if keys and self.pays(len(keys)):
            request.kept = list(keys[: self.store.hold(keys)])
            self.swapped += bool(request.kept)

    def come_back(self, request: Request) -> None:
        """A request that waited runs again or has ended: nothing is kept for it any more."""
        self.store.let_go(request.kept)
        request.kept = []
