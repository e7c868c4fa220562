"""The state stepped by hand: what serving computes, and states that stay what they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import greedy_reference, tiny_config, tiny_model

from jpaged import FunctionalEngine, SamplingParams
from jpaged.functional import SERVED

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def engine() -> FunctionalEngine:
    return FunctionalEngine(tiny_model(), tiny_config(num_blocks=25, max_model_len=48, decode_steps=4))


def test_extend_and_decode_are_greedy_search(engine: FunctionalEngine) -> None:
    """In one piece or two, beside another sequence, and over several dispatches."""
    state, first = engine.extend(engine.init(), {2: PROMPT[:3], 5: [40, 41]})
    state, second = engine.extend(state, {2: PROMPT[3:]})
    state, drawn = engine.decode(state, [5, 2], steps=9)
    assert [second[2], *drawn[2]] == greedy_reference(PROMPT, 10)
    assert [first[5], *drawn[5]] == greedy_reference([40, 41], 10)
    engine.check(state)


def test_an_old_state_is_a_rewind(engine: FunctionalEngine) -> None:
    state, _ = engine.extend(engine.init(), {0: PROMPT})
    kept = jax.tree.map(np.array, state)
    later, drawn = engine.decode(state, [0], steps=6)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), jax.tree.map(np.array, state), kept))
    assert engine.decode(state, [0], steps=6)[1] == drawn
    assert int(later.tables.length[0]) == len(PROMPT) + 6


def test_forks_share_blocks_until_they_write(engine: FunctionalEngine) -> None:
    state, _ = engine.extend(engine.init(), {0: PROMPT})  # one full block and half of another
    state = engine.fork(state, {1: 0, 3: 0})
    assert np.array_equal(state.tables.blocks[1], state.tables.blocks[0])
    assert state.pool.refcount[state.tables.blocks[0, :2]].tolist() == [3, 3]
    seeds = {slot: SamplingParams(temperature=2.0, seed=slot, max_tokens=None, ignore_eos=True) for slot in (1, 3)}
    state, drawn = engine.decode(engine.set_sampling(state, seeds), [0, 1, 3], steps=5)
    engine.check(state)
    assert drawn[0] == greedy_reference(PROMPT, 6)[1:] and drawn[1] != drawn[3]
    first, second = np.asarray(state.tables.blocks[jnp.array([0, 1, 3]), :2]).T
    assert len(set(first)) == 1 and len(set(second)) == 3
    state = engine.release(state, [0, 1, 3])
    engine.check(state)
    assert int(state.pool.num_free) == 24 and not state.slots.left.any()


def test_logits_are_those_of_the_next_token(engine: FunctionalEngine) -> None:
    state, _ = engine.extend(engine.init(), {0: PROMPT, 4: [50]})
    logits = engine.logits(state, [4, 0])
    _, drawn = engine.decode(state, [4, 0])
    assert logits.shape == (2, 97)
    assert jnp.argmax(logits, axis=1).tolist() == [drawn[4][0], drawn[0][0]]
    forced = state._replace(slots=state.slots._replace(last_token=state.slots.last_token.at[0].set(77)))
    assert engine.decode(forced, [0])[1][0] == greedy_reference([*PROMPT, 77], 1)


def test_keys_and_values_do_not_depend_on_where_they_lie(engine: FunctionalEngine) -> None:
    alone, _ = engine.extend(engine.init(), {0: PROMPT})
    beside, _ = engine.extend(engine.init(), {1: [90] * 7})
    beside, _ = engine.extend(beside, {6: PROMPT})
    assert not np.array_equal(alone.tables.blocks[0, :2], beside.tables.blocks[6, :2])
    for one, other in zip(engine.read_kv(alone, 0), engine.read_kv(beside, 6), strict=True):
        assert one.shape == (2, 6, 2, 8) and float(jnp.abs(one).min(axis=(2, 3)).max()) > 0
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
def test_read_kv_gives_numbers_whatever_they_are_stored_as(engine: FunctionalEngine, kv_cache_dtype: str) -> None:
    exact = engine.read_kv(engine.extend(engine.init(), {0: PROMPT})[0], 0)
    other = FunctionalEngine(tiny_model(), tiny_config(kv_cache_dtype=kv_cache_dtype))
    rounded = other.read_kv(other.extend(other.init(), {0: PROMPT})[0], 0)
    for one, two in zip(exact, rounded, strict=True):
        assert 0 < float(jnp.abs(one[0] - two[0]).max()) < 0.02 * float(jnp.abs(one[0]).max())


def test_a_donated_state_is_gone() -> None:
    engine = FunctionalEngine(tiny_model(), tiny_config(), donate=True)
    state = engine.init()
    copy = jax.tree.map(jnp.copy, state)
    _, first = engine.extend(state, {0: PROMPT})
    assert state.cache[0].k.is_deleted() and not copy.cache[0].k.is_deleted()
    assert engine.extend(copy, {0: PROMPT})[1] == first == {0: greedy_reference(PROMPT, 1)[0]}


def test_where_a_sequence_ends(engine: FunctionalEngine) -> None:
    expected = greedy_reference(PROMPT, 6)
    params = SamplingParams(temperature=0.0, stop_token_ids=[expected[3]], max_tokens=None)
    state, _ = engine.extend(engine.init(), {0: PROMPT}, params)
    assert engine.decode(state, [0], steps=5)[1][0] == expected[1:4]
    state, _ = engine.extend(engine.init(), {0: PROMPT}, SamplingParams(temperature=0.0, max_tokens=3))
    assert engine.decode(state, [0], steps=5)[1][0] == expected[1:3]


def test_what_is_refused(engine: FunctionalEngine) -> None:
    empty = engine.init()
    state, _ = engine.extend(empty, {0: PROMPT})
    for refused, message in [
        (lambda: engine.decode(empty, [0]), "slot 0 must hold a sequence"),
        (lambda: engine.decode(state, [0, 0]), "each slot may be named once"),
        (lambda: engine.decode(state, [0], steps=43), "49 of 48 tokens"),
        (lambda: engine.extend(state, {8: [3]}), "slot 8 is none: they are 0 to 7"),
        (lambda: engine.extend(state, {0: []}), "1 to 42 may be added, got 0"),
        (lambda: engine.extend(state, {0: [97]}), "tokens of slot 0 must be 0 to 96"),
        (lambda: engine.extend(state, {0: [3] * 20, 1: [3] * 20}), "40 tokens, but max_num_batched_tokens is 32"),
        (lambda: engine.fork(state, {0: 0}), "slot 0 must be empty"),
        (lambda: engine.fork(state, {1: 2}), "slot 2 must hold a sequence"),
        (lambda: engine.set_sampling(state, {0: SamplingParams(n=2)}), r"\['n'\] cannot be served by hand"),
        (lambda: engine.set_sampling(state, {0: SamplingParams(stop_token_ids=[97])}), "all below 97"),
        (lambda: FunctionalEngine(tiny_model(), tiny_config(tensor_parallel_size=2)), "must be 1 here"),
    ]:
        with pytest.raises(ValueError, match=message):
            refused()
    full, _ = engine.extend(state, {slot: [3] * 4 for slot in range(1, 8)})
    with pytest.raises(RuntimeError, match="blocks are free"):
        for _ in range(5):
            full, _ = engine.extend(full, {slot: [3] * 4 for slot in range(1, 8)})
    assert {field for field in SERVED if not hasattr(SamplingParams(), field)} == set()
