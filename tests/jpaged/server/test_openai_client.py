"""OpenAI's own client against a server process: what it gets is what the model says (tiny.greedy_reference)."""

from __future__ import annotations

import json
import math

import numpy as np
import openai
import pytest
from ascii_model import ascii_tokenizer
from beam_reference import beam_reference
from tiny import greedy_reference

from jpaged import BeamSearchParams

TOKENIZER = ascii_tokenizer()
GREEDY = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
FLAG = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": FLAG}} for name in ("first", "second")]


def reference(prompt: str, count: int = 12) -> str:
    return TOKENIZER.decode(greedy_reference(TOKENIZER.encode(prompt), count))


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_models(client):
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny", "small"] and models[0].max_model_len == 128
    assert client.models.retrieve("small").root == "tiny"


def test_completion(client):
    answer = client.completions.create(model="small", prompt="hello", **GREEDY)
    (choice,) = answer.choices
    assert choice.text == reference("hello") and choice.finish_reason == "length"
    assert answer.model == "tiny" and answer.id.startswith("cmpl-") and answer.object == "text_completion"
    assert answer.usage.prompt_tokens == 5 and answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == 17
    again = client.completions.create(model="tiny", prompt="hello", **GREEDY)
    assert again.usage.prompt_tokens_details.cached_tokens == 4, "the first block of the prompt was kept"


def test_streamed_completion(client):
    options = {"include_usage": True}
    chunks = list(client.completions.create(model="tiny", prompt="hi", stream=True, stream_options=options, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == reference("hi")
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_several_prompts_with_several_outputs(client):
    prompts = ["ab", TOKENIZER.encode("cde")]
    asked = dict(model="tiny", prompt=prompts, n=2, temperature=1, seed=3, max_tokens=6)
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage.prompt_tokens == 5
    assert len({choice.text for choice in whole.choices}) == 4
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [choice.text for choice in whole.choices], "a seed gives the same tokens"


def test_echo_with_logprobs_scores_a_prompt(client):
    asked = dict(model="tiny", prompt="hello", echo=True, logprobs=3, temperature=0)
    scored = client.completions.create(**asked, max_tokens=0).choices[0]
    assert scored.text == "hello" and scored.logprobs.tokens == list("hello")
    assert scored.logprobs.text_offset == [0, 1, 2, 3, 4]
    first, *others = scored.logprobs.token_logprobs
    assert first is None and all(value < 0 for value in others) and scored.logprobs.top_logprobs[0] is None
    found = scored.logprobs
    for token, value, top in zip(found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
        assert top[token] == value and len(top) in (3, 4)

    # The same numbers as a continuation of greedy tokens, whole and streamed.
    whole = client.completions.create(**asked, max_tokens=4).choices[0]
    assert whole.text == "hello" + reference("hello", 4)
    assert whole.logprobs.token_logprobs[:5] == scored.logprobs.token_logprobs
    best = [max(top.values()) for top in whole.logprobs.top_logprobs[5:]]
    assert whole.logprobs.token_logprobs[5:] == best
    pieces = [chunk.choices[0] for chunk in client.completions.create(**asked, max_tokens=4, stream=True)]
    assert "".join(piece.text for piece in pieces) == whole.text
    for name in ("tokens", "token_logprobs", "text_offset"):
        streamed = [each for piece in pieces for each in getattr(piece.logprobs, name)]
        assert streamed == getattr(whole.logprobs, name)


def test_stop_strings_and_tokens(client):
    text = reference("hello")
    stop = text[3:5]
    choice = client.completions.create(model="tiny", prompt="hello", stop=[stop, "nothing"], **GREEDY).choices[0]
    assert choice.text == text[: text.index(stop)] and choice.finish_reason == "stop" and choice.stop_reason == stop
    token = TOKENIZER.encode(text[2])[0]
    asked = {**GREEDY, "extra_body": {"ignore_eos": True, "stop_token_ids": [token], "return_token_ids": True}}
    choice = client.completions.create(model="tiny", prompt="hello", **asked).choices[0]
    assert choice.stop_reason == token and choice.token_ids == TOKENIZER.encode(text[: text.index(text[2]) + 1])
    assert choice.prompt_token_ids == TOKENIZER.encode("hello")


def test_vllms_own_fields(client):
    a, b = TOKENIZER.encode("ab")
    extra = {"allowed_token_ids": [a, b], "top_k": 2, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 8}
    extra |= {
        "cache_salt": "mine",
        "priority": 1,
        "truncate_prompt_tokens": 2,
        "bad_words": ["zz"],
        "prompt_logprobs": 1,
    }
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=8, extra_body=extra)
    (choice,) = answer.choices
    assert len(choice.text) == 8 and set(choice.text) <= {"a", "b"}
    assert answer.usage.prompt_tokens == 2
    assert choice.prompt_logprobs[0] is None and str(TOKENIZER.encode("o")[0]) in choice.prompt_logprobs[1]
    biased = client.completions.create(model="tiny", prompt="x", max_tokens=3, logit_bias={str(a): 100})
    assert biased.choices[0].text == "aaa"


def test_chat(client):
    answer = client.chat.completions.create(model="tiny", messages=user("hi"), **GREEDY)
    (choice,) = answer.choices
    assert choice.message.content == reference("user:hi;a:") and choice.message.role == "assistant"
    assert choice.finish_reason == "length" and answer.object == "chat.completion"
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    again = client.chat.completions.create(model="tiny", messages=parts, **GREEDY)
    assert again.choices[0].message.content == choice.message.content


def test_streamed_chat(client):
    asked = dict(model="tiny", messages=user("hi"), stream=True, stream_options={"include_usage": True}, **GREEDY)
    chunks = list(client.chat.completions.create(**asked))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == reference("user:hi;a:")
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].usage.prompt_tokens == 10


def test_chat_logprobs_and_several_outputs(client):
    asked = dict(model="tiny", messages=user("hi"), logprobs=True, top_logprobs=2, max_tokens=5, n=3, seed=1)
    answer = client.chat.completions.create(**asked, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        entries = choice.logprobs.content
        assert "".join(entry.token for entry in entries) == choice.message.content
        for entry in entries:
            assert [top.logprob for top in entry.top_logprobs] == sorted(
                (t.logprob for t in entry.top_logprobs), reverse=True
            )
            assert len(entry.top_logprobs) == 2 and bytes(entry.bytes).decode() == entry.token
            assert all(math.exp(top.logprob) <= 1 for top in entry.top_logprobs)


def test_the_last_message_can_be_continued(client):
    messages = [*user("hi"), {"role": "assistant", "content": "we"}]
    extra = {"ignore_eos": True, "add_generation_prompt": False, "continue_final_message": True, "echo": True}
    answer = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=4, extra_body=extra
    )
    assert answer.choices[0].message.content == "we" + reference("user:hi;assistant:we", 4)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "flag", "schema": FLAG}},
        {"type": "json_schema", "json_schema": {"name": "flag", "schema": FLAG, "strict": True}},
    ],
)
def test_answers_of_a_form(client, form):
    extra = {"structured_outputs": None}
    asked = dict(model="tiny", messages=user("hi"), max_tokens=80, temperature=0, extra_body=extra)
    bias = {str(TOKENIZER.encode(c)[0]): -100 for c in " \n"}
    answer = client.chat.completions.create(**asked, response_format=form, logit_bias=bias)
    assert type(json.loads(answer.choices[0].message.content)["a"]) is bool
    assert answer.choices[0].finish_reason == "stop"


def test_a_json_object_and_a_regex(client):
    spaces = {str(TOKENIZER.encode(c)[0]): -100 for c in " \n"}
    end = {str(TOKENIZER.encode("}")[0]): 90}
    answer = client.chat.completions.create(
        model="tiny",
        messages=user("hi"),
        max_tokens=60,
        response_format={"type": "json_object"},
        logit_bias=spaces | end,
    )
    assert isinstance(json.loads(answer.choices[0].message.content), dict)
    extra = {"structured_outputs": {"regex": "[0-9]{3}-x"}}
    answer = client.completions.create(model="tiny", prompt="p", max_tokens=20, extra_body=extra)
    assert answer.choices[0].text[3:] == "-x" and answer.choices[0].text[:3].isdecimal()


def collect_calls(chunks) -> tuple[list[dict], str, str]:
    """(calls, content, finish reason) of a streamed chat answer."""
    calls: list[dict] = []
    content, reason = "", None
    for chunk in chunks:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                calls.append({"name": call.function.name, "arguments": "", "id": call.id})
            calls[call.index]["arguments"] += call.function.arguments
    return calls, content, reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", "second", "none"])
def test_tools(client, choice, stream):
    """The model writes what it is made to write, so that what it means can be checked."""
    written = 'say<tool_call>\n{"name": "second", "arguments": {"a": true}}\n</tool_call>'
    asked: dict = dict(model="tiny", messages=user("hi"), tools=TOOLS, max_tokens=80, temperature=1, seed=5)
    if choice in ("auto", "none"):
        asked["extra_body"] = {"structured_outputs": {"choice": [written]}}
    named = choice not in ("auto", "none", "required")
    asked["tool_choice"] = {"type": "function", "function": {"name": choice}} if named else choice
    if choice == "required":
        asked["parallel_tool_calls"] = False
    answer = client.chat.completions.create(**asked, stream=stream)
    if stream:
        calls, content, reason = collect_calls(answer)
    else:
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
        content = message.content or ""
        found = message.tool_calls or []
        calls = [{"name": c.function.name, "arguments": c.function.arguments, "id": c.id} for c in found]
    if choice == "none":
        assert (calls, content, reason) == ([], written, "stop")
        return
    (call,) = calls
    assert call["name"] in ("first", "second") if choice == "required" else call["name"] == "second"
    assert type(json.loads(call["arguments"])["a"]) is bool and call["id"]
    assert content == ("say" if choice == "auto" else "")
    assert reason == ("stop" if choice == "second" else "tool_calls")


def test_a_conversation_with_tool_calls_goes_on(client):
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "first", "arguments": '{"a": true}'}}
    messages = [
        *user("hi"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "done"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=3, temperature=0)
    prompt = "first<tool_call>second<tool_call>user:hi;assistant:None;tool:done;a:"
    assert answer.usage.prompt_tokens == len(prompt)


def test_embeddings(client):
    texts = ["hello", "hello", "other words"]
    answer = client.embeddings.create(model="tiny", input=texts)  # the client asks for base64
    first, again, other = (np.array(each.embedding) for each in answer.data)
    assert [each.index for each in answer.data] == [0, 1, 2] and first.shape == (32,)
    assert np.linalg.norm(first) == pytest.approx(1, abs=1e-5) and (first == again).all() and (first != other).any()
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 21 and answer.object == "list"
    ids = client.embeddings.create(model="tiny", input=TOKENIZER.encode("hello"), encoding_format="float")
    assert np.allclose(ids.data[0].embedding, first, atol=1e-6)
    for bad, says in (
        ({"input": "a" * 129}, "129 tokens; allowed are 1 to 128"),
        ({"dimensions": 8}, "dimensions must"),
    ):
        with pytest.raises(openai.BadRequestError, match=says):
            client.embeddings.create(**{"model": "tiny", "input": "a", **bad})
    with pytest.raises(openai.BadRequestError, match="token id 97 is outside"):
        client.embeddings.create(model="tiny", input=[97])


def test_beam_search(client):
    """vLLM's fields: the best n of best_of beams, best first, with the log-probabilities of their tokens."""
    ids = TOKENIZER.encode("hello")
    expected = beam_reference(ids, BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.5), ())
    extra = {"use_beam_search": True, "ignore_eos": True, "return_token_ids": True, "length_penalty": 0.5}
    asked: dict = dict(model="tiny", max_tokens=6, n=2, temperature=0, extra_body=extra)
    answer = client.completions.create(**asked, prompt=["hello", ids], best_of=3, logprobs=0, echo=False)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 10 and answer.usage.completion_tokens == 24
    for number, choice in enumerate(answer.choices):
        tokens, score = expected[number % 2]
        assert choice.token_ids == tokens and choice.text == TOKENIZER.decode(tokens)
        assert choice.finish_reason == "length" and choice.logprobs.tokens == list(choice.text)
        assert sum(choice.logprobs.token_logprobs) / 6**0.5 == pytest.approx(score, rel=1e-4)
    chat = client.chat.completions.create(**asked, messages=user("hi"), logprobs=True)
    expected = beam_reference(TOKENIZER.encode("user:hi;a:"), BeamSearchParams(beam_width=2, max_tokens=6), ())
    assert [choice.message.content for choice in chat.choices] == [TOKENIZER.decode(tokens) for tokens, _ in expected]
    assert sum(each.logprob for each in chat.choices[0].logprobs.content) / 6 == pytest.approx(expected[0][1], rel=1e-4)
    assert chat.usage.completion_tokens == 12


def test_errors_are_those_of_the_client(client):
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here") as error:
        client.completions.create(model="other", prompt="a")
    assert error.value.code == "model_not_found" and error.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature must be finite") as error:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="n must be 1 with temperature 0"):
        client.chat.completions.create(model="tiny", messages=user("a"), temperature=0, n=2)


def test_request_ids(client, http):
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine" and raw.parse().id == "cmpl-mine"
    body = {"prompt": "a", "max_tokens": 1, "request_id": "its-own"}
    assert http.post("/v1/completions", json=body).json()["id"] == "cmpl-its-own"


def test_tokenize_and_detokenize(http):
    found = http.post("/tokenize", json={"prompt": "abc", "return_token_strs": True}).json()
    assert found == {"count": 3, "max_model_len": 128, "tokens": TOKENIZER.encode("abc"), "token_strs": ["a", "b", "c"]}
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "abc"}
    chat = http.post("/tokenize", json={"messages": user("hi")}).json()
    assert http.post("/detokenize", json={"tokens": chat["tokens"]}).json() == {"prompt": "user:hi;a:"}
