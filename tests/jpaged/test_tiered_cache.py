"""Cached blocks that the device has no room for, on a tiny model: they come back from memory and from files."""

import logging

import pytest
from tiny import finish, greedy_reference, make_prompts, run_all, tiny_config, tiny_engine, tiny_model

from jpaged import LLM, Engine, EngineConfig, SamplingParams
from jpaged.tiers import LABEL

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SHORT_OF_MEMORY = dict(num_blocks=34, watermark=0.0)  # sizes that other files use as well
BLOCK_BYTES = 2 * 2 * 2 * 4 * 8 * 4  # layers, K and V, heads, tokens, head size, float32
PROMPTS = [[7 + 3 * i, *prompt] for i, prompt in enumerate(make_prompts(8, 40, seed=4))]


@pytest.fixture(scope="module")
def expected():
    return [greedy_reference(prompt, 6) for prompt in PROMPTS]


def full_blocks(prompts: list[list[int]]) -> int:
    """Blocks that a prompt can find in a cache."""
    return sum((len(prompt) - 1) // 4 for prompt in prompts)


def test_blocks_come_back_from_memory(expected):
    engine = tiny_engine(**SHORT_OF_MEMORY, prefix_cache_host_bytes=200 * BLOCK_BYTES)
    assert run_all(engine, PROMPTS, GREEDY) == expected
    before = engine.stats()
    assert 0 < before.swap.host_bytes <= 200 * BLOCK_BYTES
    assert run_all(engine, PROMPTS, GREEDY) == expected
    engine.audit()
    after = engine.stats()
    hits = after.prefix_cache.hit_tokens - before.prefix_cache.hit_tokens
    assert hits == 4 * full_blocks(PROMPTS)  # of 33 blocks on the device: nothing is computed twice
    assert 0 < after.prefix_cache.restored_tokens <= hits
    assert after.swap.restored_bytes == after.swap.restored_blocks * BLOCK_BYTES > 0
    assert engine.reset_prefix_cache() and engine.stats().swap.host_blocks == 0
    assert run_all(engine, PROMPTS[:1], GREEDY) == expected[:1]
    assert engine.stats().prefix_cache.hit_tokens == after.prefix_cache.hit_tokens


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_memory_is_bounded(expected, async_scheduling):
    engine = tiny_engine(**SHORT_OF_MEMORY, prefix_cache_host_bytes=10 * BLOCK_BYTES, async_scheduling=async_scheduling)
    for _ in range(2):
        assert run_all(engine, PROMPTS, GREEDY) == expected
        assert engine.stats().swap.host_blocks == 10


def test_files_are_found_by_the_next_engine(tmp_path, expected):
    options = dict(**SHORT_OF_MEMORY, prefix_cache_dir=str(tmp_path))
    engine = tiny_engine(**options)
    assert run_all(engine, PROMPTS, GREEDY) == expected
    engine.scheduler.store.disk.flush()
    spilled = engine.stats().prefix_cache.disk_blocks
    assert spilled == len(list(tmp_path.glob("*.kv"))) > 0
    assert engine.save_prefix_cache() == len(list(tmp_path.glob("*.kv"))) > spilled
    assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) == engine.stats().prefix_cache.disk_bytes
    again = tiny_engine(**options)
    assert run_all(again, PROMPTS, GREEDY) == expected
    stats = again.stats()
    assert stats.prefix_cache.hit_tokens == stats.prefix_cache.restored_tokens == 4 * full_blocks(PROMPTS)
    assert stats.prefix_cache.disk_reads > 0 and stats.prefix_cache.disk_damaged == 0
    # One that is damaged costs that block and what follows it in its own sequence; nobody's tokens change.
    victims = sorted(tmp_path.glob("*.kv"))[::3]
    for path in victims:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    damaged = tiny_engine(**options)
    assert run_all(damaged, PROMPTS, GREEDY) == expected
    stats = damaged.stats().prefix_cache
    assert 0 < stats.disk_damaged <= len(victims) and 0 < stats.restored_tokens < 4 * full_blocks(PROMPTS)
    assert damaged.reset_prefix_cache()
    damaged.scheduler.store.disk.flush()
    assert [path.name for path in tmp_path.iterdir()] == [LABEL]


def test_files_are_bounded(tmp_path, expected):
    most = 9 * (BLOCK_BYTES + 16)
    engine = tiny_engine(**SHORT_OF_MEMORY, prefix_cache_dir=str(tmp_path), prefix_cache_disk_bytes=most + 100)
    assert run_all(engine, PROMPTS, GREEDY) == expected
    assert engine.save_prefix_cache() == 9
    assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) == most


@pytest.mark.parametrize("change", ["weights", "kv_cache_dtype", "block_size"])
def test_files_of_another_model_are_not_used(tmp_path, change, caplog):
    """Weights count too, not the architecture alone."""
    options = dict(num_blocks=34, prefix_cache_dir=str(tmp_path))
    Engine(tiny_model(), tiny_config(**options))
    other = dict(kv_cache_dtype="int8") if change == "kv_cache_dtype" else {}
    other |= dict(block_size=8) if change == "block_size" else {}
    with caplog.at_level(logging.WARNING):
        engine = Engine(tiny_model(seed=change == "weights"), tiny_config(**options, **other))
    assert "not used" in caplog.text and ("model" if change == "weights" else change) in caplog.text
    assert engine.scheduler.store.disk is None and engine.stats().prefix_cache.disk_blocks == 0
    with pytest.raises(ValueError, match="nowhere to save the prefix cache to"):
        engine.save_prefix_cache()


def test_tenants_do_not_share_what_is_in_memory():
    """Each computes the prompt once, however little of it the device still has."""
    engine = tiny_engine(**SHORT_OF_MEMORY, prefix_cache_host_bytes=200 * BLOCK_BYTES)
    prompt = list(range(3, 40))
    for salt, hits in ((None, 0), ("a", 0), ("b", 0), ("a", 36), (None, 36)):
        before = engine.stats().prefix_cache.hit_tokens
        request = engine.add_request("x", prompt, GREEDY, cache_salt=salt)
        finish(engine)
        assert request.output_token_ids == greedy_reference(prompt, 6)
        assert engine.stats().prefix_cache.hit_tokens - before == hits


def test_options_reach_the_engine(tmp_path):
    sizes = dict(max_model_len=128, block_size=4, num_blocks=34, max_num_seqs=8, max_num_batched_tokens=32)
    tiers = dict(prefix_cache_dir=tmp_path / "cache", prefix_cache_host_bytes=1 << 20)
    llm = LLM(tiny_model(), warm_up=False, **tiers, **sizes)
    prompt = list(range(3, 14))
    llm.generate([prompt], GREEDY, use_tqdm=False)
    assert llm.save_prefix_cache() == llm.stats().blocks.cached == 4
    with pytest.raises(ValueError, match="prefix_cache_host_bytes must be an integer of at least 0, got -1"):
        EngineConfig(64, 64, prefix_cache_host_bytes=-1)
    with pytest.raises(ValueError, match="need enable_prefix_caching=True"):
        EngineConfig(64, 64, prefix_cache_dir="x", enable_prefix_caching=False)
