"""What is asked: prompts with output lengths, and when they arrive."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jpaged.traces import TRACE_BLOCK, TraceRequest, read_trace

DATASETS = ("random", "trace", "custom")


@dataclass(frozen=True)
class Ask:
    """One request. `arrival`: seconds from the start, None where the arrival process says."""

    prompt: str | list[int]
    prompt_len: int | None  # tokens, None for a text
    output_len: int
    arrival: float | None = None


def random_asks(
    count: int, rng: np.random.Generator, vocab: int, *, input_len: int, output_len: int, prefix_len: int, ratio: float
) -> list[Ask]:
    """Prompts of random token ids behind a common prefix; lengths uniform within ±ratio of those given."""
    if not 0.0 <= ratio < 1.0:
        raise ValueError(f"random_range_ratio must be in [0, 1), got {ratio}")

    def lengths(mean: int) -> list[int]:
        low, high = math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))
        return rng.integers(max(low, 1), high + 1, count).tolist()

    prefix = random_ids(rng, vocab, prefix_len)
    asks = []
    for prompt, output in zip(lengths(input_len), lengths(output_len), strict=True):
        asks.append(Ask(prefix + random_ids(rng, vocab, prompt), prefix_len + prompt, output))
    return asks


def trace_asks(path: Path, count: int, rng: np.random.Generator, vocab: int, *, speedup: float = 1.0) -> list[Ask]:
    """Requests of a recorded trace (see `jpaged.traces`), their tokens random; blocks of equal names are equal."""
    blocks: dict[int, list[int]] = {}

    def prompt_ids(request: TraceRequest) -> list[int]:
        if not request.blocks:
            return random_ids(rng, vocab, request.prompt)
        for block in request.blocks:
            if block not in blocks:
                blocks[block] = random_ids(rng, vocab, TRACE_BLOCK)
        return [token for block in request.blocks for token in blocks[block]][: request.prompt]

    asks = []
    for request in read_trace(path, count):
        ids = prompt_ids(request)
        arrival = None if request.arrival is None else request.arrival / speedup
        asks.append(Ask(ids, len(ids), request.output, arrival))
    return asks


def custom_asks(path: Path, count: int, output_len: int) -> list[Ask]:
    """A JSON object a line: {"prompt": text or token ids, "output_tokens": optional}, as vLLM's custom dataset."""
    asks = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), (str, list)):
                raise ValueError(f'{path}, line {number}: needs a "prompt", got {line.strip()[:100]!r}')
            prompt = row["prompt"]
            length = len(prompt) if isinstance(prompt, list) else None
            asks.append(Ask(prompt, length, int(row.get("output_tokens", output_len))))
            if len(asks) == count:
                break
    return asks


def fitting(asks: Sequence[Ask], max_model_len: int | None) -> list[Ask]:
    """Those that the model's context holds."""
    if max_model_len is None:
        return list(asks)
    return [ask for ask in asks if (ask.prompt_len or 0) + ask.output_len <= max_model_len]


def arrival_times(asks: Sequence[Ask], rng: np.random.Generator, rate: float, burstiness: float) -> list[float]:
    """Seconds at which requests are sent: a trace's own, else a Poisson process (burstiness 1) of `rate` a second.

    Intervals are gamma-distributed with shape `burstiness`: below 1 they come in bursts, above 1 evenly. rate inf: all
    at once.
    """
    if not rate > 0 or not burstiness > 0:
        raise ValueError(f"request_rate and burstiness must be above 0, got {rate} and {burstiness}")
    if asks and all(ask.arrival is not None for ask in asks):
        return [ask.arrival or 0.0 for ask in asks]
    if math.isinf(rate):
        return [0.0] * len(asks)
    intervals = rng.gamma(burstiness, 1.0 / (rate * burstiness), len(asks))
    return [0.0, *np.cumsum(intervals)[:-1].tolist()] if asks else []


def random_ids(rng: np.random.Generator, vocab: int, count: int) -> list[int]:
    """Token ids; the first few, which are special in most vocabularies, are left out."""
    return rng.integers(min(10, vocab - 1), vocab, count).tolist()
