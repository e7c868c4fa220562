"""Fig. 12: normalized latency against request rate, and the rates that the systems sustain. Simulated."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from jpaged.simulation.paper.setting import LABELS, SYSTEMS, draw, serve

RATES = {
    "sharegpt": (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5),
    "alpaca": (2.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0, 32.0, 36.0),
}
SECONDS = {"sharegpt": 1200.0, "alpaca": 120.0}
SUSTAINED = {"sharegpt": 0.3, "alpaca": 0.3}  # s/token that a rate must stay below
# Of the paper's text (section 6.2), over its models: vLLM's rate over that of the others on ShareGPT.
PAPER = {"max": "2.7 to 8", "oracle": "1.7 to 2.7"}


def latencies() -> list[dict[str, Any]]:
    """A row for each lengths, system and rate, up to the first rate that it does not sustain."""
    rows = []
    for name, rates in RATES.items():
        for system in SYSTEMS:
            for rate in rates:
                seconds = SECONDS[name]
                report = serve(system, draw(name, rate, seconds), since=0, until=seconds)
                row = {"lengths": name, "system": LABELS[system], "rate": rate}
                rows.append(row | {"latency": report.normalized_latency})
                if report.normalized_latency > 1.0:
                    break
    return rows


def sustained(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rate at which each system's latency crosses the limit, interpolated, and ours over it."""
    result = []
    for name in RATES:
        found = {}
        for system in SYSTEMS:
            points = [(r["rate"], r["latency"]) for r in rows if (r["lengths"], r["system"]) == (name, LABELS[system])]
            found[system] = _crossing(points, SUSTAINED[name])
        for system in SYSTEMS:
            paper = PAPER.get(system, "") if name == "sharegpt" else ""
            row = {"lengths": name, "system": LABELS[system], "sustained": found[system]}
            result.append(row | {"ratio": found["jpaged"] / found[system], "paper": paper})
    return result


def _crossing(points: list[tuple[float, float]], limit: float) -> float:
    for (rate, latency), (following, more) in pairwise(points):
        if latency <= limit < more:
            return rate + (following - rate) * (limit - latency) / (more - latency)
    return points[-1][0] if points[-1][1] <= limit else points[0][0]
