"""Which computed blocks are known to the host, by what is in them: the prefix cache's index. Imports no JAX.

A block that is full never changes again, so it can be found by its content. Its key is a chained hash,

    key = sha256(key of the block before it, token ids of the block)

where the chain of a prompt starts from a root that names everything else the content depends on (the model, and the
salt that keeps tenants apart). Equal keys therefore mean equal tokens from the first one on.

The index never sees a physical id: a block is known by its `name`, and the device keeps what the name means (see
named_blocks.py). A sequence *locks* the blocks of its prefix, from the first on. Blocks that nobody locks stay for
the next prompt that begins alike, until the scheduler needs their memory: then an `EvictionPolicy` says which goes.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


def root_key(*parts: object) -> bytes:
    """Where the chains of blocks begin whose content depends on `parts` besides their tokens."""
    return hashlib.sha256(repr(parts).encode()).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block that follows the block (or root) `parent`."""
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()


def block_keys(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The keys of all full blocks of a sequence."""
    keys: list[bytes] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        keys.append(block_key(keys[-1] if keys else root, token_ids[start : start + block_size]))
    return keys


@dataclass(slots=True, eq=False)
class NamedBlock:
    """A block that the device holds under a name, and who needs it."""

    name: int
    key: bytes | None  # None: shared among the forks of one sequence only, or forgotten by a reset
    parent: NamedBlock | None
    locks: int = 0  # running sequences and pins that have it in their chain
    pins: int = 0  # of the locks, those of the user
    used: int = 0  # when the last sequence that had it began, by the index's clock
    priority: int = 0  # of the sequence that unlocked it last; lower ones are more important
    children: set[NamedBlock] = field(default_factory=set)  # blocks of the index that continue it


def no_block() -> NamedBlock:
    """What stands in a chain for a block that was never named."""
    return NamedBlock(0, None, None)


class EvictionPolicy(Protocol):
    """Which of the blocks that nobody locks goes first.

    `add` and `remove` are told as blocks become free to go and are wanted again; a sequence's blocks are added last to
    first. `pick` names the next to go, without removing it. No block goes before those that continue it: where `pick`
    chooses one in the middle of a chain, the index takes the last of that chain instead. (With sliding windows that is
    not so: what a window has left behind may go first.)
    """

    def add(self, block: NamedBlock) -> None: ...
    def remove(self, block: NamedBlock) -> None: ...
    def pick(self) -> NamedBlock: ...


class LeastRecentlyUsed:
    """The block goes first that no sequence has begun with for longest, and of one sequence's the last.

    Blocks of less important sequences go before all others.

    What counts is when a sequence began, and not when it ended: on traces of many users that finds more (measured in
    docs/benchmarks.md), for a block that is needed again is needed by who comes after, however long an answer took.
    """

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int], OrderedDict[NamedBlock, None]] = {}  # by (-priority, used), none empty
        self.order: list[tuple[int, int]] = []  # a heap of their keys, and of some that have gone

    def add(self, block: NamedBlock) -> None:
        key = (-block.priority, block.used)
        if key not in self.queues:
            self.queues[key] = OrderedDict()
            heapq.heappush(self.order, key)
        self.queues[key][block] = None

    def remove(self, block: NamedBlock) -> None:
        key = (-block.priority, block.used)
        queue = self.queues[key]
        del queue[block]
        if not queue:
            del self.queues[key]
            if len(self.order) > 2 * len(self.queues) + 64:
                self.order = sorted(self.queues)

    def pick(self) -> NamedBlock:
        while self.order[0] not in self.queues:
            heapq.heappop(self.order)
        return next(iter(self.queues[self.order[0]]))


class PrefixIndex:
    """Named blocks by key; those that nobody locks are `evictable`, and `garbage` are those that only wait to go."""

    def __init__(self, num_names: int, policy: EvictionPolicy | None = None, *, windowed: bool = False) -> None:
        """windowed: sequences give up the blocks before a window, which are then of no more use than others."""
        self.windowed = windowed
        self.blocks: dict[bytes, NamedBlock] = {}
        self.policy = LeastRecentlyUsed() if policy is None else policy
        self.num_evictable = 0
        self.num_named = 0  # blocks that the device holds, garbage included
        self.garbage: list[NamedBlock] = []
        self.evictions = 0
        self.num_pinned = 0  # blocks
        self.pins: dict[int, list[NamedBlock]] = {}
        self.last_pin = 0
        self.clock = 0
        self.free_names = list(range(num_names - 1, 0, -1))
        self.given_back: list[int] = []  # names that go in the plan under way: not to be given again in it

    def match(self, keys: Iterable[bytes]) -> list[NamedBlock]:
        """The blocks of the longest beginning of `keys` that is known."""
        found = []
        for key in keys:
            block = self.blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, key: bytes | None, parent: NamedBlock | None) -> NamedBlock:
        """A new name for a block with content `key`, which must not be known; locked once by whoever adds it."""
        block = NamedBlock(self.free_names.pop(), key, parent, locks=1)
        self.num_named += 1
        if key is not None:
            assert key not in self.blocks
            self.blocks[key] = block
            if parent is not None:
                parent.children.add(block)
        return block

    def supersede(self, known: NamedBlock, parent: NamedBlock | None) -> NamedBlock:
        """Like `add` where another block has the content already, which nobody locks: that one becomes garbage."""
        key, children = known.key, known.children
        assert key is not None and not known.locks
        self.policy.remove(known)
        self.num_evictable -= 1
        self._forget(known)
        self.garbage.append(known)
        block = self.add(key, parent)
        block.children, known.children = children, set()
        for child in children:
            child.parent = block
        return block

    def lock(self, blocks: Iterable[NamedBlock]) -> None:
        """Keep blocks; whoever locks a block locks those before it too."""
        for block in blocks:
            if not block.locks:
                self.policy.remove(block)
                self.num_evictable -= 1
            block.locks += 1

    def tick(self) -> int:
        """A time for what is used now: later than any before."""
        self.clock += 1
        return self.clock

    def unlock(self, chain: Sequence[NamedBlock], priority: int = 0, used: int | None = None) -> None:
        """Give up the lock on a chain of blocks, in the order of its tokens. `used`: when it began, None for now."""
        used = self.tick() if used is None else used
        for block in reversed(chain):
            block.locks -= 1
            block.used = max(block.used, used)
            if block.locks:
                continue
            block.priority = priority
            if block.key is None:
                self.garbage.append(block)
            else:
                self.policy.add(block)
                self.num_evictable += 1

    def pin(self, chain: list[NamedBlock], most: int) -> int:
        """Keep a chain of blocks until `unpin` is called with the number returned. ValueError for more than `most`."""
        pinned = self.num_pinned + sum(not block.pins for block in chain)
        if pinned > most:
            raise ValueError(
                f"{pinned} blocks would be pinned, but at most {most} may be: the others must hold a sequence of "
                "max_model_len"
            )
        self.lock(chain)
        for block in chain:
            self.num_pinned += not block.pins
            block.pins += 1
        self.last_pin += 1
        self.pins[self.last_pin] = chain
        return self.last_pin

    def unpin(self, pin: int) -> None:
        """Undo a pin; one that was undone before (a reset undoes all) is left alone."""
        chain = self.pins.pop(pin, [])
        for block in chain:
            block.pins -= 1
            self.num_pinned -= not block.pins
        self.unlock(chain)

    def touch(self, blocks: Sequence[NamedBlock]) -> None:
        """Of those that nobody locks, let a chain of blocks be the last used."""
        used = self.tick()
        for block in reversed(blocks):
            if not block.locks:
                self.policy.remove(block)
                block.used = used
                self.policy.add(block)

    def evict(self) -> tuple[int, bytes | None]:
        """Take one block out of the index, garbage first. IndexError if all are locked.

        Returns its name and key; None for garbage, which nobody can ask for.
        """
        if self.garbage:
            return self._give_back(self.garbage.pop()), None
        if not self.num_evictable:
            raise IndexError("every named block is locked by a sequence or a pin")
        block = self.policy.pick()
        while (
            block.children and not self.windowed
        ):  # a policy that does not know of chains: the last block of the chain goes instead
            block = next(iter(block.children))
        self.policy.remove(block)
        self.num_evictable -= 1
        self.evictions += 1
        key = block.key
        self._forget(block)
        return self._give_back(block), key

    def forget(self, block: NamedBlock) -> None:
        """A block is not found any more: it is garbage, if locked as soon as nobody locks it."""
        self._forget(block)
        if not block.locks:
            self.policy.remove(block)
            self.num_evictable -= 1
            self.garbage.append(block)

    def give_key(self, block: NamedBlock, key: bytes, parent: NamedBlock | None) -> None:
        """Let a block that has no key be found by one that is not known."""
        assert block.key is None and key not in self.blocks and block.locks
        block.key, block.parent = key, parent
        self.blocks[key] = block
        if parent is not None:
            parent.children.add(block)

    def forget_all(self) -> None:
        """No block is found any more and no pin holds; those that nobody locks become garbage, the others later."""
        for pin in list(self.pins):
            self.unpin(pin)
        for block in list(self.blocks.values()):
            self.forget(block)

    def close_plan(self) -> None:
        """The plan under way is complete: names that go in it may be given again by the next."""
        self.free_names += self.given_back
        self.given_back = []

    @property
    def reclaimable(self) -> int:
        """Blocks whose memory can be had."""
        return self.num_evictable + len(self.garbage)

    def _give_back(self, block: NamedBlock) -> int:
        self.num_named -= 1
        self.given_back.append(block.name)
        return block.name

    def _forget(self, block: NamedBlock) -> None:
        assert block.key is not None
        del self.blocks[block.key]
        block.key = None
        if block.parent is not None:
            block.parent.children.discard(block)
            block.parent = None
