"""Which kernels an engine uses: every choice gives the same tokens, is what the statistics say, or is refused."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jpaged_models import LINEAR_BACKENDS, LoadedModel, merge_params, pack_model
from tiny import contiguous_attend, greedy_reference, make_prompts, run_all, tiny_config, tiny_engine, tiny_model

from jpaged import LLM, Engine, EngineConfig, SamplingParams
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
    assert names == set(loaded.params)
    assert pack_model(packed) is packed
    given = LoadedModel(loaded.config, loaded.graphdef, dict(loaded.params), None, loaded.generation)
    consumed = pack_model(given, consume=True)
    assert not given.params
    assert consumed.params.keys() == packed.params.keys()
    for name, array in packed.params.items():
        np.testing.assert_array_equal(consumed.params[name], array)
    first, second = (Engine(model, tiny_config()) for model in (loaded, packed))
    prompts = make_prompts(2, 20)
    assert run_all(first, prompts, GREEDY) == run_all(second, prompts, GREEDY)


@native
def test_a_loop_over_layers_computes_what_the_layers_do_one_by_one() -> None:
    """Layers that see all, then two with a window: a run of one and a run of two."""
    loaded = tiny_model(window=8, layers=3)
    loaded = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, windows=(None, 8, 8)))
    looped, flat = (pack_model(loaded, stacked=stacked) for stacked in (True, False))
    assert (looped.runs, flat.runs) == ((1, 2), (1, 1, 1))
    assert flat.params.keys() == loaded.params.keys()
    for name, array in looped.params.items():
        if name.startswith("layers.1"):
            parts = [flat.params[name.replace("layers.1", f"layers.{layer}")] for layer in (1, 2)]
            np.testing.assert_array_equal(array, np.stack(parts))
    tokens = np.arange(3, 40)
    got, want = (whole_logits(model, tokens) for model in (looped, flat))  # attention by XLA, which fuses as it likes
    assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)


@native
def test_int8_weights() -> None:
    """Close to the model they are made of, and the same tokens in any batch; every matrix is rounded."""
    loaded = tiny_model()
    rounded = pack_model(loaded, quantization="int8")
    assert (loaded.quantization, rounded.quantization, rounded.dtype) == (None, "int8", loaded.dtype)
    assert all((array.dtype == "int8") == ("norm" not in name) for name, array in rounded.params.items())
    tokens = np.arange(3, 60)
    want, got = (whole_logits(model, tokens) for model in (pack_model(loaded), rounded))
    assert 1e-4 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.05
    prompts = make_prompts(5, 30)
    engine = Engine(rounded, tiny_config())
    together = run_all(engine, prompts, GREEDY)
    assert engine.stats().linear_backend == "cpu, int8"
    assert [run_all(engine, [prompt], GREEDY)[0] for prompt in prompts] == together
    best = [int(np.argmax(whole_logits(rounded, np.asarray(prompt))[-1])) for prompt in prompts]
    assert [tokens[0] for tokens in together] == best
    assert Engine(loaded, tiny_config()).model_key != engine.model_key, "their cached blocks differ"


def whole_logits(loaded: LoadedModel, tokens: np.ndarray) -> np.ndarray:
    """Of one whole sequence without pages, [T, V]."""
    model = merge_params(loaded.graphdef, loaded.params)
    hidden, _ = model(tokens, np.arange(len(tokens)), None, contiguous_attend)
    return np.asarray(model.logits(hidden))


@native
def test_refusals_of_quantization() -> None:
    sizes = dict(max_model_len=64, num_blocks=32, warm_up=False)
    with pytest.raises(ValueError, match="quantization 'int4' is not known; allowed: None, 'int8'"):
        LLM(tiny_model(), quantization="int4", **sizes)
    with pytest.raises(ValueError, match="quantization 'int8' needs products by the native CPU kernels"):
        LLM(tiny_model(), quantization="int8", linear_backend="xla", **sizes)
    with pytest.raises(ValueError, match="quantization 'int8' is asked for, but the model was packed without it"):
        LLM(pack_model(tiny_model()), quantization="int8", **sizes)


@native
def test_free_padding_needs_one_program_of_each_kind() -> None:
    sizes = dict(num_blocks=65, max_model_len=128, block_size=4, max_num_seqs=32, max_num_batched_tokens=512)
    config = EngineConfig(**sizes, free_padding=True)
    assert (config.decode_buckets, config.token_buckets) == ((32,), (512,))
    odd = EngineConfig(**sizes | dict(max_num_seqs=3, max_num_batched_tokens=21), free_padding=True)
    assert (odd.decode_buckets, odd.token_buckets) == ((8,), (24,))
    config = EngineConfig(**sizes)
    assert (config.decode_buckets, config.token_buckets) == ((8, 16, 32), (32, 64, 128, 256, 512))
    small = dict(max_model_len=64, num_blocks=32, warm_up=False)
    assert LLM(tiny_model(), **small).config.free_padding
    assert not LLM(tiny_model(), linear_backend="xla", **small).config.free_padding


def test_refusals() -> None:
    with pytest.raises(ValueError, match=f"linear_backend 'fast' is not known; allowed: {', '.join(LINEAR_BACKENDS)}"):
        LLM(tiny_model(), linear_backend="fast", max_model_len=64, num_blocks=32, warm_up=False)
    assert jax.default_backend() == "cpu"
