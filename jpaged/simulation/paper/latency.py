"""Fig. 12 and 14: normalized latency against request rate, and the rates that the systems sustain. Simulated.

Fig. 12 is one output a prompt, on both workloads; Fig. 14 several outputs, or beams, on Alpaca.
"""

from __future__ import annotations

from typing import Any

from jpaged.simulation.paper.setting import LABELS, SYSTEMS, draw, find_sustained, serve, trace_curves

# Requests/s between which a system's limit is looked for.
RATES = {
    "sharegpt": {"max": (0.4, 1.6), "pow2": (0.4, 1.6), "oracle": (0.5, 2.0), "jpaged": (0.8, 3.2)},
    "alpaca": {"max": (2.0, 8.0), "pow2": (8.0, 32.0), "oracle": (12.0, 48.0), "jpaged": (16.0, 64.0)},
}
SECONDS = {"sharegpt": 1200.0, "alpaca": 120.0}
# Of the paper's text (section 6.2), over its models: vLLM's rate over that of the others on ShareGPT.
PAPER12 = {"max": "2.7 to 8", "oracle": "1.7 to 2.7"}

OUTPUTS = (2, 4, 6)
OUTPUT_RATES = {"max": (1.0, 8.0), "pow2": (12.0, 48.0), "oracle": (20.0, 80.0), "jpaged": (36.0, 144.0)}  # outputs/s
OUTPUT_SECONDS = 60.0
# Section 6.3: "the improvement of vLLM over Orca (Oracle) on OPT-13B and the Alpaca dataset goes from 1.3x in basic
# sampling to 2.3x in beam search with a width of 6".
PAPER14 = {("one", 1): "1.3", ("beam", 6): "2.3"}


def latencies() -> list[dict[str, Any]]:
    """Fig. 12: a row for each lengths, system and rate that was run."""
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
    rates = [RATES[name][system] if n == 1 else OUTPUT_RATES[system] for _, name, system, n in cases]
    ranges = [(low / n, high / n) for (low, high), (*_, n) in zip(rates, cases, strict=True)]
    rows = []
    for (method, name, system, outputs), points in zip(cases, trace_curves(_latency, cases, ranges), strict=True):
        row = {"method": method, "lengths": name, "outputs": outputs, "system": LABELS[system]}
        rows += [row | {"rate": rate, "latency": latency} for rate, latency in points]
    return rows


def _latency(method: str, name: str, system: str, outputs: int, rate: float) -> float:
    seconds = SECONDS[name] if method == "one" else OUTPUT_SECONDS
    return serve(system, draw(name, rate, seconds, outputs=outputs, beams=method == "beam")).normalized_latency
