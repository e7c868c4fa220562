"""Controls through the engine: chunked prefill, preemption, many steps a dispatch, any company. Same tokens."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from control_reference import controlled_logits, next_logits
from jpaged_models import LoadedModel, Tokenizer
from tiny import finish, make_prompts, run_all, tiny_config, tiny_model

from jpaged import Engine, SamplingParams
from jpaged.bad_words import find_bad_words

COUNT = 12
EOS = (2, 30, 31)


def word_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return Tokenizer(backend, {})


def model() -> LoadedModel:
    loaded = tiny_model()
    generation = dataclasses.replace(loaded.generation, eos_token_ids=EOS)
    return dataclasses.replace(loaded, tokenizer=word_tokenizer(), generation=generation)


def make_engine(**changes) -> Engine:
    return Engine(model(), tiny_config(**changes))


def reference(prompt: list[int], params: SamplingParams) -> list[int]:
    """Greedy output with the controls of NumPy and the logits of whole forward passes."""
    stop_ids = [*params.stop_token_ids, *(() if params.ignore_eos else EOS)]
    words = find_bad_words(params.bad_words, word_tokenizer())
    out: list[int] = []
    while len(out) < params.max_tokens:
        logits = next_logits([*prompt, *out])
        x = controlled_logits(logits, params, prompt, out, stop_ids=stop_ids, bad_words=words)
        out.append(int(np.argmax(x)))
        if out[-1] in stop_ids:
            break
    return out


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True, **changes})


def choose_params(prompts: list[list[int]]) -> list[SamplingParams]:
    """One for each prompt; several aim at what the prompt's plain output holds, so that they change it."""
    plain = [reference(prompt, greedy()) for prompt in prompts]
    pair = plain[4][1:3]
    return [
        greedy(repetition_penalty=1.8),
        greedy(frequency_penalty=1.5, presence_penalty=0.7),
        greedy(),
        greedy(logit_bias=dict.fromkeys(plain[3][:3], -4.0) | {5: 2.0}),
        greedy(bad_words=(f"w{pair[0]} w{pair[1]}", f"w{plain[4][0]}")),
        greedy(allowed_token_ids=tuple(range(10, 60))),
        greedy(ignore_eos=False, logit_bias={2: 50.0, 30: 49.0}, min_tokens=5),
        greedy(stop_token_ids=(plain[7][2],), min_tokens=8),
        greedy(repetition_penalty=1.3, bad_words=(f"w{plain[8][2]}",), min_tokens=3, allowed_token_ids=range(2, 90)),
        greedy(),
    ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(10, 30, seed=9)


@pytest.fixture(scope="module")
def params(prompts) -> list[SamplingParams]:
    return choose_params(prompts)


@pytest.fixture(scope="module")
def expected(prompts, params) -> list[list[int]]:
    outputs = [reference(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    assert len(outputs[6]) == 6 and outputs[6][-1] == 2  # five tokens, then the end at once
    return outputs


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(max_num_seqs=1),  # alone
        dict(max_num_batched_tokens=8, async_scheduling=False, decode_steps=3),
        dict(num_blocks=34, watermark=0.0),  # short of memory: preemption
    ],
    ids=str,
)
def test_the_reference_in_any_batch(prompts, params, expected, changes) -> None:
    engine = make_engine(**changes)
    assert run_all(engine, prompts, params) == expected
    if "num_blocks" in changes:
        assert engine.scheduler.num_preemptions > 0


def test_random_requests_with_controls_are_the_same_alone_and_together(prompts, params) -> None:
    seeded = [dataclasses.replace(each, temperature=0.9, seed=i, top_p=0.95) for i, each in enumerate(params)]
    together = run_all(make_engine(), prompts, seeded)
    alone = make_engine(max_num_seqs=1)
    assert [run_all(alone, [prompt], [each])[0] for prompt, each in zip(prompts, seeded, strict=True)] == together


def test_a_plain_request_ahead_of_a_penalized_one(prompts) -> None:
    """The slot of a request with penalties, given to one without, and the other way round."""
    engine = make_engine(max_num_seqs=1)
    order = [greedy(), greedy(repetition_penalty=2.0), greedy(), greedy(repetition_penalty=2.0)]
    outputs = run_all(engine, [prompts[0]] * 4, order)
    assert outputs == [reference(prompts[0], each) for each in order]
    assert outputs[0] != outputs[1]


def test_a_seeded_request_beside_unseeded_ones(prompts) -> None:
    seeded = SamplingParams(temperature=1.0, seed=5, max_tokens=COUNT, ignore_eos=True)
    unseeded = dataclasses.replace(seeded, seed=None)
    alone = run_all(make_engine(), prompts[:1], [seeded])[0]
    first = run_all(make_engine(), prompts[:3], [seeded, unseeded, unseeded])
    last = run_all(make_engine(), prompts[1:3] + prompts[:1], [unseeded, unseeded, seeded])
    assert first[0] == last[2] == alone


def test_a_processor_of_the_engine(prompts) -> None:
    """A user's function with arguments per request: only requests that give one are changed by it."""

    def favour(logits, args, position):
        """args: [token, how much, from which position]"""
        wanted = jnp.arange(logits.shape[1]) == args[:, :1].astype(jnp.int32)
        return logits + jnp.where(wanted & (position[:, None] >= args[:, 2:]), args[:, 1:2], 0.0)

    processor = dict(logits_processor=favour, processor_args={"token": 7.0, "bonus": 100.0, "start": 0.0})
    engine = Engine(model(), tiny_config(**processor))
    given = [
        greedy(max_tokens=3),
        greedy(max_tokens=3, extra_args={"bonus": 200}),
        greedy(max_tokens=3, extra_args={"token": 9, "start": len(prompts[2]) + 1}),
    ]
    plain, favoured, later = run_all(engine, prompts[:3], given)
    assert plain == reference(prompts[0], given[0])
    assert favoured == [7, 7, 7]
    assert later == [reference(prompts[2], greedy())[0], 9, 9]
    with pytest.raises(ValueError, match=r"takes \['token', 'bonus', 'start'\], got \['x'\]"):
        engine.add_request("a", [5], SamplingParams(extra_args={"x": 1}))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(logit_bias={97: 1.0}), "logit_bias: 97 is outside the model's vocabulary: ids are 0 to 96"),
        (SamplingParams(allowed_token_ids=[97]), "allowed_token_ids: 97 is outside"),
        (SamplingParams(stop_token_ids=[97]), "stop_token_ids: 97 is outside"),
        (SamplingParams(bad_words=["  "]), "'  ' has no tokens"),
    ],
)
def test_refused_requests_leave_nothing_behind(params, message) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request("a", [5], params)
    assert not engine.requests and not engine.has_unfinished()


def test_bad_words_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="bad_words need a tokenizer"):
        Engine(tiny_model(), tiny_config()).add_request("a", [5], SamplingParams(bad_words=["w5"]))


def test_everything_forbidden_is_token_0_and_harms_nobody(prompts) -> None:
    """min_tokens with nothing allowed but an end token: a row of -inf."""
    engine = make_engine()
    hopeless = engine.add_request("a", prompts[0], greedy(allowed_token_ids=(2,), ignore_eos=False, min_tokens=3))
    other = engine.add_request("b", prompts[1], greedy())
    finish(engine)
    assert hopeless.output_token_ids == [0, 0, 0, 2]
    assert other.output_token_ids == reference(prompts[1], greedy())
