"""Fig. 2 and Fig. 13: where the KV memory goes, and how many requests run at once. Simulated."""

from __future__ import annotations

from typing import Any

from jpaged.simulation.paper.cores import map_cores
from jpaged.simulation.paper.setting import LABELS, SYSTEMS, draw, serve
from jpaged.simulation.records import Report

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
ORCA_SECONDS = 7200.0  # in Fig. 2, where a value of a tenth is to be compared
PARTS = ("token_states", "reserved", "internal", "external")
FULL = {"sharegpt": 8.0, "alpaca": 120.0}  # req/s that overload every system


def memory_use() -> list[dict[str, Any]]:
    """A row for each system: the Orca ones at the paper's rate, ours at one that keeps its queue full."""
    cases = []
    for name in ("sharegpt", "sharegpt scaled", "sharegpt ours"):
        for system in SYSTEMS:
            full = system == "jpaged"
            rate, seconds = (FULL["sharegpt"], 600.0) if full else (RATES["sharegpt"], ORCA_SECONDS)
            cases.append((system, name, rate, 120.0, seconds))
    return [
        {
            "lengths": name,
            "system": LABELS[system],
            **{part: 100 * getattr(report, part) for part in PARTS},
            "utilization": 100 * report.utilization,
            "paper": FIG2[system],
        }
        for (system, name, *_), report in zip(cases, map_cores(_serve, cases), strict=True)
    ]


def batches() -> list[dict[str, Any]]:
    """Mean batched requests at the paper's rates, and of ours where requests never run out."""
    cases = []
    for name in ("sharegpt", "alpaca"):
        seconds = SECONDS[name]
        cases += [(system, name, RATES[name], seconds / 10, seconds) for system in SYSTEMS]
        cases.append(("jpaged", name, FULL[name], 40.0, 200.0))
    rows = []
    for (system, name, rate, *_), report in zip(cases, map_cores(_serve, cases), strict=True):
        label = "jpaged, queue full" if rate == FULL[name] else LABELS[system]
        row = {"lengths": name, "system": label, "rate": rate, "batch": report.mean_batch}
        rows.append(row | {"paper": FIG13[name][system]})
    return rows


def _serve(system: str, name: str, rate: float, since: float, until: float) -> Report:
    """Only the memory of steps begun in [since, until) is of interest: what would come after is not run."""
    return serve(system, draw(name, rate, until), since=since, until=until, stop_at=until)
