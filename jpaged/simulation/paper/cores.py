"""Simulated runs on all cores: none depends on another."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

Map = Callable[[Callable[..., Any], Sequence[tuple]], list[Any]]


@contextmanager
def open_cores() -> Iterator[Map]:
    """map(function, arguments): function(*each) for each of the arguments, in their order, in a process for each core.

    The dearest of the arguments should come first: they are begun in their order.
    """
    # Processes of their own from the beginning: the one that calls may have threads, which a fork does not survive.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=context) as pool:
        yield lambda function, arguments: list(pool.map(function, *zip(*arguments, strict=True)))


def map_cores(function: Callable[..., Any], arguments: Sequence[tuple]) -> list[Any]:
    """The same for one list of arguments."""
    with open_cores() as map_all:
        return map_all(function, arguments)
