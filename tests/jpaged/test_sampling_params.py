"""SamplingParams: defaults, what is accepted, and that everything else is refused by name."""

import dataclasses

import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams


def test_defaults_are_vllms() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": None,
        "max_tokens": 16,
        "stop_token_ids": (),
        "ignore_eos": False,
        "n": 1,
    }


def test_numpy_values_and_lists_become_plain_ones() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint8(7), stop_token_ids=[np.int32(2), 5]
    )
    assert (params.temperature, params.top_k, params.seed, params.stop_token_ids) == (0.5, 3, 7, (2, 5))
    assert type(params.temperature) is float and type(params.top_k) is int and type(params.seed) is int
    assert hash(params) == hash(SamplingParams(temperature=0.5, top_k=3, seed=7, stop_token_ids=(2, 5)))


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0},
        {"temperature": 1e-30},
        {"top_k": -1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": None},
        {"stop_token_ids": range(3)},
    ],
)
def test_edges_that_are_allowed(given: dict) -> None:
    SamplingParams(**given)


def test_greedy_only_at_zero() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(temperature=-0.0).greedy
    assert not SamplingParams(temperature=1e-30).greedy


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("temperature", [float("nan"), -0.1, float("inf"), "1", None, True], "at least 0|a number"),
        ("top_k", [-2, 1.0, "5", None, True, 2**31], "at least 1|an integer"),
        ("top_p", [float("nan"), 0.0, 1.01, -1, None, False], r"\(0, 1\]|a number"),
        ("min_p", [float("nan"), -0.1, 1.01, None, True], r"\[0, 1\]|a number"),
        ("seed", [1.5, "a", True, 2**63, -(2**63) - 1], "64 bits|an integer"),
        ("max_tokens", [0, -1, 2.0, True, float("nan")], "at least 1|an integer"),
        ("stop_token_ids", [5, "5", b"5", [True], [1.0], [-1], [2**31], None], "token ids|an integer"),
        ("ignore_eos", [1, None, "no"], "True or False"),
        ("n", [0, 2, True, 1.0], "must be 1|an integer"),
    ],
)
def test_refuses_by_name(name: str, values: list, allowed: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"{name} must (?=.*({allowed}))?.*") as caught:
            SamplingParams(**{name: value})
        assert "got" in str(caught.value)
