"""Beam search against a plain one over whole forward passes, written after transformers' `_beam_search`."""

import dataclasses
import json

import numpy as np
import pytest
from beam_reference import beam_reference
from jpaged_models import load_model
from tiny import SIZES, finish, make_prompts, tiny_engine, tiny_model, word_tokenizer

from jpaged import LLM, BeamSearchParams, Engine, EngineConfig, SamplingParams

EOS = 2


def search(engine, prompts, params) -> list:
    requests = [engine.add_request(f"r{i}", prompt, beams=params) for i, prompt in enumerate(prompts)]
    finish(engine)
    return [[(each.beam.tokens(), each.score) for each in request.beams.finished] for request in requests]


def check(found, prompts, params, eos) -> None:
    for sequences, prompt in zip(found, prompts, strict=True):
        expected = beam_reference(prompt, params, eos)
        assert [tokens for tokens, _ in sequences] == [tokens for tokens, _ in expected]
        np.testing.assert_allclose([score for _, score in sequences], [score for _, score in expected], rtol=1e-4)


def engine_with_eos(*eos: int, **changes):
    engine = tiny_engine(**changes)
    engine.eos_token_ids = frozenset(eos)
    return engine


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_equals_a_plain_search(width):
    prompts = make_prompts(3, 20, seed=width)
    params = BeamSearchParams(beam_width=width, max_tokens=10)
    eos = (EOS, 14, 24)  # often among the candidates
    check(search(engine_with_eos(*eos), prompts, params), prompts, params, eos)


@pytest.mark.parametrize(
    "changes",
    [
        dict(length_penalty=0.0),
        dict(length_penalty=2.5),
        dict(length_penalty=-1.0),
        dict(early_stopping=True),
        dict(early_stopping="never"),
        dict(ignore_eos=True),
        dict(max_tokens=1),
    ],
    ids=str,
)
def test_every_parameter(changes):
    prompts = make_prompts(2, 12, seed=5)
    params = dataclasses.replace(BeamSearchParams(beam_width=3, max_tokens=12), **changes)
    eos = (14, 24, 60)
    found = search(engine_with_eos(*eos), prompts, params)
    check(found, prompts, params, () if params.ignore_eos else eos)


def test_beside_other_requests_and_with_little_memory():
    """Groups are preempted whole and begin again; requests beside them are right too."""
    prompts = make_prompts(4, 24, seed=9)
    params = BeamSearchParams(beam_width=3, max_tokens=14, ignore_eos=True)
    alone = search(tiny_engine(), prompts, params)
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    reference = tiny_engine()
    expected = reference.add_request("a", prompts[0], sampled)
    finish(reference)
    engine = tiny_engine(num_blocks=34, watermark=0.0)
    others = [engine.add_request(f"o{i}", prompts[0], sampled) for i in range(4)]
    for found, expected_beams in zip(search(engine, prompts, params), alone, strict=True):
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected_beams]
        # Chunks of another size sum in another order.
        np.testing.assert_allclose([score for _, score in found], [score for _, score in expected_beams], rtol=1e-5)
    assert all(other.output_token_ids == expected.output_token_ids for other in others)
    assert engine.scheduler.num_preemptions > 0


def test_beams_share_blocks():
    """Fewer than half of the blocks that beams without sharing would own."""
    engine = tiny_engine(decode_steps=1)
    prompt = make_prompts(1, 1)[0] * 40
    engine.add_request("a", prompt, beams=BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True))
    finish(engine)
    assert engine.stats().sharing_saving > 0.5
    assert engine.stats().prompt_tokens == 40


def test_abort_at_any_time():
    prompt = make_prompts(1, 1)[0] * 40
    for when in range(5):
        engine = tiny_engine()
        request = engine.add_request("a", prompt, beams=BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True))
        waits = engine.add_request("b", prompt, beams=BeamSearchParams(beam_width=8, max_tokens=2))
        for _ in range(when):
            engine.step()
        engine.abort("a")
        finish(engine)
        assert all(each.finished for each in (*request.group, *waits.group))
        assert engine.scheduler.held_slots == 0 and len(engine.scheduler.free_slots) == 8


def test_from_python():
    loaded = dataclasses.replace(tiny_model(), tokenizer=word_tokenizer())
    llm = LLM(loaded, warm_up=False, **SIZES)
    params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
    one, two = llm.beam_search([[5, 6, 7], "w8 w9"], params)
    for output, prompt in ((one, [5, 6, 7]), (two, [8, 9])):
        expected = beam_reference(prompt, params, ())
        assert [each.tokens for each in output.sequences] == [prompt + tokens for tokens, _ in expected]
        assert output.sequences[0].score == pytest.approx(output.sequences[0].cum_logprob / 5)
        assert output.sequences[0].finish_reason == "length"
        assert output.sequences[0].text.split() == [f"w{token}" for token in output.sequences[0].tokens if token != 2]
    with pytest.raises(ValueError, match="prompt 0: beam_width=9 is more than max_num_seqs=8"):
        llm.beam_search([[5], [6]], BeamSearchParams(beam_width=9, max_tokens=5))
    with pytest.raises(ValueError, match=r"may need \d+ blocks of 4 tokens, but only 64 can be had"):
        llm.beam_search([[5]], BeamSearchParams(beam_width=8, max_tokens=100))


def check_against_transformers(loaded, goldens: list[dict]) -> None:
    """Sequences and scores of transformers' generate(num_beams=...), all searches of one set of stops at once."""
    config = EngineConfig(num_blocks=400, max_model_len=128, max_num_seqs=16, max_num_batched_tokens=64)
    engine = Engine(loaded, config)
    for stops in {tuple(golden["eos_token_ids"]) for golden in goldens}:
        engine.eos_token_ids = frozenset(stops)
        searches = []
        for golden in goldens:
            if tuple(golden["eos_token_ids"]) == stops:
                params = BeamSearchParams(golden["width"], 40, length_penalty=golden["length_penalty"])
                request = engine.add_request(str(len(searches)), golden["prompt_token_ids"], beams=params)
                searches.append((golden, request))
        finish(engine)
        for golden, request in searches:
            found = request.beams.finished
            assert [each.beam.tokens() for each in found] == golden["sequences"]
            np.testing.assert_allclose([each.score for each in found], golden["scores"], rtol=1e-3, atol=1e-4)


def test_equals_transformers_on_stories260k(shared, root):
    goldens = json.loads((root / "tests/goldens/beams_stories260k.json").read_text())["searches"]
    check_against_transformers(load_model(shared / "models" / "stories260k", "float32"), goldens)


def test_equals_transformers_on_smollm2(demo_model, root):
    goldens = json.loads((root / "tests/goldens/beams_smollm2.json").read_text())["searches"]
    check_against_transformers(load_model(demo_model, "float32"), goldens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(beam_width=0), "beam_width must be an integer of 1 to 16"),
        (dict(max_tokens=0), "max_tokens must be an integer of 1 to"),
        (dict(length_penalty=float("nan")), "length_penalty must be finite"),
        (dict(early_stopping="soon"), 'early_stopping must be False, True or "never"'),
    ],
)
def test_bad_parameters(changes, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 5, **changes})
