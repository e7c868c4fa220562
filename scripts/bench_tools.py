"""What the benchmarks share: options, timing, a Markdown table, JSON with the machine it was made on."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
from markdown_table import make_table

from jpaged.bench.timing import median_of_turns, seconds
from pallas_kernels.cpu.library import instruction_sets


def describe_machine() -> dict[str, Any]:
    """Versions, cores and processor, for the head of a table. "kernels": the native CPU kernels' instruction set."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    device = jax.local_devices()[0]
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "device": device.device_kind,
        "kernels": (*instruction_sets(), "none")[0],
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "numpy": np.__version__,
    }


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that prints a benchmark's docstring as it is, with the option that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the table, the command and the machine there too")
    return parser


def time_calls(run: Callable[..., Any], repeats: int, prepare: Callable[[], tuple[Any, ...]] = tuple) -> list[float]:
    """Seconds of each of `repeats` calls, after one that compiles.

    `prepare()` makes a call's arguments and is not timed: a donated state can be used only once.
    """
    times = [seconds(run, *jax.block_until_ready(prepare())) for _ in range(1 + repeats)]
    return times[1:]


def take_turns(runs: Mapping[str, Callable[[], Any]], repeats: int, calls: int = 1) -> dict[str, float]:
    """Median seconds a call of each, in turns, so that a slow moment hits all alike.

    A turn is `calls` calls in a row: one call on caches that another program has just filled is not what is asked.
    """
    for run in runs.values():
        jax.block_until_ready(run())
    return median_of_turns(
        {name: lambda run=run: seconds(lambda: [run() for _ in range(calls)]) / calls for name, run in runs.items()},
        repeats,
    )


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A Markdown table."""
    print(make_table(header, rows))


def save_json(path: str | None, rows: Any, machine: Mapping[str, Any] | None = None) -> None:
    """Write rows with the command, the date and the machine they came from; nothing without a path.

    machine: what else to say of it.

    The file is what `make_benchmarks.py` reads: in docs/results/benchmarks it becomes a table of docs/benchmarks.md.
    """
    if path is None:
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Where files lie, and where this one goes, is this machine's business.
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    if "--json" in words:
        at = words.index("--json")
        words = words[:at] + words[at + 2 :]
    found = {
        "command": " ".join(["python", f"scripts/{Path(sys.argv[0]).name}", *words]),
        "date": datetime.date.today().isoformat(),
        "machine": {**describe_machine(), **(machine or {})},
        "rows": rows,
    }
    target.write_text(json.dumps(found, indent=1, default=float) + "\n")
