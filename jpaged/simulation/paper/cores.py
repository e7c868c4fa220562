"""Simulated runs on all cores: none depends on another."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def map_cores(function: Callable[..., Any], arguments: Sequence[tuple]) -> list[Any]:
    """function(*each) for each of the arguments, in their order, in as many processes as there are cores."""
    # Processes of their own from the beginning: the one that calls may have threads, which a fork does not survive.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(arguments)), mp_context=context) as pool:
        return list(pool.map(function, *zip(*arguments, strict=True)))
