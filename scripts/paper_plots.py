"""Plots of scripts/reproduce_paper.py, the paper's values marked in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jpaged.simulation.paper import block_size, latency
from jpaged.simulation.paper.memory import PARTS
from jpaged.simulation.paper.setting import LABELS, SUSTAINED
from jpaged.simulation.paper.sharing import LABELS16, PAPER16, prefix_ratios

NAMES = ("token states", "reserved", "internal fragmentation", "external and others")
LINES = dict(zip(LABELS.values(), ("#d1495b", "#f2b134", "#30638e", "#2a7f62"), strict=True))
LINES16 = dict(zip(LABELS16.values(), ("#30638e", "#f2b134", "#2a7f62"), strict=True))
COLORS = ("#2a7f62", "#f2b134", "#d1495b", "#b8bcc2")
OURS, OTHER, PAPER = "#2a7f62", "#30638e", "#b8bcc2"

Rows = list[dict[str, Any]]
Tables = dict[str, Rows]


def draw_plots(results: dict[str, Any], folder: Path) -> None:
    """PNG files of the figures that `results` has."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PLOTS.items():
        if name in results:
            figure = draw(pyplot, results[name]["tables"])
            figure.savefig(folder / f"paper_fig{name}.png", dpi=100)
            pyplot.close(figure)


def draw_memory(pyplot, tables: Tables):
    rows = [row for row in tables["memory"] if row["lengths"] == "sharegpt"]
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


def draw_batches(pyplot, tables: Tables):
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for axes, name in zip(panels, ("sharegpt", "alpaca"), strict=True):
        some = [row for row in tables["batches"] if row["lengths"] == name]
        at = np.arange(len(some))
        for side, key, color in ((-1, "batch", OURS), (1, "paper", PAPER)):
            label = "simulated here" if key == "batch" else "paper"
            values = [row[key] for row in some]
            bars = axes.bar(at + side * 0.2, values, 0.38, color=color, label=label)
            axes.bar_label(bars, [f"{each:.1f}" if each < 100 else f"{each:.0f}" for each in values], fontsize=8)
        labels = [row["system"].replace(" (", "\n(").replace(" / ", "\n/ ").replace(", ", ",\n") for row in some]
        axes.set_xticks(at, labels, fontsize=8)
        axes.set_title(f"{name}, {some[0]['rate']:g} requests/s", fontsize=10)
        axes.margins(y=0.12)
        axes.set_ylabel("mean batched requests")
    panels[0].legend(fontsize=9, frameon=False, loc="upper left")
    figure.suptitle("Requests that run at once (Fig. 13)", fontsize=10)
    return figure


def draw_latency(pyplot, tables: Tables):
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for axes, name in zip(panels, ("sharegpt", "alpaca"), strict=True):
        rows = [row for row in tables["latencies"] if row["lengths"] == name]
        _draw_curves(axes, rows, LINES)
        for row in latency.sustained(rows):
            if row["paper"]:
                ratios = [float(ratio) for ratio in row["paper"].split(" to ")]
                places = [row["sustained"] * row["ratio"] / ratio for ratio in (ratios[0], ratios[-1])]
                label = f"{row['system']}, by the paper's ratio to vLLM"
                band = dict(color=LINES[row["system"]], alpha=0.35, solid_capstyle="butt", zorder=1)
                axes.plot(places, [SUSTAINED] * 2, marker="|", markersize=14, linewidth=7, label=label, **band)
        axes.set_title(name, fontsize=10)
        axes.set_ylabel("normalized latency, s/token")
    _add_legend(figure, panels[0], columns=3)
    figure.suptitle("Latency against request rate, OPT-13B on an A100-40GB, simulated (Fig. 12)", fontsize=10)
    return figure


def draw_outputs(pyplot, tables: Tables):
    figure, panels = pyplot.subplots(2, 4, figsize=(13, 6.4), layout="constrained")
    for line, method in zip(panels, ("parallel", "beam"), strict=True):
        for axes, outputs in zip(line, latency.OUTPUTS, strict=False):
            rows = [row for row in tables["latencies"] if (row["method"], row["outputs"]) == (method, outputs)]
            _draw_curves(axes, rows, LINES)
            what = f"{outputs} outputs in parallel" if method == "parallel" else f"beam width {outputs}"
            axes.set_title(what, fontsize=10)
        line[0].set_ylabel("normalized latency, s/token")
        ratios = [
            row
            for row in latency.sustained(tables["latencies"])
            if row["method"] == method and row["system"] == LABELS["oracle"]
        ]
        at = np.arange(len(ratios))
        bars = line[3].bar(at, [row["ratio"] for row in ratios], 0.5, color=OURS, label="simulated here")
        line[3].bar_label(bars, fmt="%.2f", fontsize=8)
        for x, row in zip(at, ratios, strict=True):
            if row["paper"]:
                line[3].plot([x - 0.4, x + 0.4], [float(row["paper"])] * 2, "k--", linewidth=1.5, label="paper")
                line[3].text(x - 0.45, float(row["paper"]), f"{row['paper']}", ha="right", va="center", fontsize=8)
        line[3].axhline(1, color="#888", linewidth=0.8)
        line[3].set_xticks(at, [str(row["outputs"]) for row in ratios])
        line[3].set_ylim(0, 3.2)
        line[3].set_xlabel("outputs of a prompt" if method == "parallel" else "beam width")
        line[3].set_title("sustained rate, ours over Orca (Oracle)", fontsize=10)
        line[3].legend(fontsize=8, frameon=False, loc="upper left")
    _add_legend(figure, panels[0][0])
    figure.suptitle(
        "Several outputs and beams, OPT-13B on an A100-40GB, Alpaca lengths, simulated (Fig. 14)", fontsize=10
    )
    return figure


def draw_sharing(pyplot, tables: Tables):
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
    colors = {"alpaca": OURS, "sharegpt": OTHER}
    for axes, method in zip(panels, ("parallel", "beam"), strict=True):
        for side, (name, color) in zip((-1, 1), colors.items(), strict=True):
            rows = [row for row in tables["savings"] if (row["method"], row["lengths"]) == (method, name)]
            at = np.arange(len(rows)) + side * 0.2
            axes.bar(at, [row["saved"] for row in rows], 0.38, color=color, label=f"{name}, simulated here")
            for x, row in zip(at, rows, strict=True):  # at the foot, where no point of the paper is
                axes.text(x, 0.6, f"{row['saved']:.0f}", ha="center", va="bottom", fontsize=8, color="white")
            # The paper tells the ends of a range, of 2 and of 6.
            paper = [float(value) for value in rows[0]["paper"].split(" to ")]
            mark = dict(marker="D", color="white", markeredgecolor="black", linestyle="none", markersize=6)
            label = "paper, 2 and 6" if name == "sharegpt" else None
            axes.plot([at[0], at[-1]], paper, label=label, **mark)
        axes.set_xticks(range(len(rows)), [str(row["outputs"]) for row in rows])
        axes.set_xlabel("outputs in parallel" if method == "parallel" else "beam width")
    panels[0].set_ylabel("% of blocks saved")
    panels[0].legend(fontsize=9, frameon=False, loc="upper left")
    figure.suptitle("Blocks saved by sharing, simulated (Fig. 15)", fontsize=10)
    return figure


def draw_prefix(pyplot, tables: Tables):
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    for axes, prefix in zip(panels, PAPER16, strict=False):
        _draw_curves(axes, [row for row in tables["latencies"] if row["prefix"] == prefix], LINES16)
        axes.set_title(f"{prefix} tokens in common, simulated", fontsize=10)
    panels[0].set_ylabel("normalized latency, s/token")
    ratios = prefix_ratios(tables["latencies"])
    bars = (
        ("over Orca (Oracle), simulated", OURS, [r["ratio"] for r in ratios if r["system"] == LABELS16["oracle"]]),
        ("over it, paper", PAPER, list(PAPER16.values())),
        (
            "over no sharing, simulated",
            "#f2b134",
            [r["ratio"] for r in ratios if r["system"] == LABELS16["jpaged unshared"]],
        ),
        ("over no sharing, measured on this CPU", OTHER, [row["ratio"] for row in tables["measured"]]),
    )
    at = np.arange(len(PAPER16))
    for number, (label, color, values) in enumerate(bars):
        drawn = panels[2].bar(at + (number - 1.5) * 0.21, values, 0.2, color=color, label=label)
        panels[2].bar_label(drawn, fmt="%.2f", fontsize=8)
    panels[2].set_xticks(at, [f"{prefix} tokens" for prefix in PAPER16])
    panels[2].set_title("throughput with the prefix shared", fontsize=10)
    panels[2].margins(y=0.5)
    panels[2].legend(fontsize=8, frameon=False, loc="upper left")
    _add_legend(figure, panels[0])
    figure.suptitle(
        "A prefix in common: LLaMA-13B on an A100-40GB, and SmolLM2's shape on this CPU (Fig. 16)", fontsize=10
    )
    return figure


def draw_block_size(pyplot, tables: Tables):
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    rows = tables["overhead"]
    at = np.arange(len(rows))
    panels[0].axhspan(20, 26, color=PAPER, label="paper: 20 to 26 %")
    bars = panels[0].bar(at, [row["overhead %"] for row in rows], 0.6, color=OTHER, label="blocks of 16 over one block")
    panels[0].bar_label(bars, fmt=lambda value: str(round(value)), fontsize=8)
    panels[0].axhline(0, color="#444", linewidth=0.8)
    panels[0].set_xticks(at, [f"{row['batch']}\nx {row['context']}" for row in rows], fontsize=8)
    panels[0].set_xlabel("sequences x tokens")
    panels[0].set_ylabel("% more time")
    panels[0].set_title("(a) attention kernel, measured on this CPU", fontsize=10)
    panels[0].margins(y=0.25)
    panels[0].legend(fontsize=8, frameon=False, loc="upper left")
    for axes, name in zip(panels[1:], block_size.RATES, strict=True):
        some = [row for row in tables["latencies"] if row["lengths"] == name]
        sizes = [row["block size"] for row in some]
        low, high = block_size.PAPER[name]
        axes.axvspan(low / 1.3, high * 1.3, color=PAPER, alpha=0.6, label=f"paper: {low} to {high} do best")
        axes.plot(
            sizes, [row["memory only"] for row in some], "o--", color="#f2b134", markersize=4, label="memory alone"
        )
        label = "with the kernel's time by block size"
        axes.plot(sizes, [row["latency"] for row in some], "o-", color=OURS, markersize=4, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_ylim(0, 1.4 * max(max(row["memory only"], row["latency"]) for row in some))
        axes.set_xlabel("block size, tokens")
        axes.set_title(f"(b) {name}, {block_size.RATES[name]:g} requests/s, simulated", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False, loc="upper left")
    panels[1].set_ylabel("normalized latency, s/token")
    figure.suptitle("What paging costs in the kernel, and block sizes (Fig. 18)", fontsize=10)
    return figure


def draw_swap(pyplot, tables: Tables):
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    simulated, measured = tables["simulated"], tables["measured"]
    for axes, rows, way in (
        (panels[0], simulated, "A100, PCIe 4.0, simulated"),
        (panels[1], measured, "this CPU, measured"),
    ):
        sizes = [row["block size"] for row in rows]
        both = [2 * row["one way ms"] if "one way ms" in row else row["out ms"] + row["in ms"] for row in rows]
        axes.plot(sizes, both, "o-", color=OTHER, markersize=4, label="swap out and in")
        axes.plot(sizes, [row["compute ms"] for row in rows], "o-", color="#d1495b", markersize=4, label="recompute")
        axes.set_title(f"256 tokens: {way}", fontsize=10)
        axes.set_yscale("log")
        axes.set_ylabel("ms")
    both = [
        (simulated, "simulated", OURS, [row["latency, recompute"] / row["latency, swap"] for row in simulated]),
        (measured, "measured on this CPU", OTHER, [row["ratio"] for row in measured]),
    ]
    for rows, label, color, values in both:
        panels[2].plot([row["block size"] for row in rows], values, "o-", color=color, markersize=4, label=label)
    panels[2].axhline(1, color="#444", linewidth=0.8)
    panels[2].set_ylabel("recompute / swap: above 1 swapping is better")
    panels[2].set_title("time of requests that make way for each other", fontsize=10)
    for axes in panels:
        axes.axvspan(16, 64, color=PAPER, alpha=0.6, label="paper: comparable")
        axes.set_xscale("log", base=2)
        sizes = [row["block size"] for row in (measured if axes is panels[1] else simulated)]
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("block size, tokens")
        axes.grid(alpha=0.3)
        axes.margins(y=0.3)
        axes.legend(fontsize=8, frameon=False, loc="best")
    figure.suptitle("Swapping beside recomputing (Fig. 19)", fontsize=10)
    return figure


def _draw_curves(axes, rows: Rows, colors: dict[str, str]) -> None:
    """Latency against rate, a line for each system, and where a rate counts as sustained."""
    for system, color in colors.items():
        some = [row for row in rows if row["system"] == system]
        axes.plot(
            [r["rate"] for r in some], [r["latency"] for r in some], "o-", color=color, label=system, markersize=3.5
        )
    axes.axhline(SUSTAINED, color="#888", linewidth=0.8, linestyle=":")
    axes.set_ylim(0, 1)
    axes.set_xlim(0, None)
    axes.set_xlabel("requests/s")
    axes.grid(alpha=0.3)


def _add_legend(figure, axes, columns: int = 4) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


PLOTS = {
    "2": draw_memory,
    "12": draw_latency,
    "13": draw_batches,
    "14": draw_outputs,
    "15": draw_sharing,
    "16": draw_prefix,
    "18": draw_block_size,
    "19": draw_swap,
}
