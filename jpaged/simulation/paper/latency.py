"""Fig. 12 and 14: normalized latency against request rate, and the rates that the systems sustain. Simulated.

Fig. 12 is one output a prompt, on both workloads; Fig. 14 several outputs, or beams, on Alpaca.
"""

from __future__ import annotations

from typing import Any

from jpaged.simulation.paper.cores import map_cores
from jpaged.simulation.paper.setting import LABELS, SYSTEMS, draw, find_sustained, measure_curve

RATES: dict[str, tuple[float, ...]] = {
    "sharegpt": (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5),
    "alpaca": (2.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0, 32.0, 36.0),
}
SECONDS = {"sharegpt": 1200.0, "alpaca": 120.0}
# Of the paper's text (section 6.2), over its models: vLLM's rate over that of the others on ShareGPT.
PAPER12 = {"max": "2.7 to 8", "oracle": "1.7 to 2.7"}

OUTPUTS = (2, 4, 6)
OUTPUT_RATES = (1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 24.0, 28.0, 32.0, 36.0, 40.0, 48.0, 56.0, 64.0, 72.0, 80.0, 96.0)
OUTPUT_SECONDS = 60.0
# Section 6.3: "the improvement of vLLM over Orca (Oracle) on OPT-13B and the Alpaca dataset goes from 1.3x in basic
# sampling to 2.3x in beam search with a width of 6".
PAPER14 = {("one", 1): "1.3", ("beam", 6): "2.3"}


def latencies() -> list[dict[str, Any]]:
    """Fig. 12: a row for each lengths, system and rate, up to the first rate that it does not sustain."""
    cases = [("one", name, system, 1) for name in RATES for system in SYSTEMS]
    return _rows(cases)


def output_latencies() -> list[dict[str, Any]]:
    """Fig. 14: likewise for 2, 4 and 6 outputs of a prompt, sampled in parallel or by beam search, on Alpaca."""
    return _rows(
        [(method, "alpaca", system, n) for method in ("parallel", "beam") for n in OUTPUTS for system in SYSTEMS]
    )


def sustained(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rates at which the latency of the systems in `rows` crosses the limit, and ours over each."""
    cases: dict[tuple, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        systems = cases.setdefault((row["method"], row["lengths"], row["outputs"]), {})
        systems.setdefault(row["system"], []).append((row["rate"], row["latency"]))
    result = []
    for (method, lengths, outputs), systems in cases.items():
        ours = find_sustained(systems[LABELS["jpaged"]])
        for system in SYSTEMS:
            rate = find_sustained(systems[LABELS[system]])
            row = {"method": method, "lengths": lengths, "outputs": outputs, "system": LABELS[system]}
            paper = _paper(method, lengths, outputs, system)
            result.append(row | {"sustained": rate, "ratio": ours / rate, "paper": paper})
    return result


def _paper(method: str, lengths: str, outputs: int, system: str) -> str:
    if lengths == "sharegpt":
        return PAPER12.get(system, "")
    return PAPER14.get((method, outputs), "") if system == "oracle" else ""


def _rows(cases: list[tuple[str, str, str, int]]) -> list[dict[str, Any]]:
    rows = []
    for (method, name, system, outputs), points in zip(cases, map_cores(_curve, cases), strict=True):
        row = {"method": method, "lengths": name, "outputs": outputs, "system": LABELS[system]}
        rows += [row | {"rate": rate, "latency": latency} for rate, latency in points]
    return rows


def _curve(method: str, name: str, system: str, outputs: int) -> list[tuple[float, float]]:
    if method == "one":
        rates, seconds = RATES[name], SECONDS[name]
    else:
        rates, seconds = tuple(rate / outputs for rate in OUTPUT_RATES), OUTPUT_SECONDS
    beams = method == "beam"
    return measure_curve(system, lambda rate: draw(name, rate, seconds, outputs=outputs, beams=beams), rates)
