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

from jpaged.prefix_index import NamedBlock, PrefixIndex
from jpaged.request import Request
from jpaged.schedule import Load, Save, Schedule
from jpaged.tiers import HostStore


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

    def make_room(self, plan: Schedule, hits: Sequence[NamedBlock], wanted: int, growth: int, most: int) -> bool:
        """Whether `wanted` blocks can be loaded in this plan. If not, up to `most` are evicted for the next one.

        hits: what is better not evicted for it; growth: blocks that the sequences running may take until then.
        """
        if wanted <= self.free:
            return True
        self.index.touch(hits)
        for _ in range(min(wanted + growth - self.free, self.index.reclaimable, most)):
            self.evict(plan)
        return False

    def load(self, plan: Schedule, request: Request, keys: Sequence[bytes], chain: list[NamedBlock]) -> None:
        """Append to the locked chain of a request the blocks of `keys` that the host has."""
        blocks = self.store.fetch(keys)
        if request.num_cached_tokens is None:  # not so after a preemption
            self.cache_hits += len(blocks)
        for block in blocks:
            chain.append(self.index.add(block.key, chain[-1] if chain else None))
            plan.load.append(Load(chain[-1].name, block))
        self.free -= len(blocks)
        self.restored += len(blocks)

    def keep(self, request: Request, keys: Sequence[bytes]) -> None:
        """A request that had the blocks `keys` is preempted: keep them for it, as far as the host has room."""
        if keys and self.pays(len(keys)):
            request.kept = list(keys[: self.store.hold(keys)])
            self.swapped += bool(request.kept)

    def come_back(self, request: Request) -> None:
        """A request that waited runs again or has ended: nothing is kept for it any more."""
        self.store.let_go(request.kept)
        request.kept = []
