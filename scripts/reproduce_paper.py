"""Figures 2, 12, 13, 15 of the PagedAttention paper (Kwon et al., SOSP 2023) by simulation, its values beside ours.

    python scripts/reproduce_paper.py --all
    python scripts/reproduce_paper.py --fig 2 13

Writes docs/results/paper.json (figures that are not asked for stay as they were), and from it docs/paper.md and the
plots in docs/figures. Plots need matplotlib: pip install "jpaged[plots]".
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path

from paper_pages import write_page
from paper_plots import draw_plots

from jpaged.simulation.paper import latency, memory, sharing

ROOT = Path(__file__).resolve().parent.parent
FIGURES = {
    "2": memory.memory_use,
    "12": latency.latencies,
    "13": memory.batches,
    "15": sharing.savings,
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
        rows = FIGURES[name]()
        results[name] = {"seconds": round(time.perf_counter() - start, 1), "rows": rows}
        if name == "12":
            results["12 sustained"] = {"seconds": 0.0, "rows": latency.sustained(rows)}
        print(f"Fig. {name}: {results[name]['seconds']} s", flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    draw_plots(results, args.docs / "figures")
    write_page(results, args.docs / "paper.md")


if __name__ == "__main__":
    main()
