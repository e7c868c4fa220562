"""Checks of what users pass in: plain Python values back, ValueError naming the field and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

TOKEN_ID_MAX = 2**31 - 1


def as_number(name: str, value: object) -> float:
    """`value` as a float; ValueError for anything but a real number (NaN passes: no range contains it)."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ValueError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    return float(value)


def as_integer(name: str, value: object) -> int:
    """`value` as an int; ValueError for anything but an integer (True and 3.0 included)."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    return int(value)


def as_bool(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def as_token_id(name: str, value: object) -> int:
    token = as_integer(name, value)
    if not 0 <= token <= TOKEN_ID_MAX:
        raise ValueError(f"{name} must hold token ids (0 or more), got {token!r}")
    return token


def as_token_ids(name: str, value: object) -> tuple[int, ...]:
    """A tuple of token ids from any iterable of integers but a text."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name} must be a sequence of token ids, got {value!r}")
    return tuple(as_token_id(name, token) for token in value)


def as_texts(name: str, value: object) -> tuple[str, ...]:
    """A tuple of non-empty texts from one text, a sequence of texts, or None."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, bytes) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name} must be a text or a sequence of texts, got {value!r}")
    texts = tuple(value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must hold texts of at least one character, got {text!r}")
    return texts


def as_mapping(name: str, value: object) -> Mapping:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping, got {value!r} of type {type(value).__name__}")
    return value


def gib_to_bytes(name: str, gib: float) -> int:
    """Raises ValueError unless `gib` is a finite number of at least 0."""
    if not 0.0 <= as_number(name, gib) < float("inf"):
        raise ValueError(f"{name} must be 0 or more, in GiB, got {gib!r}")
    return int(gib * 2**30)
