"""How long a step takes: models of a device. Imports no JAX.

`Roofline` knows a machine by its memory bandwidth and matrix rate, `FittedCost` by steps that were measured on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jpaged.chips import CHIPS, Chip
from jpaged.simulation.hardware import MODELS, ModelSize, find
from jpaged.simulation.shape import StepShape


class CostModel(Protocol):
    def seconds(self, shape: StepShape) -> float:
        """How long the step takes, above 0."""


@dataclass(frozen=True)
class Roofline:
    """A step ends when its bytes have been read and its products made; what takes longer counts.

    Weights are read once an iteration, keys and values once by every row that decodes; a block copied on write is read
    and written. Copies to the host and back run before the step and not beside it. `step_seconds`, `request_seconds`
    and `row_seconds` are what software adds to every iteration, and to every request and every sequence in it;
    `efficiency` is the share of bandwidth and matrix rate that is reached, and `attention_slowdown` how many times as
    long reading keys and values takes.
    """

    chip: Chip
    model: ModelSize
    efficiency: float = 1.0
    step_seconds: float = 0.0
    request_seconds: float = 0.0
    row_seconds: float = 0.0
    attention_slowdown: float = 1.0
    host_bandwidth: float = 25e9  # bytes/s of copies to the host and back, PCIe 4.0 x16
    transfer_seconds: float = 0.0  # of each block copied there or back, besides its bytes

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency must be in (0, 1], got {self.efficiency}")

    def seconds(self, shape: StepShape) -> float:
        chip, model = self.chip, self.model
        block_bytes = shape.block_size * model.kv_bytes
        read = shape.iterations * model.weight_bytes + shape.context * model.kv_bytes * self.attention_slowdown
        read += 2 * shape.copied * block_bytes
        products = 2 * model.parameters * shape.tokens
        products += 4 * model.layers * model.attention_width * (shape.context + shape.attended)
        device = max(read / chip.bandwidth, products / chip.flops) / self.efficiency
        rows = shape.decoded + shape.chunks
        host = shape.moved * (block_bytes / self.host_bandwidth + self.transfer_seconds)
        software = self.step_seconds + shape.requests * self.request_seconds
        return device + host + shape.iterations * software + rows * self.row_seconds


def roofline(chip: str, model: str, **more: float) -> Roofline:
    """A roofline by names. Raises ValueError for unknown ones."""
    return Roofline(find(CHIPS, chip, "chip"), find(MODELS, model, "model"), **more)


# What a measured step's time is made of, seconds each: per dispatch, per iteration, and per unit of work.
DECODE_TERMS = ("dispatch", "iteration", "row", "context")
MIXED_TERMS = ("dispatch", "token", "size", "sampled", "context", "attended")


def terms(shape: StepShape) -> np.ndarray:
    """f64[F]: how often each term of the step's kind occurs in it."""
    if shape.mixed:
        tokens = shape.rows + shape.prefill
        return np.array([1.0, tokens, shape.size, shape.sampled, shape.context, shape.attended])
    return np.array([1.0, shape.iterations, shape.decoded, shape.context])


@dataclass(frozen=True)
class FittedCost:
    """Sums of terms, with coefficients by least squares over measured steps."""

    decode: dict[str, float]
    mixed: dict[str, float]
    about: dict[str, Any]  # what was measured, where

    def seconds(self, shape: StepShape) -> float:
        coefficients = self.mixed if shape.mixed else self.decode
        names = MIXED_TERMS if shape.mixed else DECODE_TERMS
        return float(terms(shape) @ np.array([coefficients[name] for name in names]))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"decode": self.decode, "mixed": self.mixed, "about": self.about}, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> FittedCost:
        """Raises ValueError for a file that is none of ours."""
        data = json.loads(path.read_text(encoding="utf-8"))
        kinds = {"decode": DECODE_TERMS, "mixed": MIXED_TERMS}
        for kind, names in kinds.items():
            found = data.get(kind) if isinstance(data, dict) else None
            if not isinstance(found, dict) or set(found) != set(names):
                have = sorted(found) if isinstance(found, dict) else found
                raise ValueError(f"{path} holds no fitted cost model: {kind!r} must have the terms {names}, got {have}")
            for name, value in found.items():
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                    raise ValueError(f"{path}: {kind} {name} must be seconds of at least 0, got {value!r}")
        if not isinstance(data.get("about", {}), dict):
            raise ValueError(f"{path}: 'about' must say what was measured, by name, got {data['about']!r}")
        return FittedCost(data["decode"], data["mixed"], data.get("about", {}))


def fit_cost(steps: Sequence[tuple[StepShape, float]], about: dict[str, Any]) -> FittedCost:
    """Coefficients for measured (shape, seconds). ValueError where a kind of step is missing."""
    found = {}
    for mixed, names in ((False, DECODE_TERMS), (True, MIXED_TERMS)):
        some = [(terms(shape), seconds) for shape, seconds in steps if shape.mixed == mixed]
        if len(some) < len(names):
            kind = "mixed" if mixed else "decode"
            raise ValueError(f"{len(some)} {kind} steps were measured, at least {len(names)} are needed for a fit")
        table, seconds = np.array([each for each, _ in some]), np.array([took for _, took in some])
        found[mixed] = dict(zip(names, _nonnegative(table, seconds).tolist(), strict=True))
    return FittedCost(found[False], found[True], about)


def _nonnegative(table: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Least squares with no coefficient below 0: the most negative one is left out until none is.

    Steps are weighted by the root of their time, between fitting their sum and fitting each.
    """
    weight = 1 / np.sqrt(seconds)
    scale = np.maximum(np.abs(table).max(0), 1e-30)
    kept = np.ones(table.shape[1], bool)
    while True:
        solution = np.zeros(table.shape[1])
        weighted = (table / scale * weight[:, None])[:, kept]
        solution[kept] = np.linalg.lstsq(weighted, seconds * weight, rcond=None)[0]
        if (solution >= 0).all():
            return solution / scale
        kept[np.argmin(solution)] = False
