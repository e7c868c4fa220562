"""How long cached blocks live, lie idle and take to be used again: an eviction policy that looks on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jpaged.prefix_index import EvictionPolicy, NamedBlock


class BlockTimes:
    """Passes everything on to `policy`, and tells histograms what it sees, in seconds."""

    def __init__(
        self,
        policy: EvictionPolicy,
        *,
        on_life: Any,
        on_idle: Any,
        on_reuse: Any,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.on_life, self.on_idle, self.on_reuse = on_life, on_idle, on_reuse
        self.clock = clock
        self.cached: dict[int, tuple[NamedBlock, float]] = {}  # by name, which is given again: when it was cached
        self.idle_since: dict[NamedBlock, float] = {}
        self.picked = False

    def add(self, block: NamedBlock) -> None:
        now = self.clock()
        if self.cached.get(block.name, (None, 0.0))[0] is not block:
            self.cached[block.name] = block, now
        self.idle_since[block] = now
        self.policy.add(block)

    def remove(self, block: NamedBlock) -> None:
        """The block is evicted if one was just asked for, else used again, or forgotten (then it has no key)."""
        now, idle_since, picked = self.clock(), self.idle_since.pop(block), self.picked
        self.picked = False
        self.policy.remove(block)
        if picked:
            self.on_idle.observe(now - idle_since)
            self.on_life.observe(now - self.cached.pop(block.name)[1])
        elif block.key is not None:
            self.on_reuse.observe(now - idle_since)

    def pick(self) -> NamedBlock:
        self.picked = True
        return self.policy.pick()
