"""Fig. 15 and 16: what sharing saves, by the engine's own block accounting and prefix index. Simulated."""

from __future__ import annotations

from typing import Any

import numpy as np

from jpaged.simulation.jobs import Job, geometric_lengths, poisson_jobs
from jpaged.simulation.paper.cores import map_cores
from jpaged.simulation.paper.setting import ALPACA, LABELS, draw, draw_shape, find_sustained, serve, trace_curves

# Percent of blocks saved, over 2, 4 and 6 outputs or beams.
PAPER15 = {
    ("parallel", "alpaca"): "6.1 to 9.8",
    ("parallel", "sharegpt"): "16.2 to 30.5",
    ("beam", "alpaca"): "37.6 to 55.2",
    ("beam", "sharegpt"): "44.3 to 66.3",
}
RATES = {"alpaca": 4.0, "sharegpt": 0.3}  # below what any of them sustains
SECONDS = {"alpaca": 60.0, "sharegpt": 400.0}

SHAPES = (
    ("geometric", "geometric"),
    ("lognormal 0.25", "geometric"),
    ("lognormal 0.5", "geometric"),
    ("lognormal 0.25", "lognormal 1.0"),
    ("lognormal 0.25", "lognormal 1.5"),
    ("geometric", "lognormal 1.5"),
)

# Fig. 16: LLaMA-13B translates English to German behind an example or five; vLLM's throughput over Orca (Oracle)'s.
PAPER16 = {80: 1.67, 341: 3.58}
OWN_PROMPT, OUTPUT = 40, 40  # means of a sentence and its translation; the paper does not tell them
PREFIX_RATES = {
    80: {"oracle": (12.0, 48.0), "jpaged unshared": (16.0, 64.0), "jpaged": (20.0, 80.0)},
    341: {"oracle": (6.0, 24.0), "jpaged unshared": (8.0, 32.0), "jpaged": (18.0, 72.0)},
}
PREFIX_SECONDS = 60.0
SYSTEMS16 = ("oracle", "jpaged unshared", "jpaged")
LABELS16 = {"oracle": LABELS["oracle"], "jpaged unshared": "jpaged, nothing shared", "jpaged": "jpaged, prefix shared"}


def savings() -> list[dict[str, Any]]:
    """Fig. 15: share of blocks saved by several outputs of a prompt, and by beams."""
    cases = [(method, name, n) for method in ("parallel", "beam") for name in RATES for n in (2, 4, 6)]
    return [
        {"method": method, "lengths": name, "outputs": n, "saved": 100 * saved, "paper": PAPER15[method, name]}
        for (method, name, n), saved in zip(cases, map_cores(_saving, cases), strict=True)
    ]


def savings_by_shape() -> list[dict[str, Any]]:
    """Fig. 15 on Alpaca again, with other distributions of the same means: what of it comes from their shape.

    Lognormal lengths of spread s deviate by sqrt(exp(s * s) - 1) times their mean; geometric ones by once their mean.
    """
    cases = [(prompt, output, n) for prompt, output in SHAPES for n in (2, 4, 6)]
    results = iter(map_cores(_saving_of_shape, cases))
    return [
        {"prompts": prompt, "outputs": output, **{f"saved, {n}": 100 * next(results) for n in (2, 4, 6)}}
        for prompt, output in SHAPES
    ]


def prefix_latencies() -> list[dict[str, Any]]:
    """Fig. 16: latency against rate of requests that begin with the same 80 or 341 tokens."""
    cases = [(prefix, system) for prefix in PAPER16 for system in SYSTEMS16]
    ranges = [PREFIX_RATES[prefix][system] for prefix, system in cases]
    return [
        {"prefix": prefix, "system": LABELS16[system], "rate": rate, "latency": latency}
        for (prefix, system), points in zip(cases, trace_curves(_prefix_latency, cases, ranges), strict=True)
        for rate, latency in points
    ]


def prefix_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sustained rates of Fig. 16, and ours over each."""
    result = []
    for prefix, paper in PAPER16.items():
        rates = {
            label: find_sustained(
                [(r["rate"], r["latency"]) for r in rows if (r["prefix"], r["system"]) == (prefix, label)]
            )
            for label in LABELS16.values()
        }
        ours = rates[LABELS16["jpaged"]]
        for label, rate in rates.items():
            row = {"prefix": prefix, "system": label, "sustained": rate, "ratio": ours / rate}
            result.append(row | {"paper": paper if label == LABELS16["oracle"] else None})
    return result


def prefix_jobs(prefix: int, rate: float, block_size: int = 16) -> list[Job]:
    """Translations behind a common prefix. What of it fills no whole block is nobody else's (as in the paper)."""
    rng = np.random.default_rng(0)
    lengths = geometric_lengths(OWN_PROMPT, OUTPUT, 20_000, rng)
    lengths[:, 0] += prefix
    common = tuple(range(prefix // block_size))
    return poisson_jobs(lengths, rate, PREFIX_SECONDS, rng, prefix=common, prefix_block=block_size)


def _saving(method: str, name: str, outputs: int) -> float:
    jobs = draw(name, RATES[name], SECONDS[name], outputs=outputs, beams=method == "beam")
    return serve("jpaged", jobs).mean_saved


def _saving_of_shape(prompt: str, output: str, outputs: int) -> float:
    rng = np.random.default_rng(0)
    columns = [draw_shape(shape, mean, rng) for shape, mean in ((prompt, ALPACA[0]), (output, ALPACA[1]))]
    lengths = np.minimum(np.stack(columns, 1), 1000)
    jobs = poisson_jobs(lengths, RATES["alpaca"], SECONDS["alpaca"], rng, outputs=outputs)
    return serve("jpaged", jobs).mean_saved


def _prefix_latency(prefix: int, system: str, rate: float) -> float:
    name = system.removesuffix(" unshared")
    return serve(name, prefix_jobs(prefix, rate), caching=system == "jpaged").normalized_latency
