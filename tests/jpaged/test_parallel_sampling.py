"""Several outputs of one prompt: computed once, forked on the device, the i-th as if it had run alone with seed + i."""

import dataclasses

import pytest
from tiny import SIZES, finish, make_prompts, run_all, tiny_engine, tiny_model, word_tokenizer

from jpaged import LLM, SamplingParams

WARM = SamplingParams(temperature=1.0, seed=7, max_tokens=9, ignore_eos=True)


def run_alone(prompt: list[int], count: int, params: SamplingParams = WARM) -> list[list[int]]:
    each = [dataclasses.replace(params, seed=params.seed + i) for i in range(count)]
    return run_all(tiny_engine(enable_prefix_caching=False), [prompt] * count, each)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [3, 8, 50])
def test_each_output_is_that_of_its_seed_and_the_prompt_is_computed_once(length, caching):
    prompt = make_prompts(1, 1, seed=length)[0] * length
    engine = tiny_engine(enable_prefix_caching=caching)
    request = engine.add_request("a", prompt, dataclasses.replace(WARM, n=5))
    finish(engine)
    outputs = [each.output_token_ids for each in request.group]
    assert outputs == run_alone(prompt, 5) and len(set(map(tuple, outputs))) > 1
    assert [each.index for each in request.group] == [0, 1, 2, 3, 4]
    stats = engine.stats()
    assert stats.prompt_tokens == length and stats.finished == 1
    # At first all blocks of the prompt are shared: then each output owns what it generates and the block it starts in.
    full, own = length // 4, -(-(length + 8) // 4) - length // 4
    assert stats.peak_blocks.used == full + 5 * own and stats.peak_blocks.shared == full
    assert stats.peak_blocks.saved == 4 * full


@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_too_small_for_all_outputs(caching):
    prompt = make_prompts(1, 1)[0] * 40
    params = dataclasses.replace(WARM, max_tokens=40)
    engine = tiny_engine(num_blocks=34, watermark=0.0, enable_prefix_caching=caching)
    request = engine.add_request("a", prompt, dataclasses.replace(params, n=8))
    finish(engine)
    assert [each.output_token_ids for each in request.group] == run_alone(prompt, 8, params)
    assert engine.scheduler.num_preemptions > 0


def test_aborting_the_parent_ends_all_at_any_time():
    prompt = make_prompts(1, 1)[0] * 40
    other = make_prompts(1, 20, seed=3)[0]
    expected = run_alone(prompt, 8)
    for when in range(6):
        engine = tiny_engine()
        request = engine.add_request("a", prompt, dataclasses.replace(WARM, n=8))
        beside = engine.add_request("b", other, WARM)
        for _ in range(when):
            engine.step()
        engine.abort("a")
        finish(engine)
        assert beside.output_token_ids == run_alone(other, 1)[0]
        for each, tokens in zip(request.group, expected, strict=True):
            assert each.finish_reason == "abort" or when > 3
            assert each.output_token_ids == tokens[: len(each.output_token_ids)]


def test_from_python():
    llm = LLM(dataclasses.replace(tiny_model(), tokenizer=word_tokenizer()), warm_up=False, **SIZES)
    several = dataclasses.replace(WARM, n=3)
    first, second = llm.generate([[5, 6, 7], [8, 9]], [several, WARM], use_tqdm=False)
    assert [output.index for output in first.outputs] == [0, 1, 2] and first.finished
    assert [output.token_ids for output in first.outputs] == run_alone([5, 6, 7], 3)
    assert [output.token_ids for output in second.outputs] == run_alone([8, 9], 1)
    for output in first.outputs:
        assert output.text == "".join(f" w{token}" for token in output.token_ids if token != 2)


@pytest.mark.parametrize(
    ("changes", "message"), [(dict(n=0), "n must be at least 1"), (dict(n=1.5), "n must be an int")]
)
def test_bad_n(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(WARM, **changes)
    with pytest.raises(ValueError, match="n must be 1 with temperature 0"):
        SamplingParams(temperature=0, n=2)
