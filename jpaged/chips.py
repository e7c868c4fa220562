"""Accelerators by their makers' numbers."""

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
