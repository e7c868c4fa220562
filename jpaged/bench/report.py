"""Numbers of a run as vLLM names them, in JSON and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# Metric -> what it is called; milliseconds all of them.
METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass
class Result:
    """What became of one request; times in seconds."""

    prompt_len: int = 0
    output_len: int = 0
    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)  # between pieces of the stream, which may hold several tokens
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float:
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0

    def values(self, metric: str) -> list[float]:
        if metric == "itl":
            return self.itl
        if metric == "tpot":
            return [self.tpot] if self.output_len > 1 else []
        return [self.ttft if metric == "ttft" else self.latency]


def read_goodput(given: Sequence[str]) -> dict[str, float]:
    """{"ttft": milliseconds} from ["ttft:500", …]. Raises ValueError for what is no limit."""
    limits = {}
    for each in given:
        name, _, value = each.partition(":")
        if name not in METRICS or name == "itl":
            raise ValueError(f"goodput limits are ttft, tpot or e2el with milliseconds, as ttft:500; got {each!r}")
        limits[name] = float(value)
    return limits


def summarize(
    results: Sequence[Result], duration: float, percentiles: Sequence[float], goodput: Mapping[str, float]
) -> dict[str, Any]:
    """Fields as in the JSON of `vllm bench serve`."""
    done = [result for result in results if not result.error]
    prompt, output = (sum(getattr(each, name) for each in done) for name in ("prompt_len", "output_len"))
    found: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(results) - len(done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(done) / duration,
        "request_goodput": None,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "max_concurrent_requests": most_at_once(done),
    }
    if goodput:
        good = sum(all(each.values(name)[:1] <= [limit / 1000] for name, limit in goodput.items()) for each in done)
        found["request_goodput"] = good / duration
    for name in METRICS:
        values = np.array([value for each in done for value in each.values(name)]) * 1000
        found |= {f"{kind}_{name}_ms": _or_zero(function, values) for kind, function in _SUMS.items()}
        for percentile in percentiles:
            found[f"p{percentile:g}_{name}_ms"] = _or_zero(lambda v, p=percentile: np.percentile(v, p), values)
    return found


_SUMS = {"mean": np.mean, "median": np.median, "std": np.std}


def _or_zero(function: Any, values: np.ndarray) -> float:
    return float(function(values)) if values.size else 0.0


def most_at_once(results: Sequence[Result]) -> int:
    events = sorted(event for each in results for event in ((each.start, 1), (each.start + each.latency, -1)))
    most = now = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most


def format_table(found: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The report that people read."""
    lines = [" Serving Benchmark Result ".center(54, "=")]

    def line(text: str, value: float | int | None) -> None:
        if value is not None:
            shown = f"{value:.2f}" if isinstance(value, float) else str(value)
            lines.append(f"{text + ':':<42}{shown:>12}")

    line("Successful requests", found["completed"])
    line("Failed requests", found["failed"])
    line("Benchmark duration (s)", found["duration"])
    line("Total input tokens", found["total_input_tokens"])
    line("Total generated tokens", found["total_output_tokens"])
    line("Request throughput (req/s)", found["request_throughput"])
    line("Request goodput (req/s)", found["request_goodput"])
    line("Output token throughput (tok/s)", found["output_throughput"])
    line("Total token throughput (tok/s)", found["total_token_throughput"])
    line("Peak concurrent requests", found["max_concurrent_requests"])
    for name in metrics:
        lines.append(f" {METRICS[name]} ".center(54, "-"))
        for kind in ("mean", "median", *(f"p{percentile:g}" for percentile in percentiles)):
            line(f"{kind.capitalize()} {name.upper()} (ms)", found[f"{kind}_{name}_ms"])
    return "\n".join([*lines, "=" * 54])


def save_json(path: str | Path, found: Mapping[str, Any]) -> None:
    """Write a file; what is infinite is written as a text."""
    clean = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(clean, indent=2) + "\n", encoding="utf-8")
