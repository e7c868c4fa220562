"""Models whose every layer has a sliding window: what it left behind is given back, and nobody's tokens change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jpaged_models import ModelConfig
from tiny import HF_CONFIG, finish, greedy_reference, make_prompts, preempt, run_all, tiny_engine, tiny_model

from jpaged import BeamSearchParams, Engine, EngineConfig, SamplingParams
from jpaged.memory import find_window

WINDOW = 10
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SIZES = dict(window=WINDOW, num_blocks=34, watermark=0.0, preemption="swap")
MOST = (WINDOW + 32 - 2) // 4 + 2  # blocks of a window and a step of 32 tokens


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(8, 60, seed=3)


@pytest.fixture(scope="module")
def expected(prompts):
    return [greedy_reference(prompt, 30, window=WINDOW) for prompt in prompts]


def poison(engine: Engine) -> None:
    """NaN in all blocks that nobody has, and in the null block, which entries that were given up name."""
    state = engine.runner.state
    free = np.flatnonzero(np.asarray(state.pool.refcount) == 0)
    cache = jax.tree.map(lambda pool: pool.at[free].set(jnp.nan), state.cache)
    engine.runner.state = state._replace(cache=cache)


def test_what_is_given_up_is_not_read(prompts, expected):
    assert expected != [greedy_reference(prompt, 30) for prompt in prompts]
    engine = tiny_engine(**SIZES, enable_prefix_caching=False)
    for prompt, tokens in zip(prompts[:3], expected, strict=False):
        request = engine.add_request("a", prompt, GREEDY)
        while engine.has_unfinished():
            poison(engine)
            engine.step()
            engine.audit()
        assert request.output_token_ids == tokens


def test_memory_of_a_sequence_is_bounded():
    """By the window, what a step adds, and the steps under way: on the device, and in the host's count."""
    engine = tiny_engine(**SIZES, enable_prefix_caching=False)
    prompt = make_prompts(1, 90, seed=1)[0] * 2
    request = engine.add_request("a", prompt[:70], dataclasses.replace(GREEDY, max_tokens=50))
    decoding = []
    while engine.has_unfinished():
        engine.step()
        blocks = engine.stats().blocks
        assert blocks.used <= MOST and engine.scheduler.counts.private <= MOST
        if len(request.output_token_ids) > 1 and not request.finished:
            decoding.append(blocks.used)
            assert engine.scheduler.counts.private <= (WINDOW + 2 * 8 - 2) // 4 + 2
    assert max(decoding) <= (WINDOW + 2 * 8 - 2) // 4 + 2 < (70 + 50) // 4
    assert engine.stats().blocks.free == 33
    assert request.output_token_ids == greedy_reference(prompt[:70], 50, window=WINDOW)


@pytest.mark.parametrize("caching", [True, False])
def test_same_tokens_when_memory_is_short(prompts, expected, caching):
    engine = tiny_engine(**SIZES, enable_prefix_caching=caching)
    assert run_all(engine, prompts, GREEDY) == expected
    engine.audit()
    assert run_all(engine, prompts, GREEDY) == expected


def test_a_hit_needs_the_tail_of_the_window_only():
    engine = tiny_engine(**SIZES)
    prompt = make_prompts(1, 60, seed=9)[0][:1] + [5 + i % 80 for i in range(39)]
    tokens = greedy_reference(prompt, 30, window=WINDOW)
    assert run_all(engine, [prompt], GREEDY) == [tokens]
    index = engine.scheduler.index
    for _ in range(index.reclaimable - 5):  # what was left behind first goes first: all but the end of the output
        plan = engine.scheduler.schedule()
        engine.scheduler.swapping.evict(plan)
        engine.runner.read(engine.runner.dispatch(plan))
    engine.audit()
    longer = prompt + tokens[:28] + [9, 8, 7]
    request = engine.add_request("b", longer, GREEDY)
    engine.step()
    assert request.num_cached_tokens == 68 and request.slid == (68 - WINDOW + 1) // 4 == 14
    finish(engine)
    assert request.output_token_ids == greedy_reference(longer, 30, window=WINDOW)
    other = engine.add_request("c", prompt, GREEDY)  # the end of it is gone
    engine.step()
    assert other.num_cached_tokens == 0
    finish(engine)
    assert other.output_token_ids == tokens


def test_swapped_sequences_bring_back_their_window_only(prompts, expected):
    engine = tiny_engine(**SIZES)
    requests = [engine.add_request(str(i), prompts[i], GREEDY) for i in range(2)]
    for _ in range(4):
        engine.step()
    preempt(engine, evict=33)
    finish(engine)
    swap = engine.stats().swap
    assert 0 < swap.restored_blocks <= WINDOW // 4 + 1
    assert [request.output_token_ids for request in requests] == expected[:2]


def test_outputs_of_one_prompt_and_beams():
    engine, alone = tiny_engine(**SIZES), tiny_engine(**SIZES, enable_prefix_caching=False)
    prompt = [5 + i % 80 for i in range(45)]
    request = engine.add_request("a", prompt, SamplingParams(n=3, seed=5, max_tokens=30, ignore_eos=True))
    finish(engine)
    apart = [SamplingParams(seed=5 + i, max_tokens=30, ignore_eos=True) for i in range(3)]
    assert [each.output_token_ids for each in request.group] == run_all(alone, [prompt] * 3, apart)
    beams = [
        each.add_request("b", prompt, beams=BeamSearchParams(beam_width=2, max_tokens=20, ignore_eos=True))
        for each in (engine, alone)
    ]
    finish(engine)
    finish(alone)
    found, plain = ([each.beam.tokens() for each in request.beams.finished] for request in beams)
    assert found == plain
    engine.audit()


def test_only_where_every_layer_has_a_window():
    hf = {**HF_CONFIG, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW}
    for first, window in ((0, WINDOW), (1, None), (2, None)):
        assert find_window(ModelConfig.from_hf({**hf, "max_window_layers": first})) == window
    assert tiny_engine(num_blocks=34).config.window is None
    assert Engine(tiny_model(window=WINDOW), EngineConfig(34, 128, 4, 8, 32)).config.window == WINDOW
    # A pool that holds a window and a step, though no sequence, is enough.
    assert EngineConfig(MOST + 1, 128, 4, 8, 32, window=WINDOW).most_held_blocks == MOST < 128 // 4
    with pytest.raises(ValueError, match=f"it needs {MOST + 1} blocks"):
        EngineConfig(MOST, 128, 4, 8, 32, window=WINDOW)
    with pytest.raises(ValueError, match="window must be None or at least 1, got 0"):
        EngineConfig(34, 128, window=0)
