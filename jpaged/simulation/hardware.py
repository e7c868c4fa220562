"""Accelerators by their makers' numbers, and models by theirs: what a roofline needs. Imports no JAX."""

from __future__ import annotations

from typing import NamedTuple


class Chip(NamedTuple):
    """One chip."""

    memory_bytes: int
    bandwidth: float  # bytes/s
    flops: float  # dense bfloat16 (or float16) products, 1/s


CHIPS = {
    "a100": Chip(40 << 30, 1.555e12, 312e12),  # A100-SXM4-40GB
    "h200": Chip(151_397_597_184, 4.8e12, 989e12),
    "v5e": Chip(16 << 30, 819e9, 197e12),
    "v6e": Chip(32 << 30, 1.64e12, 918e12),
}


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
