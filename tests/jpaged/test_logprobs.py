"""Log-probabilities of outputs and prompts against whole forward passes in float64, however they were computed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_reference import next_logits
from test_engine_controls import make_engine, model
from tiny import SIZES, finish, make_prompts, run_all, tiny_engine

from jpaged import LLM, SamplingParams
from jpaged.completion import make_completion, make_output
from jpaged.engine import Engine
from jpaged.logprobs import pack_records, record_size, unpack_record
from jpaged.outputs import Logprob
from jpaged.request import Request


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def check_dict(found: dict[int, Logprob], tokens: list[int], token: int, most: int) -> None:
    """The dict for `token` after `tokens`: itself and the `most` likeliest, with ranks and texts."""
    expected = log_softmax(next_logits(tokens))
    order = np.argsort(-expected, kind="stable")
    assert set(found) == {token, *order[:most].tolist()}
    for each, entry in found.items():
        assert abs(entry.logprob - expected[each]) < 1e-4
        assert entry.rank == 1 + (expected > expected[each]).sum()
        assert entry.decoded_token == f"w{each}"
    assert next(iter(found)) == token


def check(request: Request, engine: Engine) -> None:
    """All of a finished request's log-probabilities."""
    params, prompt = request.params, request.prompt_token_ids
    output = make_output(request, [make_completion(request, engine.tokenizer)], engine.tokenizer)
    completion = output.outputs[0]
    tokens = request.output_token_ids
    if params.logprobs is None:
        assert completion.logprobs is None and completion.cumulative_logprob is None
    else:
        assert len(completion.logprobs) == len(tokens)
        for i, found in enumerate(completion.logprobs):
            check_dict(found, prompt + tokens[:i], tokens[i], params.logprobs)
        own = [found[token].logprob for found, token in zip(completion.logprobs, tokens, strict=True)]
        assert abs(completion.cumulative_logprob - sum(own)) < 1e-5
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
        for i, found in enumerate(output.prompt_logprobs[1:], start=1):
            check_dict(found, prompt[:i], prompt[i], params.prompt_logprobs)


GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
PROMPTS = make_prompts(8, 30, seed=12)
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=2),
    # of the raw logits, whatever changes them before a token is drawn
    SamplingParams(
        temperature=2.0, seed=4, max_tokens=10, ignore_eos=True, logprobs=5, top_k=4, repetition_penalty=1.9
    ),
    SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=20, prompt_logprobs=0),
    SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logprobs=1, allowed_token_ids=(5, 6, 7)),
]


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(max_num_batched_tokens=8, async_scheduling=False, decode_steps=3),  # chunks
        dict(num_blocks=34, watermark=0.0),  # short of memory: preemption
    ],
    ids=str,
)
def test_against_whole_forward_passes(changes) -> None:
    engine = make_engine(**changes)
    prompts, params = PROMPTS, PARAMS
    if "num_blocks" in changes:
        prompts, params = PROMPTS * 2, [dataclasses.replace(p, max_tokens=p.max_tokens and 24) for p in PARAMS] * 2
    requests = [engine.add_request(f"{i}", *each) for i, each in enumerate(zip(prompts, params, strict=True))]
    finish(engine)
    for request in requests:
        check(request, engine)
    if "num_blocks" in changes:
        assert engine.scheduler.num_preemptions > 0


def test_asking_changes_no_token() -> None:
    without = [dataclasses.replace(each, logprobs=None, prompt_logprobs=None) for each in PARAMS]
    assert run_all(make_engine(), PROMPTS, PARAMS) == run_all(make_engine(), PROMPTS, without)


def test_max_tokens_0_reads_the_prompt_only() -> None:
    """What a server needs for echo: no token, the prompt's log-probabilities, the reason "length"."""
    llm = LLM(model(), warm_up=False, **SIZES)
    (output,) = llm.generate("w5 w6 w7", SamplingParams(max_tokens=0, prompt_logprobs=2, logprobs=1), use_tqdm=False)
    completion = output.outputs[0]
    assert (completion.token_ids, completion.text, completion.logprobs) == ([], "", [])
    assert completion.finish_reason == "length" and completion.cumulative_logprob == 0.0
    for i in (1, 2):
        check_dict(output.prompt_logprobs[i], [5, 6, 7][:i], 5 + i, 2)
    assert output.prompt == "w5 w6 w7" and llm.stats().blocks.used == 0


def test_fetched_only_when_asked_for() -> None:
    engine = tiny_engine()
    request = engine.add_request("a", [5, 6], SamplingParams(temperature=0.0, max_tokens=5))
    finish(engine)
    assert not request.records and not request.prompt_records


def test_each_of_several_outputs_has_its_own() -> None:
    llm = LLM(model(), warm_up=False, **SIZES)
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("w5 w6 w7 w8 w9 w10", params, use_tqdm=False)
    prompt = output.prompt_token_ids
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    for completion in output.outputs:
        for i, token in enumerate(completion.token_ids):
            check_dict(completion.logprobs[i], prompt + completion.token_ids[:i], token, 2)
    for i, token in enumerate(prompt[1:], start=1):
        check_dict(output.prompt_logprobs[i], prompt[:i], token, 1)


def test_a_cached_prompt_has_all_its_logprobs() -> None:
    """The prefix cache is passed by: logits of cached tokens would be missing."""
    engine = make_engine()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    for name in ("first", "second"):
        request = engine.add_request(name, PROMPTS[0][:20], params if name == "second" else GREEDY)
        finish(engine)
    check(request, engine)


def test_all_tokens_of_the_vocabulary() -> None:
    engine = make_engine(max_logprobs=97)
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=-1, ignore_eos=True)
    request = engine.add_request("a", [5, 6], params)
    finish(engine)
    completion = make_completion(request, engine.tokenizer)
    assert [len(found) for found in completion.logprobs] == [97, 97]
    assert abs(sum(np.exp(entry.logprob) for entry in completion.logprobs[0].values()) - 1) < 1e-4


def test_tokens_of_the_same_text_are_told_apart_by_id() -> None:
    """Two ids whose text is alike are both there."""

    class Same:
        def decode(self, ids, skip_special_tokens):
            return "same"

    logits = np.array([[0.0, 3.0, 3.0, 1.0]], np.float32)
    record = np.asarray(jax.jit(pack_records, static_argnums=2)(logits, jnp.array([2]), record_size(3, 4)))[0]
    found = unpack_record(record, 2, 3, Same())
    assert list(found) == [2, 1, 3] and {entry.decoded_token for entry in found.values()} == {"same"}
    assert found[1].rank == found[2].rank == 1 and found[3].rank == 3  # equals share a rank, as in the chosen one's


def test_a_forbidden_token_has_its_raw_probability() -> None:
    logits = np.array([[0.0, -np.inf, 1.0]], np.float32)
    record = np.asarray(pack_records(jnp.asarray(logits), jnp.array([1]), record_size(3, 3)))[0]
    found = unpack_record(record, 1, 3, None)
    assert found[1].logprob == -np.inf and found[1].rank == 3 and found[1].decoded_token is None
