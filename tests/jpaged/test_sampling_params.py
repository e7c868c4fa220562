"""SamplingParams: defaults, what is accepted, and that everything else is refused by name."""

import dataclasses

import numpy as np
import pytest

from jpaged.sampling_params import RequestOutputKind, SamplingParams
from jpaged.structured_params import StructuredOutputsParams


def test_defaults_are_vllms() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "bad_words": (),
        "allowed_token_ids": None,
        "logit_bias": {},
        "min_tokens": 0,
        "max_tokens": 16,
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "detokenize": True,
        "truncate_prompt_tokens": None,
        "structured_outputs": None,
        "priority": 0,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "extra_args": {},
    }


def test_numpy_values_and_lists_become_plain_ones() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=np.uint8(7),
        stop_token_ids=[np.int32(2), 5],
        stop="end",
        allowed_token_ids=np.array([4, 5]),
        logit_bias={np.int32(3): np.float32(0.5)},
        structured_outputs={"choice": ["a", "b"]},
    )
    assert (params.temperature, params.top_k, params.seed, params.stop_token_ids) == (0.5, 3, 7, (2, 5))
    assert type(params.temperature) is float and type(params.top_k) is int and type(params.seed) is int
    assert (params.stop, params.allowed_token_ids, params.logit_bias) == (("end",), (4, 5), {3: 0.5})
    assert params.structured_outputs == StructuredOutputsParams(choice=("a", "b"))
    assert hash(params) == hash(dataclasses.replace(params)) and params == dataclasses.replace(params)
    assert SamplingParams(stop=None, bad_words=None, logit_bias=None, extra_args=None) == SamplingParams()


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
        {"max_tokens": 0},
        {"stop_token_ids": range(3)},
        {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
        {"min_tokens": 16},
        {"min_tokens": 100, "max_tokens": None},
        {"logprobs": -1, "prompt_logprobs": 0},
        {"truncate_prompt_tokens": -1},
        {"priority": -5},
    ],
)
def test_edges_that_are_allowed(given: dict) -> None:
    SamplingParams(**given)


def test_greedy_only_at_zero() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(temperature=-0.0).greedy
    assert not SamplingParams(temperature=1e-30).greedy


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("temperature", [NAN, -0.1, float("inf"), "1", None, True], "at least 0|a number"),
        ("top_k", [-2, 1.0, "5", None, True, 2**31], "at least 1|an integer"),
        ("top_p", [NAN, 0.0, 1.01, -1, None, False], r"\(0, 1\]|a number"),
        ("min_p", [NAN, -0.1, 1.01, None, True], r"\[0, 1\]|a number"),
        ("presence_penalty", [NAN, -2.01, 2.1, "1"], r"\[-2, 2\]|a number"),
        ("frequency_penalty", [NAN, -2.01, 2.1, None], r"\[-2, 2\]|a number"),
        ("repetition_penalty", [NAN, 0.0, -1, float("inf"), None], "above 0|a number"),
        ("seed", [1.5, "a", True, 2**63, -(2**63) - 1], "64 bits|an integer"),
        ("max_tokens", [-1, 2.0, True, NAN], "at least 0|an integer"),
        ("min_tokens", [-1, 17, 1.0, None], "at most max_tokens=16|an integer"),
        ("stop", [[""], [5], 5, b"x"], "texts"),
        ("stop_token_ids", [5, "5", b"5", [True], [1.0], [-1], [2**31], None], "token ids|an integer"),
        ("bad_words", [[""], 3, [None]], "texts"),
        ("allowed_token_ids", [[], 3, "a", [-1], [0.5]], "token id|an integer"),
        (
            "logit_bias",
            [[1], {-1: 0}, {"1": 0}, {1: NAN}, {1: float("-inf")}, {1: None}],
            "mapping|token|finite|a number|an integer",
        ),
        ("ignore_eos", [1, None, "no"], "True or False"),
        ("detokenize", [1, None], "True or False"),
        ("logprobs", [-2, True, 1.0], "at least 0|an integer"),
        ("prompt_logprobs", [-2, True, "1"], "at least 0|an integer"),
        ("truncate_prompt_tokens", [0, -2, 1.5], "at least 1|an integer"),
        ("structured_outputs", ["json", 1], "StructuredOutputsParams"),
        ("output_kind", ["delta", None, 1], "RequestOutputKind"),
        ("priority", [None, 0.5], "an integer"),
        ("extra_args", [1, {"x": "y"}], "a mapping|a number"),
        ("n", [0, -1, True, 1.0], "at least 1|an integer"),
    ],
)
def test_refuses_by_name(name: str, values: list, allowed: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"{name}.* must .*({allowed})") as caught:
            SamplingParams(**{name: value})
        assert "got" in str(caught.value)


def test_several_greedy_outputs_would_be_the_same() -> None:
    with pytest.raises(ValueError, match=r"n must be 1 with temperature 0.*got 2"):
        SamplingParams(n=2, temperature=0.0)


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match="stop must be empty with detokenize=False"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, got none"),
        ({"json": "{}", "regex": "a"}, r"got \['json', 'regex'\]"),
        ({"json": 5}, "json must be a text"),
        ({"regex": ""}, "regex must be a text that is not empty"),
        ({"choice": [""]}, "choice must hold texts"),
        ({"jsonschema": "{}"}, r"knows \[.*got \['jsonschema'\]"),
    ],
)
def test_structured_outputs_are_checked(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=given)
