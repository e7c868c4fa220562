"""Structured outputs: always of their form, beside others that do not notice; bad grammars fail alone."""

from __future__ import annotations

import json
import random
import re
import sys
import threading

import pytest
from ascii_model import ascii_model as model
from json_schemas import conforms, make_schema
from tiny import SIZES, finish, greedy_reference, make_prompts, tiny_config, tiny_model

from jpaged import LLM, Engine, SamplingParams
from jpaged.request import Request
from jpaged.structured import GrammarCompiler

pytest.importorskip("llguidance")

LARK = """start: greeting " " /[a-z]{2,6}/ "!"
greeting: "hi" | "hello"
"""
FORMS: list[tuple[dict, str]] = [
    ({"regex": r"[0-9]{3}-[a-f]{2,5}"}, r"[0-9]{3}-[a-f]{2,5}"),
    ({"choice": ["yes", "no", 'may"be']}, r"yes|no|may\"be"),
    ({"grammar": LARK}, r"(hi|hello) [a-z]{2,6}!"),
    ({"json": '{"enum": ["a", "bc"]}'}, r'"a"|"bc"'),
]


def make_engine(**changes) -> Engine:
    return Engine(model(), tiny_config(**changes))


def structured(form: dict, seed: int = 0, **changes) -> SamplingParams:
    base = dict(temperature=1.0, seed=seed, max_tokens=40, structured_outputs=form)
    return SamplingParams(**{**base, **changes})


def text_of(request: Request) -> str:
    return request.text.shown(request)


PLAIN = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
PROMPTS = make_prompts(12, 20, seed=21)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Each of the structured requests of `mixed` in an engine of its own slot."""
    engine = make_engine(max_num_seqs=1)
    return [[*run.output_token_ids] for run in add_structured(engine, finish_all=True)]


def add_structured(engine: Engine, finish_all: bool = False) -> list[Request]:
    requests = []
    for i, prompt in enumerate(PROMPTS[:8]):
        requests.append(engine.add_request(f"s{i}", prompt, structured(FORMS[i % 4][0], seed=i)))
        if finish_all:
            finish(engine)
    return requests


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(max_num_batched_tokens=8, async_scheduling=False, decode_steps=3),  # chunks
        dict(num_blocks=34, watermark=0.0),  # short of memory: preemption
    ],
    ids=str,
)
def test_forms_beside_plain_requests(alone, changes) -> None:
    """Every output of its form and as when alone; the others' tokens are the same and come many to a dispatch."""
    engine = make_engine(**changes)
    requests = add_structured(engine)
    plain = [engine.add_request(f"p{i}", prompt, PLAIN) for i, prompt in enumerate(PROMPTS[8:])]
    finish(engine)
    for i, request in enumerate(requests):
        assert re.fullmatch(FORMS[i % 4][1], text_of(request)), text_of(request)
        assert (request.finish_reason, request.stop_reason, request.error) == ("stop", None, None)
    assert [request.output_token_ids for request in requests] == alone
    for prompt, request in zip(PROMPTS[8:], plain, strict=True):
        assert request.output_token_ids == greedy_reference(prompt, 30)
    if "num_blocks" in changes:
        assert engine.scheduler.num_preemptions > 0


def test_the_rest_of_the_batch_keeps_many_steps_a_dispatch() -> None:
    engine = make_engine(decode_steps=8)
    engine.add_request("s", PROMPTS[0], structured({"regex": "[a-z]{30}"}))
    plain = engine.add_request("p", PROMPTS[1], PLAIN)
    steps = 0
    while not plain.finished:
        engine.step()
        steps += 1
    finish(engine)
    assert steps < 15  # of 30 tokens


def test_json_schemas_on_a_random_model() -> None:
    """200 schemas; a model without sense writes what it may, and what is finished is valid."""
    rng = random.Random(5)
    schemas = [make_schema(rng) for _ in range(200)]
    engine = make_engine(num_blocks=400, max_num_seqs=8, max_model_len=200)
    for i, schema in enumerate(schemas):
        form = {"json": schema, "disable_any_whitespace": i % 2 == 0}
        engine.add_request(f"{i}", [5], structured(form, seed=i, max_tokens=190))
    requests = dict(engine.requests)
    finish(engine, 100_000)
    done = [(request, schemas[int(name)]) for name, request in requests.items() if request.finish_reason == "stop"]
    assert len(done) > 150 and not any(request.error for request in requests.values())
    for request, schema in done:
        assert conforms(json.loads(text_of(request)), schema), text_of(request)


def test_smollm2_writes_valid_json(demo_model) -> None:
    """A real model and tokenizer; scripts/check_structured.py has more of them."""
    llm = LLM(
        demo_model, dtype="bfloat16", warm_up=False, max_model_len=128, max_num_seqs=16, max_num_batched_tokens=32
    )
    rng = random.Random(5)
    schemas = [make_schema(rng, depth=1) for _ in range(24)]
    params = [
        structured({"json": schema, "disable_any_whitespace": True}, seed=i, temperature=0.7, max_tokens=80)
        for i, schema in enumerate(schemas)
    ]
    outputs = llm.generate(["JSON:\n"] * len(schemas), params, use_tqdm=False)
    done = [(output.outputs[0], schema) for output, schema in zip(outputs, schemas, strict=True)]
    done = [(completion, schema) for completion, schema in done if completion.finish_reason == "stop"]
    assert len(done) > 20
    for completion, schema in done:
        assert conforms(json.loads(completion.text), schema), completion.text


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "[a-"}, "unclosed character class"),
        ({"json": {"type": "nonsense"}}, "Invalid type: nonsense"),
        ({"json": "{not json"}, "structured_outputs: "),
        ({"grammar": "start: missing"}, "missing"),
    ],
)
def test_a_bad_grammar_fails_its_request_alone(form, message) -> None:
    engine = make_engine()
    good = engine.add_request("good", PROMPTS[0], PLAIN)
    bad = engine.add_request("bad", PROMPTS[1], structured(form))
    touched = []
    while engine.has_unfinished():
        touched += engine.step()
    assert bad in touched and bad.finish_reason == "error" and message in bad.error
    assert good.output_token_ids == greedy_reference(PROMPTS[0], 30) and not engine.requests
    alone = engine.add_request("bad", PROMPTS[1], structured(form))
    assert engine.step() == [alone] and not engine.has_unfinished()


def test_the_reason_is_in_the_output() -> None:
    llm = LLM(model(), warm_up=False, **SIZES)
    good, bad = llm.generate(["a", "b"], [PLAIN, structured({"regex": "("})], use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error" and "unclosed group" in bad.error and bad.finished
    assert good.error is None and len(good.outputs[0].token_ids) == 30


def test_a_grammar_that_meets_other_limits() -> None:
    engine = make_engine()
    encode = engine.tokenizer.encode
    both = engine.add_request(
        "a", PROMPTS[0], structured({"regex": "[a-z]{5}"}, allowed_token_ids=[*encode("abq"), 2], logprobs=2)
    )
    nothing = engine.add_request("b", PROMPTS[1], structured({"regex": "[a-z]{5}"}, allowed_token_ids=encode("A")))
    biased = engine.add_request("c", PROMPTS[2], structured({"regex": "[a-z]{5}"}, logit_bias={encode("z")[0]: 99.0}))
    short = engine.add_request("d", PROMPTS[3], structured({"regex": "[a-z]{9}"}, max_tokens=4))
    stopped = engine.add_request("e", PROMPTS[4], structured({"regex": "x[a-z]yz"}, stop=["y"]))
    finish(engine)
    assert re.fullmatch("[abq]{5}", text_of(both)) and len(both.records) == 5
    assert nothing.finish_reason == "error" and "no token was allowed" in nothing.error
    assert text_of(biased) == "zzzzz"
    assert short.finish_reason == "length" and re.fullmatch("[a-z]{4}", text_of(short))
    assert stopped.stop_reason == "y" and len(text_of(stopped)) in (1, 2)


def test_others_run_while_a_grammar_is_compiled(monkeypatch) -> None:
    """Compiling is off the engine's path: nothing waits for it but its own request."""
    go, compile_grammar = threading.Event(), GrammarCompiler._compile
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda self, params: go.wait(60) and compile_grammar(self, params))
    engine = make_engine()
    slow = engine.add_request("slow", PROMPTS[0], structured({"choice": ["ok"]}))
    gone = engine.add_request("gone", PROMPTS[1], structured({"choice": ["ok"]}))
    plain = engine.add_request("plain", PROMPTS[2], PLAIN)
    while not plain.finished:
        engine.step()
    assert not slow.finished and not slow.output_token_ids and engine.has_unfinished()
    engine.abort("gone")
    go.set()
    finish(engine)
    assert text_of(slow) == "ok" and gone.finish_reason == "abort"


def test_the_same_grammar_is_compiled_once(monkeypatch) -> None:
    compiled, compile_grammar = [], GrammarCompiler._compile
    monkeypatch.setattr(
        GrammarCompiler, "_compile", lambda self, params: compiled.append(params) or compile_grammar(self, params)
    )
    engine = make_engine()
    for i in range(6):
        engine.add_request(f"{i}", PROMPTS[i], structured({"json": {"const": "ab"}}, seed=i))
    finish(engine)
    assert len(compiled) == 1


def test_what_structured_outputs_need_is_named(monkeypatch) -> None:
    with pytest.raises(ValueError, match="structured_outputs need a tokenizer"):
        Engine(tiny_model(), tiny_config()).add_request("a", [5], structured({"regex": "a"}))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = make_engine()
    with pytest.raises(ValueError, match=r'pip install "jpaged\[structured\]"'):
        engine.add_request("a", [5], structured({"regex": "a"}))
    assert not engine.requests and not engine.has_unfinished()
