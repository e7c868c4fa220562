"""Something that costs to look at, looked at by many: all share one look at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field


@dataclass
class Feed:
    """interval: seconds for which a look serves everybody."""

    interval: float = 0.25
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    taken: float = float("-inf")
    look: bytes = b""

    async def next(self, take: Callable[[], Awaitable[bytes]]) -> bytes:
        """A look that is at most `interval` old, by `take` if there is none. Raises what that raises."""
        async with self.lock:
            now = time.monotonic()
            if now - self.taken >= self.interval:
                self.look, self.taken = await take(), now
            return self.look
