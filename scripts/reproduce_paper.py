"""Figures of the PagedAttention paper (Kwon et al., SOSP 2023), its values beside ours: simulated, and measured here.

    python scripts/reproduce_paper.py --all
    python scripts/reproduce_paper.py --fig 2 13

Writes docs/results/paper.json (figures that are not asked for stay as they were), and from it docs/paper.md and the
plots in docs/figures. Needs no model and no trace. Plots need matplotlib: pip install "jpaged[plots]".
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_tools import describe_machine
from paper_measures import fast_dtype, kernel_by_block_size, kernel_overheads, prefix_rows, swap_rows
from paper_pages import write_page
from paper_plots import draw_plots

from jpaged.simulation.paper import block_size, latency, memory, reasons, sharing, swapping

ROOT = Path(__file__).resolve().parent.parent
Tables = dict[str, list[dict[str, Any]]]


def make_block_size() -> Tables:
    """Fig. 18: what is simulated goes by what was measured."""
    by_size = kernel_by_block_size()
    slowdown = {row["block size"]: row["slowdown"] for row in by_size}
    return {"overhead": kernel_overheads(), "by block size": by_size, "latencies": block_size.latencies(slowdown)}


FIGURES: dict[str, Callable[[], Tables]] = {
    "2": lambda: {"memory": memory.memory_use()},
    "12": lambda: {"latencies": latency.latencies()},
    "13": lambda: {"batches": memory.batches()},
    "14": lambda: {"latencies": latency.output_latencies(), "reasons": reasons.reasons()},
    "15": lambda: {"savings": sharing.savings(), "shapes": sharing.savings_by_shape()},
    "16": lambda: {"latencies": sharing.prefix_latencies(), "measured": prefix_rows()},
    "18": make_block_size,
    "19": lambda: {"simulated": swapping.overheads(), "measured": swap_rows()},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true")
    which.add_argument("--fig", nargs="+", choices=sorted(FIGURES, key=int))
    parser.add_argument(
        "--docs", type=Path, default=ROOT / "docs", help="where to write (default: this project's docs)"
    )
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        parser.error('the plots need matplotlib: pip install "jpaged[plots]"')
    path = args.docs / "results" / "paper.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in FIGURES if args.all else args.fig:
        start = time.perf_counter()
        tables = FIGURES[name]()
        seconds = round(time.perf_counter() - start, 1)
        machine = describe_machine() | {"dtype": fast_dtype()}
        results[name] = {"seconds": seconds, "machine": machine, "tables": tables}
        print(f"Fig. {name}: {seconds} s", flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    draw_plots(results, args.docs / "figures")
    write_page(results, args.docs / "paper.md")


if __name__ == "__main__":
    main()
