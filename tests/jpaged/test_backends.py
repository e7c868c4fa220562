"""Which kernels an engine uses: every choice gives the same tokens, is what the statistics say, or is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jpaged_models import LINEAR_BACKENDS, LoadedModel, pack_model
from tiny import greedy_reference, make_prompts, run_all, tiny_config, tiny_engine, tiny_model

from jpaged import LLM, Engine, SamplingParams
from pallas_kernels import available_backends

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
native = pytest.mark.skipif("cpu" not in available_backends(), reason="the native CPU kernels are not built")


@pytest.mark.parametrize(
    "attention, linear",
    [
        ("xla", "xla"),
        pytest.param("cpu", "xla", marks=native),
        pytest.param("xla", "cpu", marks=native),
        pytest.param("auto", "auto", marks=native),
    ],
)
def test_every_backend_gives_the_reference_tokens(attention: str, linear: str) -> None:
    engine = tiny_engine(attention_backend=attention, linear_backend=linear)
    prompts = make_prompts(5, 30)
    assert run_all(engine, prompts, GREEDY) == [greedy_reference(prompt, 12) for prompt in prompts]
    stats = engine.stats()
    assert stats.linear_backend == ("cpu" if linear == "auto" else linear)
    assert stats.attention_backend.startswith("cpu" if attention == "auto" else attention)


@native
def test_logits_of_a_token_do_not_depend_on_the_batch() -> None:
    """Native products sum in one order: with the same block table the sampled tokens agree even at temperature 5."""
    hot = SamplingParams(temperature=5.0, max_tokens=20, ignore_eos=True, seed=7)
    prompts = make_prompts(6, 40)
    alone = [run_all(tiny_engine(), [prompt], hot)[0] for prompt in prompts[:2]]
    assert run_all(tiny_engine(), prompts, hot)[:2] == alone


@native
def test_packing_keeps_or_consumes_the_model() -> None:
    loaded = tiny_model()
    names = set(loaded.params)
    packed = pack_model(loaded)
    assert set(packed.params) == names == set(loaded.params)
    assert pack_model(packed) is packed
    given = LoadedModel(loaded.config, loaded.graphdef, dict(loaded.params), None, loaded.generation)
    consumed = pack_model(given, consume=True)
    assert not given.params
    for name in names:
        np.testing.assert_array_equal(consumed.params[name], packed.params[name])
    first, second = (Engine(model, tiny_config()) for model in (loaded, packed))
    prompts = make_prompts(2, 20)
    assert run_all(first, prompts, GREEDY) == run_all(second, prompts, GREEDY)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=f"linear_backend 'fast' is not known; allowed: {', '.join(LINEAR_BACKENDS)}"):
        LLM(tiny_model(), linear_backend="fast", max_model_len=64, num_blocks=32, warm_up=False)
    assert jax.default_backend() == "cpu"
