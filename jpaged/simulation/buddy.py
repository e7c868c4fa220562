"""Contiguous KV memory as systems before paging had it: a buddy allocator over slots of one token. Imports no JAX."""

from __future__ import annotations


class BuddyAllocator:
    """Hands out contiguous pieces of memory, each a power of two long and aligned to its length (Knuth, TAOCP 1, 2.5).

    Memory that is no power of two is begun with the largest pieces that fit.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
        self.slots = slots
        self.free: dict[int, set[int]] = {}  # length -> where pieces begin
        self.tops: dict[int, int] = {}  # pieces that are no halves: where they begin -> length
        self.taken: dict[int, int] = {}
        start = 0
        while start < slots:
            length = 1 << ((slots - start).bit_length() - 1)
            self.tops[start] = length
            self.free.setdefault(length, set()).add(start)
            start += length

    def take(self, count: int) -> int | None:
        """Where `count` slots begin; None where no piece is large enough."""
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        length = wanted = 1 << (count - 1).bit_length()
        largest = max(self.tops.values())
        while length <= largest and not self.free.get(length):
            length *= 2
        if length > largest:
            return None
        start = min(self.free[length])
        self.free[length].remove(start)
        while length > wanted:  # split: the upper half stays free
            length //= 2
            self.free.setdefault(length, set()).add(start + length)
        self.taken[start] = wanted
        return start

    def give_back(self, start: int) -> None:
        """Free a piece, and join it with its other half as long as that is free."""
        length = self.taken.pop(start)
        while self.tops.get(start) != length:
            top = max(each for each in self.tops if each <= start)
            other = top + ((start - top) ^ length)
            if other not in self.free.get(length, ()):
                break
            self.free[length].remove(other)
            start, length = min(start, other), length * 2
        self.free.setdefault(length, set()).add(start)
