"""Stop strings: the earliest end wins, nothing is shown too early or held too long; against a search of the whole."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from jpaged_models import Tokenizer

from jpaged.completion import OutputStream, make_completion
from jpaged.output_text import OutputText
from jpaged.request import Request
from jpaged.sampling_params import RequestOutputKind, SamplingParams
from jpaged.stop_strings import count_held, find_stop

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3)


def letter_tokenizer() -> Tokenizer:
    """One token a letter; "€" is three byte tokens; "<end>" is special."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({s: i for i, s in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend)


LETTERS = letter_tokenizer()


def make_request(prompt: str, **params: object) -> Request:
    sampling = SamplingParams(max_tokens=100, **params)
    ids = LETTERS.encode(prompt)
    request = Request("r", ids, sampling, 100, 0)
    request.text = OutputText(LETTERS, ids, sampling)
    return request


def play(request: Request, text: str, sizes: list[int] | None = None) -> list[str]:
    """Give the request the tokens of a text, some at a time; the text shown after each time."""
    tokens, shown, at = LETTERS.encode(text), [], 0
    for size in sizes or [1] * len(tokens):
        request.output_token_ids += tokens[at : at + size]
        at += size
        if at >= len(tokens):
            request.finish("length")
        stop = request.text.update(request)
        if stop is not None:
            request.finish("stop", stop)
        shown.append(request.text.shown(request))
        if request.finished:
            break
    return shown


def first_stop(text: str, stops: list[str], min_tokens: int = 0) -> tuple[int, str] | None:
    """(end, stop) by looking at every prefix of the text."""
    for end in range(min_tokens + 1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            return end, max(endings, key=len)
    return None


@given(TEXT, STOPS, st.integers(0, 4), st.lists(st.integers(1, 6), min_size=31, max_size=31))
def test_any_text_and_stops(text: str, stops: list[str], min_tokens: int, sizes: list[int]) -> None:
    """However many tokens come at a time: the same stop, the same text, and no text shown that is taken back."""
    expected = first_stop(text, stops, min_tokens)
    for include in (False, True):
        request = make_request("aab", stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
        shown = play(request, text, sizes) if text else [""]
        for earlier, later in itertools.pairwise(shown):
            assert later.startswith(earlier)
        if expected is None:
            assert shown[-1] == text and request.stop_reason is None
        else:
            end, stop = expected
            assert (request.finish_reason, request.stop_reason) == ("stop", stop)
            assert shown[-1] == text[: end if include else end - len(stop)]
            assert request.output_token_ids == LETTERS.encode(text[:end])


@given(TEXT, STOPS)
def test_held_back_as_long_as_it_could_become_a_stop(text: str, stops: list[str]) -> None:
    held = count_held(text, stops)
    could = [
        n for n in range(len(text) + 1) for stop in stops if n < len(stop) and stop.startswith(text[len(text) - n :])
    ]
    assert held == max(could)


def test_earliest_end_then_longest() -> None:
    assert find_stop("xxabcd", 0, ["bcd", "c"]) == ("c", 4, 5)
    assert find_stop("xxabcd", 0, ["c", "abc", "bc"]) == ("abc", 2, 5)
    assert find_stop("abab", 2, ["ab"]) == ("ab", 2, 4)
    assert find_stop("aba", 3, ["ab"]) is None


def test_seven_letters_one_by_one() -> None:
    request = make_request("say ", stop="goodbye")
    held = ["a "] * 6  # "goodby" may become "goodbye"; after "goodbyg" only the last letter may
    shown = ["a", "a ", *held, "a goodby", "a goodbyg ", *["a goodbyg "] * 7]
    assert play(request, "a goodbyg goodbye and more") == shown
    assert request.stop_reason == "goodbye" and len(request.output_token_ids) == len("a goodbyg goodbye")


def test_the_prompts_last_character_is_not_part_of_a_stop() -> None:
    request = make_request("the x", stop="xy")
    assert play(request, "yz xy")[-1] == "yz "


def test_a_stop_inside_characters_of_several_bytes() -> None:
    request = make_request("", stop="€!")
    assert play(request, "a€€!b") == ["a", "a", "a", "a", "a", "a", "a€", "a€"]


def test_half_a_character_at_the_end_is_searched_too() -> None:
    request = make_request("", stop="\ufffd")
    tokens = LETTERS.encode("a€")[:2]
    request.output_token_ids = tokens
    request.finish("length")
    assert request.text.update(request) == "\ufffd" and request.text.shown(request) == "a"


def test_the_token_that_ended_it_is_shown_only_if_asked() -> None:
    end = LETTERS.backend.token_to_id("<end>")
    for include, skip, expected in ((False, False, "ab"), (True, False, "ab<end>"), (True, True, "ab")):
        for stop in ((), ("zz",)):
            request = make_request(
                "x", stop=stop, include_stop_str_in_output=include, skip_special_tokens=skip, stop_token_ids=[end]
            )
            request.stop_ids = frozenset({end})
            request.append([*LETTERS.encode("ab"), end])
            assert request.text.update(request) is None
            assert request.text.shown(request) == expected and request.stop_reason == end


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_streams_of_every_kind(kind: RequestOutputKind) -> None:
    request = make_request("x", stop=["END"], output_kind=kind)
    stream, outputs = OutputStream(LETTERS), []
    for letter in "one ENE €END":
        request.output_token_ids += LETTERS.encode(letter)
        stop = request.text.update(request)
        if stop:
            request.finish("stop", stop)
        output = stream.next([request])
        outputs += [] if output is None else [output]
    tokens = LETTERS.encode("one ENE €END")
    last = outputs[-1]
    assert last.finished and last.outputs[0].stop_reason == "END"
    if kind is RequestOutputKind.DELTA:
        assert "".join(each.outputs[0].text for each in outputs) == "one ENE €"
        assert [token for each in outputs for token in each.outputs[0].token_ids] == tokens
    else:
        assert last.outputs[0].text == "one ENE €" and last.outputs[0].token_ids == tokens
        assert len(outputs) == (1 if kind is RequestOutputKind.FINAL_ONLY else 12)
        assert last.outputs[0] == make_completion(request, LETTERS)
    assert all(not each.finished for each in outputs[:-1])
    # One copy of the prompt for the whole stream, and not the engine's own list.
    assert len({id(each.prompt_token_ids) for each in outputs}) == 1
    assert last.prompt_token_ids == request.prompt_token_ids and last.prompt_token_ids is not request.prompt_token_ids


def test_no_text_without_detokenize() -> None:
    params = dataclasses.replace(SamplingParams(), detokenize=False)
    request = Request("r", [1], params, 5, 0)
    request.append([2, 3])
    assert make_completion(request, None).text == ""
