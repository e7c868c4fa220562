"""What is asked: prompts with output lengths, and when they arrive."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MOONCAKE_BLOCK = 512  # tokens that one of a trace's hash_ids stands for
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
    """Requests of a recorded trace, their tokens random. The format is read off the file:

    TIMESTAMP,ContextTokens,GeneratedTokens     the Azure LLM inference traces
    prompt_tokens,output_tokens                 lengths alone, without times
    {"timestamp", "input_length", "output_length", "hash_ids"}    Mooncake's: equal ids mean equal blocks of 512 tokens
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path, encoding="utf-8", newline="") as file:
        first = file.readline()
        lines = [first, *(line for line, _ in zip(file, range(count), strict=False))]
    if first.startswith("{"):
        rows = [json.loads(line) for line in lines[:count]]
        blocks: dict[int, list[int]] = {}
        asks = []
        for row in rows:
            ids: list[int] = []
            for block in row["hash_ids"]:
                if block not in blocks:
                    blocks[block] = random_ids(rng, vocab, MOONCAKE_BLOCK)
                ids += blocks[block]
            ids = ids[: row["input_length"]]
            asks.append(Ask(ids, len(ids), row["output_length"], row["timestamp"] / 1000 / speedup))
        return asks
    table = list(csv.DictReader(lines))[:count]
    names = set(table[0]) if table else set()
    if {"ContextTokens", "GeneratedTokens", "TIMESTAMP"} <= names:
        start = _seconds(table[0]["TIMESTAMP"])
        return [
            Ask(
                random_ids(rng, vocab, int(row["ContextTokens"])),
                int(row["ContextTokens"]),
                int(row["GeneratedTokens"]),
                (_seconds(row["TIMESTAMP"]) - start) / speedup,
            )
            for row in table
        ]
    if {"prompt_tokens", "output_tokens"} <= names:
        pairs = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in table]
        return [Ask(random_ids(rng, vocab, prompt), prompt, output) for prompt, output in pairs]
    raise ValueError(f"{path} is no trace of a known format: its first line is {first.strip()[:100]!r}")


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


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text[:26]).timestamp()  # the traces' seventh decimal is one too many
