"""Embeddings against a plain forward pass."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jpaged_models import merge_params, pack_model, pick_linear_backend
from tiny import contiguous_attend, tiny_config, tiny_model

from jpaged.embedding import Embedder

LENGTHS = (1, 5, 64, 65, 128)


def fake_engine(loaded):
    runner = SimpleNamespace(params=loaded.params, graphdef=loaded.graphdef, mesh=loaded.mesh)
    return SimpleNamespace(runner=runner, config=tiny_config(), model=loaded.config)


@pytest.fixture(scope="module")
def reference() -> dict[int, np.ndarray]:
    """Hidden states f32[n, H] of the first n tokens."""
    loaded = tiny_model()
    model = merge_params(loaded.graphdef, loaded.params)
    run = jax.jit(lambda tokens: model(tokens, jnp.arange(128), (None,) * 2, contiguous_attend)[0])
    hidden = np.asarray(run(jnp.asarray(tokens_of(128))))
    return {length: hidden[:length] for length in LENGTHS}  # causal: what follows changes nothing


def tokens_of(count: int) -> list[int]:
    return np.random.default_rng(0).integers(0, 97, 128).tolist()[:count]


@pytest.mark.parametrize("packed", [False, True])
def test_a_text_is_the_pool_of_its_hidden_states(reference, packed):
    if packed and pick_linear_backend("auto") != "cpu":
        pytest.skip("needs the native kernels")
    loaded = pack_model(tiny_model()) if packed else tiny_model()
    embedders = {pooling: Embedder(fake_engine(loaded), pooling) for pooling in ("mean", "last")}
    embedders["last"].program = embedders["mean"].program  # the pooling is data
    assert embedders["mean"].buckets == (64, 128)
    for length in LENGTHS:
        hidden = reference[length]
        for pooling, expected in (("mean", hidden.mean(axis=0)), ("last", hidden[-1])):
            found = embedders[pooling].embed(tokens_of(length))
            assert np.linalg.norm(found) == pytest.approx(1, abs=1e-5)
            assert np.allclose(found, expected / np.linalg.norm(expected), atol=2e-5)
    assert embedders["mean"].program._cache_size() == 2, "a program for each length, nothing else"


def test_a_pooling_that_there_is_not():
    with pytest.raises(ValueError, match="pooling must be one of mean, last, got 'max'"):
        Embedder(fake_engine(tiny_model()), "max")
