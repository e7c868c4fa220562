"""Text through the whole interface: stop strings across dispatches, streams, special cases of prompts and limits."""

from __future__ import annotations

import dataclasses

import pytest
from jpaged_models import GenerationDefaults
from test_engine_controls import word_tokenizer
from tiny import SIZES, greedy_reference, tiny_model

from jpaged import LLM, SamplingParams
from jpaged.sampling_params import RequestOutputKind

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PATH = greedy_reference([5, 6], 20)
WORDS = [f" w{token}" for token in PATH]


def change(**changes) -> SamplingParams:
    return dataclasses.replace(GREEDY, **changes)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dataclasses.replace(tiny_model(), tokenizer=word_tokenizer()), warm_up=False, **SIZES)


def run(llm: LLM, params: SamplingParams):
    (output,) = llm.generate("w5 w6", params, use_tqdm=False)
    assert llm.stats().blocks.used == 0
    return output.outputs[0]


@pytest.mark.parametrize("at", [0, 1, 7, 8, 9, 19])
def test_a_stop_string_ends_the_request_at_its_token(llm, at) -> None:
    """Found on the host, in the middle of a dispatch of several tokens: what was sampled after it is forgotten."""
    word = WORDS[at].strip()
    end = next(i for i, each in enumerate(WORDS) if word in each)
    completion = run(llm, change(stop=word, logprobs=0))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", word)
    assert completion.token_ids == PATH[: end + 1] and len(completion.logprobs) == end + 1
    whole = "".join(WORDS[: end + 1])
    assert completion.text == whole[: whole.index(word)]
    assert run(llm, change(stop=word, include_stop_str_in_output=True)).text == whole[: whole.index(word) + len(word)]


def test_a_stop_string_across_tokens_and_min_tokens(llm) -> None:
    stop = (WORDS[3] + WORDS[4])[-5:]
    assert run(llm, change(stop=[stop, "never"])).token_ids == PATH[:5]
    late = run(llm, change(stop=[stop], min_tokens=6))
    assert len(late.token_ids) > 6


def test_others_go_on_when_a_stop_string_ends_one(llm) -> None:
    outputs = llm.generate(["w5 w6", "w7", "w5 w6"], [change(stop=WORDS[4]), GREEDY, GREEDY], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 20, 20]
    assert outputs[1].outputs[0].token_ids == greedy_reference([7], 20)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_stream(llm, kind) -> None:
    params = [change(output_kind=kind, stop=WORDS[11]), change(output_kind=kind, logprobs=1)]
    expected = llm.generate(["w5 w6", "w7"], params, use_tqdm=False)
    seen: dict[str, list] = {}
    for output in llm.stream(["w5 w6", "w7"], params):
        seen.setdefault(output.request_id, []).append(output)
    for whole, outputs in zip(expected, (seen[key] for key in sorted(seen, key=int)), strict=True):
        completions = [output.outputs[0] for output in outputs]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        if kind is RequestOutputKind.DELTA:
            assert len(outputs) > 1
            assert "".join(each.text for each in completions) == whole.outputs[0].text
            assert [token for each in completions for token in each.token_ids] == whole.outputs[0].token_ids
            if whole.outputs[0].logprobs:
                assert [found for each in completions for found in each.logprobs] == whole.outputs[0].logprobs
        else:
            assert completions[-1] == whole.outputs[0]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_stream_of_several_outputs(llm, kind) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=2, max_tokens=9, ignore_eos=True, output_kind=kind)
    (whole,) = llm.generate("w5 w6", params, use_tqdm=False)
    outputs = list(llm.stream("w5 w6", params))
    assert llm.stats().blocks.used == 0, "blocks go back with the end of the stream"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind is RequestOutputKind.FINAL_ONLY:
        assert outputs[0].outputs == whole.outputs
        return
    texts = ["", "", ""]
    for output in outputs:
        for completion in output.outputs:
            old = texts[completion.index] if kind is RequestOutputKind.DELTA else ""
            texts[completion.index] = old + completion.text
    assert texts == [completion.text for completion in whole.outputs]


def test_leaving_a_stream_ends_its_requests(llm) -> None:
    stream = llm.stream(["w5", "w6", "w7"], GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.requests
    assert run(llm, GREEDY).token_ids == PATH
    with pytest.raises(ValueError, match="prompt 1: token id 97"):
        next(llm.stream([[5], [97]], GREEDY))
    assert not llm.engine.has_unfinished()


def test_truncated_prompts(llm) -> None:
    long = 2 * list(range(3, 90))
    for keep, kept in ((5, long[-5:]), (-1, long[-127:]), (60, long[-60:])):
        (output,) = llm.generate([long], change(truncate_prompt_tokens=keep, max_tokens=1), use_tqdm=False)
        assert output.prompt_token_ids == kept
    with pytest.raises(ValueError, match="the prompt has 174 tokens"):
        llm.generate([long], GREEDY, use_tqdm=False)


def test_max_tokens_far_above_the_models_limit(llm) -> None:
    completion = run(llm, change(max_tokens=10**9))
    assert len(completion.token_ids) == 126 and completion.finish_reason == "length"


def test_several_ends_of_text_from_the_checkpoint() -> None:
    """Any of the ids in generation_config.json ends the text, none before min_tokens, none with ignore_eos."""
    ends = (PATH[3], PATH[6])
    generation = GenerationDefaults(eos_token_ids=ends)
    loaded = dataclasses.replace(tiny_model(), tokenizer=word_tokenizer(), generation=generation)
    llm = LLM(loaded, warm_up=False, **SIZES)
    first = min(PATH.index(end) for end in ends)
    plain = run(llm, change(ignore_eos=False))
    assert plain.token_ids == PATH[: first + 1] and (plain.finish_reason, plain.stop_reason) == ("stop", None)
    assert plain.text == "".join(WORDS[:first])
    later = run(llm, change(ignore_eos=False, min_tokens=8))
    assert not set(later.token_ids[:8]) & set(ends) and len(later.token_ids) >= 8
    assert run(llm, change(ignore_eos=True)).token_ids == PATH
    assert not set(run(llm, change(ignore_eos=False, min_tokens=20)).token_ids) & set(ends)


def test_no_tokenizer_no_stop_strings() -> None:
    llm = LLM(tiny_model(), warm_up=False, **SIZES)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        llm.generate([[5]], change(stop="x"), use_tqdm=False)


def test_priority_of_a_request(llm) -> None:
    """What the engine is told for a request wins over its sampling parameters."""
    engine = llm.engine
    given = [engine.add_request("a", [5], change(priority=3)), engine.add_request("b", [5], GREEDY, priority=-1)]
    given.append(engine.add_request("c", [5], change(priority=3), priority=0))
    assert [request.priority for request in given] == [3, -1, 0]
    for request in given:
        engine.abort(request.request_id)
    while engine.has_unfinished():
        engine.step()
