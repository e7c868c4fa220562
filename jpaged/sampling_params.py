"""What a request asks of the sampler: names, defaults and meanings as in vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

SEED_MAX = 2**63 - 1
TOKEN_ID_MAX = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, checked when made: a ValueError says what was given and is allowed.

    temperature     0 is greedy (the most likely token, the lowest id of equals); otherwise divides the logits
    top_k           keep the k most likely tokens and those as likely as the k-th; 0 or -1 keeps all
    top_p           of what top_k left, keep the fewest most likely tokens whose probabilities reach top_p
    min_p           keep tokens at least min_p times as likely as the most likely one
    seed            the same seed gives the same tokens whatever else is in the batch; None draws one
    max_tokens      most tokens to generate; None is as many as the model's length allows
    stop_token_ids  tokens that end the output, besides the model's end-of-sequence tokens
    ignore_eos      go on after an end-of-sequence token
    n               outputs per prompt, the i-th (from 0) with seed + i; the prompt is computed once
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1

    def __post_init__(self) -> None:
        """Normalise numpy scalars and lists to plain Python values, and refuse everything else."""
        if not 0.0 <= _number("temperature", self.temperature) < math.inf:
            raise ValueError(f"temperature must be finite and at least 0 (0 is greedy), got {self.temperature!r}")
        if _integer("top_k", self.top_k) < -1 or self.top_k > TOKEN_ID_MAX:
            raise ValueError(f"top_k must be at least 1, or 0 or -1 to keep all tokens, got {self.top_k!r}")
        if not 0.0 < _number("top_p", self.top_p) <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}")
        if not 0.0 <= _number("min_p", self.min_p) <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p!r}")
        if self.seed is not None and not -SEED_MAX - 1 <= _integer("seed", self.seed) <= SEED_MAX:
            raise ValueError(f"seed must be None or fit 64 bits (-2**63 .. 2**63 - 1), got {self.seed!r}")
        if self.max_tokens is not None and _integer("max_tokens", self.max_tokens) < 1:
            raise ValueError(f"max_tokens must be at least 1, or None for the model's limit, got {self.max_tokens!r}")
        if not isinstance(self.ignore_eos, (bool, np.bool_)):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        if _integer("n", self.n) < 1:
            raise ValueError(f"n must be at least 1, got {self.n!r}")
        if self.n > 1 and self.temperature == 0.0:
            raise ValueError(f"n must be 1 with temperature 0, where all outputs would be the same; got {self.n!r}")

        if isinstance(self.stop_token_ids, (str, bytes)) or not hasattr(self.stop_token_ids, "__iter__"):
            raise ValueError(f"stop_token_ids must be a sequence of token ids, got {self.stop_token_ids!r}")
        stop_ids = tuple(_integer("stop_token_ids", token) for token in self.stop_token_ids)
        for token in stop_ids:
            if not 0 <= token <= TOKEN_ID_MAX:
                raise ValueError(f"stop_token_ids must hold token ids (0 or more), got {token!r}")

        for name, kind in (
            ("temperature", float),
            ("top_p", float),
            ("min_p", float),
            ("top_k", int),
            ("n", int),
        ):
            object.__setattr__(self, name, kind(getattr(self, name)))
        for name in ("seed", "max_tokens"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else int(value))
        object.__setattr__(self, "ignore_eos", bool(self.ignore_eos))
        object.__setattr__(self, "stop_token_ids", stop_ids)

    @property
    def greedy(self) -> bool:
        """Whether the request takes the most likely token each time (and needs no seed)."""
        return self.temperature == 0.0


def _number(name: str, value: object) -> float:
    """`value` as a float; ValueError for anything but a real number (NaN too, which no range contains)."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ValueError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    return float(value)


def _integer(name: str, value: object) -> int:
    """`value` as an int; ValueError for anything but an integer (True and 3.0 included)."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    return int(value)
