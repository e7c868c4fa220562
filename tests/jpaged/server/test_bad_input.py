"""What clients get wrong: each mistake has a status and a message, and the server goes on."""

from __future__ import annotations

import threading

import httpx
import pytest

USER = [{"role": "user", "content": "hi"}]
BEAMS = {"use_beam_search": True}
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (COMPLETION, {}, "prompt: Field required"),
        (COMPLETION, {"prompt": ""}, "prompt: must be a text, a list of token ids"),
        (COMPLETION, {"prompt": []}, "prompt: must be a text, a list of token ids"),
        (COMPLETION, {"prompt": ["a", ""]}, "none of them empty"),
        (COMPLETION, {"prompt": [[1], []]}, "none of them empty"),
        (COMPLETION, {"prompt": [1, "a"]}, "prompt: must be"),
        (COMPLETION, {"prompt": [1.5]}, "prompt: must be"),
        (COMPLETION, {"prompt": [-1]}, "token id -1 is outside the model's vocabulary"),
        (COMPLETION, {"prompt": [97]}, "token id 97 is outside the model's vocabulary: ids are 0 to 96"),
        (COMPLETION, {"prompt": [10**30]}, ""),
        (COMPLETION, {"prompt": "a" * 200}, "this model's context is 128 tokens, but the prompt has 200"),
        (COMPLETION, {"prompt": "a", "max_tokens": 128}, "asks for up to 128 more"),
        (COMPLETION, {"prompt": "a", "max_tokens": -1}, "max_tokens: Input should be greater than or equal to 0"),
        (COMPLETION, {"prompt": "a", "max_tokens": "7"}, "max_tokens: Input should be a valid integer, got '7'"),
        (COMPLETION, {"prompt": "a", "n": 0}, "n: Input should be greater than or equal to 1, got 0"),
        (COMPLETION, {"prompt": "a", "n": 10**6}, "n: Input should be less than or equal to 128"),
        (COMPLETION, {"prompt": "a", "temperature": "hot"}, "temperature: Input should be a valid number, got 'hot'"),
        (COMPLETION, {"prompt": "a", "top_p": 2}, "top_p must be in (0, 1], got 2.0"),
        (COMPLETION, {"prompt": "a", "stop": [""]}, "stop must hold texts of at least one character"),
        (COMPLETION, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias must have token ids for keys, got 'x'"),
        (COMPLETION, {"prompt": "a", "logit_bias": {"500": 1}}, "500"),
        (COMPLETION, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETION, {"prompt": "a", "seed": 2**64}, "seed: Input should be less than or equal to"),
        (COMPLETION, {"prompt": "a", "stream_options": {}}, "stream_options may only be given with stream=true"),
        (COMPLETION, {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        (COMPLETION, {"prompt": "a", "best_of": 3}, "best_of must be n=1"),
        (COMPLETION, {"prompt": "a", "best_of": 1, "n": 2, **BEAMS}, "best_of must be at least n=2"),
        (COMPLETION, {"prompt": "a", "stream": True, **BEAMS}, "use_beam_search cannot be streamed"),
        (COMPLETION, {"prompt": "a", "stop": ["x"], "min_tokens": 2, **BEAMS}, "combined with stop, min_tokens"),
        (COMPLETION, {"prompt": "a", "structured_outputs": {"regex": "a"}, **BEAMS}, "a form that the output must"),
        (COMPLETION, {"prompt": "a", "logprobs": 2, **BEAMS}, "2 were asked for, 0 are allowed"),
        (COMPLETION, {"prompt": "a", "n": 9, **BEAMS}, "beam_width=9 is more than max_num_seqs=8"),
        (COMPLETION, {"prompt": "a", "max_tokens": 0, **BEAMS}, "max_tokens must be an integer of 1 to"),
        (CHAT, {"messages": USER, "stream": True, **BEAMS}, "use_beam_search cannot be streamed"),
        (COMPLETION, {"prompt": "a", "request_id": ""}, "request_id: String should have at least 1 character"),
        (COMPLETION, {"prompt": "a", "cache_salt": ""}, "cache_salt: String should have at least 1 character"),
        (COMPLETION, {"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs: "),
        (COMPLETION, {"prompt": "a", "structured_outputs": {"shape": "x"}}, "structured_outputs knows"),
        (CHAT, {"messages": []}, "messages: List should have at least 1 item"),
        (CHAT, {"messages": "hi"}, "messages: Input should be a valid array, got 'hi'"),
        (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "messages.0.role: Input should be 'system'"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0: a message of role 'user' needs content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        (CHAT, {"messages": USER, "chat_template": "x"}, "this server takes no chat template from clients"),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice needs tools"),
        (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format.type: Input should be 'text'"),
        (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "needs json_schema.schema"),
        ("/tokenize", {}, "give either prompt or messages"),
        ("/detokenize", {"tokens": [97]}, "token id 97 is outside the model's vocabulary"),
        ("/detokenize", {"tokens": "a"}, "tokens: Input should be a valid array, got 'a'"),
    ],
)
def test_bad_values(http, path, body, says):
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and says in error["message"], answer.text
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"$ref": "#/nowhere"}, {"properties": 5}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_is_none(http, schema, stream):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = http.post(CHAT, json={"messages": USER, "response_format": form, "stream": stream})
    assert answer.status_code == 400 and "structured_outputs: " in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the body is not valid JSON: EOF"),
        (b'{"prompt": "a"', "the body is not valid JSON: EOF while parsing an object"),
        (b'{"prompt": "\xff\xfe"}', "the body is not valid JSON: invalid unicode"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b"[]", "Input should be an object"),
        (b"[" * 100_000, "the body is not valid JSON: recursion limit exceeded"),
    ],
)
def test_what_is_no_json(http, content, says):
    answer = http.post(COMPLETION, content=content)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text


def test_unknown_paths_methods_and_models(http):
    assert http.post("/v1/nothing", json={}).json()["error"]["type"] == "not_found_error"
    answer = http.get(COMPLETION)
    assert answer.status_code == 405 and answer.json()["error"]["type"] == "invalid_request_error"
    assert http.get("/v1/models/other").status_code == 404


def test_what_is_not_known_is_ignored(http):
    assert http.post(COMPLETION, json={"prompt": "a", "max_tokens": 1, "colour": "red"}).status_code == 200


def test_a_body_of_100_mb(http):
    big = b'{"prompt": "' + b"a" * 100_000_000 + b'"}'
    for body in (big, (big[at : at + (1 << 20)] for at in range(0, len(big), 1 << 20))):  # in chunks the second time
        answer = http.post(COMPLETION, content=body)
        assert answer.status_code == 413 and "larger than 16777216 bytes" in answer.json()["error"]["message"]


def ask_at_once(http: httpx.Client, body: dict, times: int) -> list[httpx.Response]:
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(http.post(COMPLETION, json=body))) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_two_live_requests_with_the_same_id(http):
    body = {"prompt": "a", "max_tokens": 120, "n": 4, "request_id": "twice", "ignore_eos": True}
    answers = ask_at_once(http, body, 6)
    assert {answer.status_code for answer in answers} == {200, 409}
    refused = next(answer for answer in answers if answer.status_code == 409)
    assert "'twice' is in use" in refused.json()["error"]["message"]
    assert http.post(COMPLETION, json=body).status_code == 200, "once it has ended the id is free again"


def test_more_than_may_wait(http):
    """8 run and 24 may wait: of 16 prompts with 4 outputs each some are told to come again."""
    answers = ask_at_once(http, {"prompt": "abc", "n": 4, "max_tokens": 100, "ignore_eos": True}, 16)
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 8
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1 and refused.json()["error"]["type"] == "rate_limit_error"
