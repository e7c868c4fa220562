"""What is static about an attention call, in one hashable value."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

from pallas_kernels.checks import fail


@dataclass(frozen=True)
class AttentionSpec:
    """The options of `paged_attention` that a program is compiled for. Raises `ValueError` for bad ones.

    Attributes:
        scale: factor on the scores q . k, usually `D ** -0.5`.
        window: a row at position p sees positions `max(0, p - window + 1)` to p; None: all from 0.
        soft_cap: scores become `soft_cap * tanh(scale * q . k / soft_cap)`, as in Gemma 2; None: they stay.
        return_lse: whether the log of the softmax denominator is wanted too.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    return_lse: bool = False

    def __post_init__(self) -> None:
        if not _is_real(self.scale):
            fail("scale", repr(self.scale), "a finite number")
        if self.window is not None and not (
            isinstance(self.window, numbers.Integral) and not isinstance(self.window, bool) and self.window >= 1
        ):
            fail("window", repr(self.window), "None or an integer of at least 1")
        if self.soft_cap is not None and not (_is_real(self.soft_cap) and self.soft_cap > 0):
            fail("soft_cap", repr(self.soft_cap), "None or a finite number above 0")
        if not isinstance(self.return_lse, bool):
            fail("return_lse", repr(self.return_lse), "True or False")


def _is_real(x: object) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and math.isfinite(x)
