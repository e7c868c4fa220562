"""Prefix caching on a tiny model: shared blocks are computed once, and nobody's tokens change."""

import numpy as np
import pytest
from tiny import finish, greedy_reference, make_prompts, run_all, tiny_engine

from jpaged import SamplingParams
from jpaged.prefix_index import block_keys

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SIZE = 4  # tokens in a block of tiny_engine
# Sizes that test_engine.py uses as well: each other pool or budget would cost a minute of compiling.
SHORT_OF_MEMORY = dict(num_blocks=34, watermark=0.0)


def make_groups(groups: int, members: int, prefix: int, seed: int = 0) -> list[list[int]]:
    """Prompts in groups that share `prefix` tokens, each with 1 to 9 of its own; group by group."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(3, 97, prefix).tolist() for _ in range(groups)]
    return [
        [*head, 3 + (7 * j + i) % 90, *rng.integers(3, 97, int(rng.integers(0, 9))).tolist()]
        for i, head in enumerate(heads)
        for j in range(members)
    ]


def by_turns(prompts: list[list[int]], groups: int) -> list[list[int]]:
    """The same prompts, one of each group after the other."""
    members = len(prompts) // groups
    return [prompts[i * members + j] for j in range(members) for i in range(groups)]


def test_cold_warm_and_no_cache_give_the_same_tokens():
    prompts = make_groups(2, 3, 21) + make_prompts(2, 16)
    expected = [greedy_reference(prompt, 6) for prompt in prompts]
    assert run_all(tiny_engine(enable_prefix_caching=False), prompts, GREEDY) == expected
    engine = tiny_engine()
    assert run_all(engine, prompts, GREEDY) == expected
    cold = engine.stats()
    assert run_all(engine, prompts, GREEDY) == expected
    warm = engine.stats()
    # Of a prompt that was seen, all full blocks are found but the one that holds the last token.
    again = warm.prompt_tokens - cold.prompt_tokens
    assert again == sum(len(prompt) - (len(prompt) - 1) // SIZE * SIZE for prompt in prompts)
    hits = warm.prefix_cache.hit_tokens - cold.prefix_cache.hit_tokens
    assert again + hits == sum(map(len, prompts)) == warm.prefix_cache.queried_tokens / 2
    off = tiny_engine(enable_prefix_caching=False)
    run_all(off, prompts, GREEDY)
    assert off.stats().blocks.cached == off.stats().prefix_cache.hit_tokens == 0


@pytest.mark.parametrize("order", ["grouped", "by turns"])
@pytest.mark.parametrize("budget", [8, 32])
def test_prompts_submitted_at_once_compute_their_prefix_once(order, budget):
    """Each block of the prefix is computed by one request only, though all come in the same steps."""
    prompts = make_groups(4, 8, 24)
    prompts = prompts if order == "grouped" else by_turns(prompts, 4)
    engine = tiny_engine(max_num_batched_tokens=budget)
    assert run_all(engine, prompts, GREEDY) == [greedy_reference(prompt, 6) for prompt in prompts]
    own = sum(len(prompt) - 24 for prompt in prompts)
    assert engine.stats().prompt_tokens == 4 * 24 + own
    assert engine.stats().peak_blocks.shared > 0 and engine.stats().sharing_saving > 0


def test_identical_prompts_in_the_same_step():
    """The first computes all, the others the last block: also where the prompt ends with a full block."""
    for length in (23, 24, 25):
        prompt = make_groups(1, 1, length)[0][:length]
        engine = tiny_engine()
        outputs = run_all(engine, [prompt] * 4, GREEDY)
        assert outputs == [greedy_reference(prompt, 6)] * 4
        last = length - (length - 1) // SIZE * SIZE
        assert engine.stats().prompt_tokens == length + 3 * last


def test_a_conversation_goes_on_from_what_was_generated():
    engine = tiny_engine()
    prompt = make_prompts(1, 20)[0]
    (first,) = run_all(engine, [prompt], GREEDY)
    before = engine.stats().prompt_tokens
    longer = [*prompt, *first, 5, 6, 7]
    assert run_all(engine, [longer], GREEDY) == [greedy_reference(longer, 6)]
    known = (len(prompt) + 5) // SIZE * SIZE  # the last token generated is not in the cache
    assert engine.stats().prompt_tokens - before == len(longer) - known


def test_salts_never_share():
    engine = tiny_engine()
    prompt = make_groups(1, 1, 30)[0]
    for name, salt, hit in (("a", "one", 0), ("b", "two", 0), ("c", None, 0), ("d", "one", (len(prompt) - 1) // 4 * 4)):
        before = engine.stats().prefix_cache.hit_tokens
        request = engine.add_request(name, prompt, GREEDY, cache_salt=salt)
        finish(engine)
        assert request.output_token_ids == greedy_reference(prompt, 6)
        assert engine.stats().prefix_cache.hit_tokens - before == hit
    for bad in ("", 7):
        with pytest.raises(ValueError, match="cache_salt must be None or a text"):
            engine.add_request("x", prompt, GREEDY, cache_salt=bad)


def test_the_tail_of_the_oldest_goes_first():
    engine = tiny_engine(**SHORT_OF_MEMORY)
    old, new = ([10 + i] * 4 + list(range(3, 48)) for i in range(2))  # 13 blocks each with what is generated
    for prompt in (old, new):
        run_all(engine, [prompt], GREEDY)
    assert engine.stats().blocks.cached == 26
    run_all(engine, [[30 + i for i in range(40)]], GREEDY)  # 11 or 12 blocks: 7 are free
    assert engine.stats().prefix_cache.evictions == 5
    index, root = engine.scheduler.index, engine._root_key(None)
    assert len(index.match(block_keys(root, new, SIZE))) == 12
    assert len(index.match(block_keys(root, old, SIZE))) == 13 - 5


def test_reset_frees_everything_and_forgets():
    engine = tiny_engine()
    prompt = make_groups(1, 1, 30)[0]
    run_all(engine, [prompt], GREEDY)
    assert engine.stats().blocks.cached > 0
    assert engine.reset_prefix_cache()
    assert engine.stats().blocks.free == engine.stats().blocks.total
    engine.add_request("a", prompt, GREEDY)
    engine.step()
    assert not engine.reset_prefix_cache()  # in use
    finish(engine)
    assert engine.stats().prefix_cache.hit_tokens == 0 and engine.stats().blocks.cached <= 2


def test_pinned_blocks_stay():
    engine = tiny_engine(**SHORT_OF_MEMORY)
    prompt = [5, 6, 7, 8, 9]
    run_all(engine, [prompt], GREEDY)
    pinned = engine.pin_prefix(prompt)
    assert pinned.num_tokens == len(prompt) // SIZE * SIZE
    assert engine.stats().prefix_cache.pinned_blocks == len(prompt) // SIZE
    others = make_prompts(12, 60, seed=8)
    assert run_all(engine, others, GREEDY) == [greedy_reference(other, 6) for other in others]
    before = engine.stats().prefix_cache.hit_tokens
    run_all(engine, [prompt], GREEDY)
    assert engine.stats().prefix_cache.hit_tokens - before == 4
    run_all(engine, [list(range(3, 60))], GREEDY)
    with pytest.raises(ValueError, match=r"15 blocks would be pinned, but at most 1 may be"):
        engine.pin_prefix(list(range(3, 60)))
    engine.unpin_prefix(pinned)
    engine.unpin_prefix(pinned)
    assert engine.stats().prefix_cache.pinned_blocks == 0
    assert engine.reset_prefix_cache() and engine.stats().blocks.free == engine.stats().blocks.total
