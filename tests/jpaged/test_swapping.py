"""Preemption by swap on a tiny model: blocks leave the device and come back, and nobody's tokens change."""

import jax
import numpy as np
import pytest
from tiny import finish, greedy_reference, make_prompts, preempt, run_all, tiny_config, tiny_engine, tiny_model

from jpaged import BeamSearchParams, Engine, EngineConfig, SamplingParams
from jpaged.block_copies import COPIED_AT_ONCE
from jpaged.schedule import Load, Save, Schedule

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
# Sizes that test_engine.py uses as well: each other pool or budget would cost a minute of compiling.
SHORT_OF_MEMORY = dict(num_blocks=34, watermark=0.0, preemption="swap")
BLOCK_BYTES = 2 * 2 * 2 * 4 * 8 * 4  # layers, K and V, heads, tokens, head size, float32


@pytest.mark.parametrize("changes", [{}, dict(enable_prefix_caching=False), dict(async_scheduling=False)], ids=str)
def test_same_tokens_when_memory_is_short(changes):
    prompts = make_prompts(10, 40)
    expected = [greedy_reference(prompt, 20) for prompt in prompts]
    engine = tiny_engine(**SHORT_OF_MEMORY, **changes)
    assert run_all(engine, prompts, GREEDY) == expected
    engine.audit()
    swapped, again = engine.stats(), tiny_engine(**{**SHORT_OF_MEMORY, "preemption": "recompute"}, **changes)
    assert run_all(again, prompts, GREEDY) == expected
    recomputed = again.stats()
    assert recomputed.preemptions > 0 and recomputed.swap.saved_blocks == recomputed.swap.preemptions == 0
    assert swapped.swap.preemptions > 0 and swapped.swap.restored_blocks > 0
    assert swapped.swap.saved_bytes == swapped.swap.saved_blocks * BLOCK_BYTES
    assert swapped.swap.restored_bytes == swapped.swap.restored_blocks * BLOCK_BYTES
    assert swapped.swap.held_blocks == swapped.swap.host_blocks == 0
    # Less is computed again: of a victim only what fills no block, or was not read yet.
    assert swapped.prompt_tokens < recomputed.prompt_tokens


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
def test_blocks_keep_their_bits_in_other_places(kv_dtype):
    """Pages, and scales where they are quantised, of blocks saved by name and by place, loaded elsewhere."""
    engine = Engine(tiny_model(), tiny_config(kv_cache_dtype=kv_dtype, preemption="swap"))
    runner, store, count = engine.runner, engine.scheduler.store, COPIED_AT_ONCE + 2
    rng = np.random.default_rng(0)
    bits = [rng.integers(0, 256, x.size * x.dtype.itemsize, np.uint8) for x in jax.tree.leaves(runner.state.cache)]
    leaves = [
        jax.numpy.asarray(b.view(x.dtype).reshape(x.shape))
        for b, x in zip(bits, jax.tree.leaves(runner.state.cache), strict=True)
    ]
    cache = jax.tree.unflatten(jax.tree.structure(runner.state.cache), leaves)
    blocks = runner.state.tables.blocks.at[3, :4].set(jax.numpy.arange(20, 24))
    named = runner.state.named.block.at[np.arange(1, 7)].set(np.arange(30, 36))
    runner.state = runner.state._replace(
        cache=cache,
        tables=runner.state.tables._replace(blocks=blocks),
        named=runner.state.named._replace(block=named),
    )
    before = [np.asarray(x) for x in jax.tree.leaves(runner.state.cache)]
    sources = [20, 21, 22, 23, *range(30, 36)]
    store.hold([bytes([i]) for i in range(count)])
    stored = [store.put(bytes([i])) for i in range(count)]
    places = [(3, column, 0) for column in range(4)] + [(0, 0, name) for name in range(1, 7)]
    runner.save([Save(*place, block) for place, block in zip(places, stored, strict=True)])
    assert all(block.data is None for block in stored)  # started, and not waited for
    done = runner.load([Load(40 + i, block) for i, block in enumerate(stored)])
    assert all(map(bool, done)) and len(done) == 2
    assert {block.data.nbytes for block in stored} == {store.block_bytes}
    state = runner.state
    ids = np.asarray(state.named.block)[40 : 40 + count]
    assert sorted(ids) == list(range(1, count + 1)) and int(state.pool.num_free) == 64 - count
    assert (np.asarray(state.pool.refcount)[ids] == 1).all() and (np.asarray(state.named.held)[ids] == 1).all()
    for old, new in zip(before, map(np.asarray, jax.tree.leaves(state.cache)), strict=True):
        assert old[sources].tobytes() == new[ids].tobytes()
        others = np.setdiff1d(np.arange(65), ids)
        assert old[others].tobytes() == new[others].tobytes()


def test_a_load_that_finds_no_room_changes_nothing_and_is_reported():
    engine = tiny_engine(**SHORT_OF_MEMORY)
    runner, store = engine.runner, engine.scheduler.store
    store.hold([b"a", b"b"])
    stored = [store.put(key) for key in (b"a", b"b")]
    runner.save([Save(0, 0, 0, block) for block in stored])
    runner.state = runner.state._replace(pool=runner.state.pool._replace(num_free=jax.numpy.int32(1)))
    dispatched = runner.dispatch(Schedule(load=[Load(3 + i, block) for i, block in enumerate(stored)], release=[0]))
    assert not any(map(bool, dispatched.loaded)) and int(runner.state.pool.num_free) == 1
    assert not np.asarray(runner.state.named.block).any()
    with pytest.raises(RuntimeError, match="This is a bug in jpaged"):
        runner.read(dispatched)


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_preempted_in_the_middle_comes_back_where_it_was(caching):
    engine = tiny_engine(**SHORT_OF_MEMORY, enable_prefix_caching=caching)
    first, second = list(range(3, 9)), [5 + i % 60 for i in range(60)]
    requests = [engine.add_request("first", first, GREEDY)]
    engine.step()
    requests.append(engine.add_request("second", second, GREEDY))
    engine.step()
    assert 0 < requests[1].prefilled < 60
    full = requests[1].prefilled // 4
    preempt(engine, evict=full)
    assert engine.stats().swap.saved_blocks == full
    finish(engine)
    assert engine.stats().swap.restored_blocks == full and engine.stats().prompt_tokens < 6 + 60 + 8
    assert [r.output_token_ids for r in requests] == [greedy_reference(p, 20) for p in (first, second)]


@pytest.mark.parametrize("caching", [True, False])
def test_outputs_of_one_prompt_are_swapped_with_the_blocks_they_share(caching):
    engine = tiny_engine(**SHORT_OF_MEMORY, enable_prefix_caching=caching)
    params = SamplingParams(n=3, seed=5, max_tokens=30, ignore_eos=True)
    prompt = list(range(3, 16))
    request = engine.add_request("a", prompt, params)
    for _ in range(3):
        engine.step()
    preempt(engine)
    preempt(engine, evict=30)
    assert engine.stats().preemptions == 2 and engine.stats().swap.saved_blocks > 0
    finish(engine)
    alone = tiny_engine(**SHORT_OF_MEMORY, enable_prefix_caching=False)
    apart = [SamplingParams(seed=5 + i, max_tokens=30, ignore_eos=True) for i in range(3)]
    assert [each.output_token_ids for each in request.group] == run_all(alone, [prompt] * 3, apart)
    stats = engine.stats()
    assert stats.swap.restored_blocks > 0 and stats.swap.held_blocks == stats.swap.host_blocks == 0
    assert caching == (stats.blocks.free < stats.blocks.total)


def test_a_group_of_beams_begins_again_from_blocks_of_the_host():
    engine = tiny_engine(**SHORT_OF_MEMORY)
    prompt, beams = list(range(3, 25)), BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    other = engine.add_request("other", [9, 8, 7], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    request = engine.add_request("beams", prompt, beams=beams)
    for _ in range(3):
        engine.step()
    preempt(engine, evict=30)
    assert engine.stats().swap.saved_blocks == 5
    finish(engine)
    assert engine.stats().swap.restored_blocks == 5 and other.output_token_ids == greedy_reference([9, 8, 7], 60)
    alone = tiny_engine(**SHORT_OF_MEMORY)
    expected = alone.add_request("beams", prompt, beams=beams)
    finish(alone)
    assert [each.beam.tokens() for each in request.beams.finished] == [
        each.beam.tokens() for each in expected.beams.finished
    ]


def test_the_host_is_given_no_more_than_its_room():
    """A victim of more blocks than swap space: its beginning is kept, the rest computed again."""
    engine = tiny_engine(**SHORT_OF_MEMORY, swap_space_bytes=3 * BLOCK_BYTES + 1)
    prompts = [[9, 8, 7], list(range(3, 40))]
    requests = [engine.add_request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    for _ in range(3):
        engine.step()
    preempt(engine, evict=30)
    swap = engine.stats().swap
    assert swap.saved_blocks == swap.held_blocks == 3 and swap.host_bytes <= 3 * BLOCK_BYTES
    finish(engine)
    assert engine.stats().swap.restored_blocks == 3
    assert [r.output_token_ids for r in requests] == [greedy_reference(prompt, 20) for prompt in prompts]
    aborted = [engine.add_request(f"again {i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    for _ in range(2):
        engine.step()
    preempt(engine, evict=30)
    engine.abort("again 1")
    assert engine.stats().swap.held_blocks == 0
    finish(engine)
    assert engine.stats().swap.host_blocks == 0
    assert aborted[0].output_token_ids == requests[0].output_token_ids


def test_auto_takes_the_cheaper():
    """Against times that are given: 16 tokens computed in the time of two blocks, or of nine, there and back."""
    for seconds, swaps in ((1.0, True), (9.0, False)):
        engine = tiny_engine(preemption="auto")
        engine.copy_seconds = seconds
        engine.collector.prefill_tokens, engine.collector.prefill_seconds = 16.0, 16.0 * 1.5
        assert engine._swap_pays(1) == engine._swap_pays(7) == swaps
    assert tiny_engine(preemption="swap")._swap_pays(1)
    assert not tiny_engine(preemption="recompute").scheduler.store.in_use


def test_settings_are_checked():
    sizes = dict(num_blocks=65, max_model_len=64)
    with pytest.raises(ValueError, match=r"preemption must be one of \['recompute', 'swap', 'auto'\], got 'copy'"):
        EngineConfig(**sizes, preemption="copy")
    for bad in (-1, 1.5):
        with pytest.raises(ValueError, match=f"swap_space_bytes must be an integer of at least 0, got {bad}"):
            EngineConfig(**sizes, swap_space_bytes=bad)
