"""Reading and converting the next arrays while the caller is busy with one."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

MOST_THREADS = 4  # each has an array in memory
Item = TypeVar("Item")
Result = TypeVar("Result")


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int = min(os.cpu_count() or 1, MOST_THREADS)
) -> Iterator[Result]:
    """``function`` of every item, in order, by ``threads`` threads.

    No more than ``threads`` results exist beside the one that was given out last. What it raises is raised here, in
    its place.
    """
    coming: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                if len(coming) == threads:
                    yield coming.popleft().result()
                coming.append(pool.submit(function, item))
            while coming:
                yield coming.popleft().result()
        finally:
            for future in coming:
                future.cancel()
