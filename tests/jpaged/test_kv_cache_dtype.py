"""KV caches of other dtypes than the model's: the engine's tokens are those of a plain model with rounded K and V."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jpaged_models import merge_params
from paged_cases import stored, values
from tiny import contiguous_attend, finish, make_prompts, tiny_config, tiny_model

from jpaged import LLM, Engine, EngineConfig, SamplingParams
from jpaged.config import KV_CACHE_DTYPES
from pallas_kernels import KV_DTYPES, rotate

LENGTH = 64  # that all reference passes are padded to
STORED_AS = {"bfloat16": "bfloat16", "float16": "float16", "int8": "int8", "fp8": "float8_e4m3fn"}


def rounded(x: jax.Array, name: str) -> jax.Array:
    """Values as a cache of this dtype gives them back; by NumPy."""

    def through(x: np.ndarray) -> np.ndarray:
        return values(*stored(np.asarray(x), STORED_AS[name]))

    return jax.pure_callback(through, jax.ShapeDtypeStruct(x.shape, jnp.float32), x)


@functools.lru_cache
def reference(name: str) -> Callable[[dict, jax.Array], jax.Array]:
    """Jitted (params, tokens i32[LENGTH]) -> logits f32[LENGTH, V], without a cache, of rounded K and V."""

    def attend(q, k, v, rotary, *rest):
        still = tuple(jnp.full_like(x, value) for x, value in zip(rotary, (1.0, 0.0), strict=True))
        q, k = rotate(q, rotary), rotate(k, rotary)
        return contiguous_attend(q, rounded(k, name), rounded(v, name), still, *rest)

    @jax.jit
    def run(params: dict, tokens: jax.Array) -> jax.Array:
        loaded = tiny_model()
        model = merge_params(loaded.graphdef, params)
        hidden, _ = model(tokens, jnp.arange(LENGTH), None, attend)
        return model.logits(hidden)

    return run


@pytest.mark.parametrize("name", list(STORED_AS))
def test_tokens_are_those_of_a_model_with_rounded_keys_and_values(name: str) -> None:
    """Prompts in chunks, preemption, several steps a dispatch. Rounding may fall the other way where a number lies
    just between two, so that only tokens count whose logit is well above the next."""
    engine = Engine(tiny_model(), tiny_config(kv_cache_dtype=name, num_blocks=33, max_num_batched_tokens=16))
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = make_prompts(6, 40)
    requests = [engine.add_request(f"r{i}", prompt, greedy) for i, prompt in enumerate(prompts)]
    finish(engine)
    checked = 0
    for request in requests:
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        first = len(request.prompt_token_ids)
        padded = jnp.asarray(tokens + [0] * (LENGTH - len(tokens)))
        logits = np.asarray(reference(name)(tiny_model().params, padded))[first - 1 : len(tokens) - 1]
        best, second = np.sort(logits, axis=1)[:, :-3:-1].T
        sure = best - second > 0.05 * np.abs(logits).max()
        np.testing.assert_array_equal(logits.argmax(axis=1)[sure], np.array(request.output_token_ids)[sure])
        checked += int(sure.sum())
    assert checked > 40


def test_what_is_not_a_kv_cache_dtype() -> None:
    assert ("auto", *KV_DTYPES) == KV_CACHE_DTYPES
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of 'auto', .*'fp8', got 'int4'"):
        LLM(tiny_model(), kv_cache_dtype="int4")
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of"):
        EngineConfig(num_blocks=9, max_model_len=16, kv_cache_dtype="fp4")


@pytest.mark.parametrize(
    ("name", "stored_as", "leaves"),
    [("auto", "float32", 2), ("bfloat16", "bfloat16", 2), ("int8", "int8", 4), ("fp8", "float8_e4m3fn", 4)],
)
def test_pages_of_an_llm(name: str, stored_as: str, leaves: int) -> None:
    """The same bytes hold nearly four times as many tokens in int8 as in float32: of 8 numbers, one scale."""
    options = dict(block_size=4, max_num_seqs=8, kv_cache_memory_bytes=1 << 16, warm_up=False)
    llm = LLM(tiny_model(), kv_cache_dtype=name, **options)
    layer = jax.tree.leaves(llm.engine.runner.state.cache[0])
    on_cpu = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"} if jax.default_backend() == "cpu" else {}
    assert layer[0].dtype == on_cpu.get(stored_as, stored_as) and len(layer) == leaves
    token_and_head = {"float32": 2 * 8 * 4, "bfloat16": 2 * 8 * 2}.get(stored_as, 2 * (8 + 4))
    assert llm.config.num_blocks == (1 << 16) // (2 * 2 * 4 * token_and_head)
