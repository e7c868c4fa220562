"""Recorded traces of real services, read by their columns. Imports no JAX."""

from __future__ import annotations

import csv
import datetime
import gzip
import itertools
import json
from pathlib import Path
from typing import NamedTuple

TRACE_BLOCK = 512  # tokens that one of a Mooncake trace's hash_ids stands for


class TraceRequest(NamedTuple):
    """One request of a trace.

    arrival  seconds from the trace's beginning; None where it tells no times
    prompt   tokens, likewise output
    blocks   what the prompt's blocks of TRACE_BLOCK tokens are, the last perhaps not full: equal numbers mean equal
             tokens up to the block's end
    """

    arrival: float | None
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path, count: int | None = None) -> list[TraceRequest]:
    """Requests of a trace (the first `count`), gzipped or not:

    TIMESTAMP,ContextTokens,GeneratedTokens                     the Azure LLM inference traces
    prompt_tokens,output_tokens                                 lengths alone, without times
    {"timestamp", "input_length", "output_length", "hash_ids"}  Mooncake's, a line of JSON each

    Raises ValueError for anything else.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path, encoding="utf-8", newline="") as file:
        lines = list(itertools.islice(file, None if count is None else count + 1))
    if lines and lines[0].startswith("{"):
        rows = [json.loads(line) for line in lines[:count]]
        return [
            TraceRequest(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
            for row in rows
        ]
    table = list(csv.DictReader(lines))
    names = set(table[0]) if table else set()
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
        # A seventh decimal is one too many for datetime.
        times = [datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in table]
        return [
            TraceRequest(at - times[0], int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for at, row in zip(times, table, strict=True)
        ]
    if {"prompt_tokens", "output_tokens"} <= names:
        return [TraceRequest(None, int(row["prompt_tokens"]), int(row["output_tokens"])) for row in table]
    first = lines[0].strip()[:100] if lines else ""
    raise ValueError(f"{path} is no trace of a known format: its first line is {first!r}")
