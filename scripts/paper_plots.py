"""Plots of scripts/reproduce_paper.py, the paper's values marked in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jpaged.simulation.paper.memory import PARTS
from jpaged.simulation.paper.setting import LABELS

NAMES = ("token states", "reserved", "internal fragmentation", "external and others")
LINES = dict(zip(LABELS.values(), ("#d1495b", "#f2b134", "#30638e", "#2a7f62"), strict=True))
COLORS = ("#2a7f62", "#f2b134", "#d1495b", "#b8bcc2")


def draw_plots(results: dict[str, Any], folder: Path) -> None:
    """PNG files of the figures that `results` has."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (("2", draw_memory), ("12", draw_latency), ("13", draw_batches)):
        if name in results:
            figure = draw(pyplot, results[name]["rows"])
            figure.savefig(folder / f"paper_fig{name}.png", dpi=100)
            pyplot.close(figure)


def draw_memory(pyplot, rows: list[dict[str, Any]]):
    rows = [row for row in rows if row["lengths"] == "sharegpt"]
    figure, axes = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    at, width = np.arange(len(rows)), 0.36
    for side, label in ((-1, "ours"), (1, "paper")):
        bottom = np.zeros(len(rows))
        for part, name, color in zip(range(4), NAMES, COLORS, strict=True):
            if label == "ours":
                values = np.array([row[PARTS[part]] for row in rows])
            else:
                values = np.array([(*row["paper"], 0.0, 0.0, 0.0)[part] for row in rows])
            hatch = None if label == "ours" else "//"
            bars = dict(color=color, hatch=hatch, edgecolor="white", label=name if label == "ours" else None)
            axes.bar(at + side * width / 2 * 1.06, values, width, bottom=bottom, **bars)
            for x, value, low in zip(at, values, bottom, strict=True):
                if value > 4:
                    text = dict(ha="center", va="center", fontsize=8, backgroundcolor=(1, 1, 1, 0.6))
                    axes.text(x + side * width / 2 * 1.06, low + value / 2, f"{value:.1f}", **text)
            bottom += values
    axes.set_xticks(at, [row["system"] for row in rows])
    axes.set_ylabel("% of KV memory")
    axes.set_ylim(0, 104)
    axes.set_title("Where KV memory goes (Fig. 2). Left: simulated here; right, hatched: the paper", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


def draw_batches(pyplot, rows: list[dict[str, Any]]):
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for axes, name in zip(panels, ("sharegpt", "alpaca"), strict=True):
        some = [row for row in rows if row["lengths"] == name]
        at = np.arange(len(some))
        for side, key, color in ((-1, "batch", "#2a7f62"), (1, "paper", "#b8bcc2")):
            label = "simulated here" if key == "batch" else "paper"
            bars = axes.bar(at + side * 0.2, [row[key] for row in some], 0.38, color=color, label=label)
            axes.bar_label(bars, fmt="%.1f", fontsize=8)
        labels = [row["system"].replace(" (", "\n(").replace(" / ", "\n/ ").replace(", ", ",\n") for row in some]
        axes.set_xticks(at, labels, fontsize=8)
        axes.set_title(f"{name}, {some[0]['rate']:g} requests/s", fontsize=10)
        axes.margins(y=0.12)
        axes.set_ylabel("mean batched requests")
    panels[0].legend(fontsize=9, frameon=False, loc="upper left")
    figure.suptitle("Requests that run at once (Fig. 13)", fontsize=10)
    return figure


def draw_latency(pyplot, rows: list[dict[str, Any]]):
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for axes, name in zip(panels, ("sharegpt", "alpaca"), strict=True):
        for system, color in LINES.items():
            some = [row for row in rows if (row["lengths"], row["system"]) == (name, system)]
            rates, values = [row["rate"] for row in some], [row["latency"] for row in some]
            axes.plot(rates, values, "o-", color=color, label=system, markersize=3.5)
        axes.set_ylim(0, 1)
        axes.set_xlim(0, None)
        axes.set_xlabel("requests/s")
        axes.set_ylabel("normalized latency, s/token")
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.suptitle("Latency against request rate, OPT-13B on an A100-40GB, simulated (Fig. 12)", fontsize=10)
    return figure
