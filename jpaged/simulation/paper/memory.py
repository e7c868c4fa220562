"""Fig. 2 and Fig. 13: where the KV memory goes, and how many requests run at once. Simulated."""

from __future__ import annotations

from typing import Any

from jpaged.simulation.paper.setting import LABELS, SYSTEMS, draw, serve

# Percent of the KV memory: token states, reserved, internal, external and others. (Of vLLM only the first is told.)
FIG2 = {
    "max": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 13.6, 41.6),
    "oracle": (38.2, 25.2, 0.0, 36.6),
    "jpaged": (96.3,),
}
FIG13 = {
    "sharegpt": dict(zip(SYSTEMS, (7.00, 9.81, 13.62, 30.42), strict=True)),
    "alpaca": dict(zip(SYSTEMS, (7.00, 43.24, 72.75, 132.44), strict=True)),
}
RATES = {"sharegpt": 2.0, "alpaca": 30.0}
SECONDS = {"sharegpt": 1800.0, "alpaca": 300.0}
PARTS = ("token_states", "reserved", "internal", "external")
FULL = {"sharegpt": 8.0, "alpaca": 120.0}  # req/s that overload every system


def memory_use() -> list[dict[str, Any]]:
    """A row for each system at a rate that keeps its queue full, and at the paper's."""
    rows = []
    for name in ("sharegpt", "sharegpt scaled", "sharegpt ours"):
        for system in SYSTEMS:
            rate = FULL["sharegpt"] if system == "jpaged" else RATES["sharegpt"]
            seconds = 600.0 if system == "jpaged" else SECONDS["sharegpt"]
            report = serve(system, draw(name, rate, seconds), since=120, until=seconds)
            rows.append(
                {
                    "lengths": name,
                    "system": LABELS[system],
                    **{part: 100 * getattr(report, part) for part in PARTS},
                    "utilization": 100 * report.utilization,
                    "paper": FIG2[system],
                }
            )
    return rows


def batches() -> list[dict[str, Any]]:
    """Mean batched requests at the paper's rates, and of ours where requests never run out."""
    rows = []
    for name in ("sharegpt", "alpaca"):
        seconds = SECONDS[name]
        for system in SYSTEMS:
            report = serve(system, draw(name, RATES[name], seconds), since=seconds / 10, until=seconds)
            row = {"lengths": name, "system": LABELS[system], "rate": RATES[name], "batch": report.mean_batch}
            rows.append(row | {"paper": FIG13[name][system]})
        full = serve("jpaged", draw(name, FULL[name], 200.0), since=40, until=200)
        row = {"lengths": name, "system": "jpaged, queue full", "rate": FULL[name], "batch": full.mean_batch}
        rows.append(row | {"paper": FIG13[name]["jpaged"]})
    return rows
