"""Models by their makers' numbers: what a roofline needs beside a chip (chips.py)."""

from __future__ import annotations

from typing import NamedTuple


class ModelSize(NamedTuple):
    """What a step's time depends on."""

    parameters: float
    weight_bytes: float
    layers: int
    attention_width: int  # query heads times head size
    kv_bytes: int  # of one token, over all layers


MODELS = {
    "opt-13b": ModelSize(13e9, 26e9, 40, 5120, 2 * 2 * 40 * 5120),
    "llama-13b": ModelSize(13e9, 26e9, 40, 5120, 2 * 2 * 40 * 5120),
    "llama-3.1-8b": ModelSize(8.03e9, 16.06e9, 32, 4096, 2 * 2 * 32 * 1024),
    "smollm2-135m": ModelSize(134.5e6, 269e6, 30, 576, 2 * 2 * 30 * 192),
}


def find(table: dict, name: str, what: str):
    """An entry by name; ValueError for an unknown one."""
    if name not in table:
        raise ValueError(f"{what} must be one of {', '.join(sorted(table))}, got {name!r}")
    return table[name]
