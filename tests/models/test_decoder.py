"""The decoder as a function of flat parameters: names, shapes, and how its products are computed."""

from __future__ import annotations

import re
from typing import Any

import families
import jax
import jax.numpy as jnp
import model_support as support
import numpy as np
import pytest
from jpaged_models import ModelConfig, flatten_params, init_cache, merge_params, param_shapes
from jpaged_models.weights import recipes

from pallas_kernels import AttentionSpec


@pytest.mark.parametrize("family", ["llama_bias", "qwen3", "smollm"])
def test_recipes_cover_every_parameter(family: str) -> None:
    config = ModelConfig.from_hf(families.hf_config(family))
    _, shapes = param_shapes(config, jnp.float32)
    made = recipes(config)
    assert set(made) == set(shapes)
    for name, recipe in made.items():
        outputs = sum(shape[0] for shape in recipe.parts.values())
        rest = next(iter(recipe.parts.values()))[1:]
        assert shapes[name].shape == (outputs, *rest), name


def test_flat_parameters_round_trip() -> None:
    _, graphdef, params = support.tiny_model(families.hf_config("qwen3"))
    again, flat = flatten_params(merge_params(graphdef, params))
    assert again == graphdef and hash(again) == hash(graphdef)
    assert flat.keys() == params.keys()
    assert all(flat[name] is params[name] for name in params)


@pytest.mark.parametrize("rows", [8, 80], ids=["few rows: weights on the left", "many rows"])
def test_products_of_bfloat16_are_asked_for_in_float32(rows: int) -> None:
    """XLA:CPU is fast only so. And a weight enters its product as it is stored, not as a copy."""
    config, graphdef, params = support.tiny_model(families.hf_config("llama2"))
    params = {name: x.astype(jnp.bfloat16) for name, x in params.items()}

    def logits(params: Any, tokens: jax.Array) -> jax.Array:
        decoder = merge_params(graphdef, params)

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, rotary: Any, cache: Any, spec: AttentionSpec, layer: Any
        ) -> Any:
            return q, cache

        hidden, _ = decoder(tokens, tokens, None, attend)
        assert hidden.dtype == jnp.bfloat16
        return decoder.logits(hidden)

    text = jax.jit(logits).lower(params, jax.ShapeDtypeStruct((rows,), jnp.int32)).as_text()
    dots = re.findall(r"dot_general .*: \((tensor<\S+>), (tensor<\S+>)\) -> (tensor<\S+>)", text)
    assert len(dots) == 4 * config.num_layers + 1
    stored = {f"tensor<{'x'.join(map(str, x.shape))}xbf16>" for x in params.values() if x.ndim == 2}
    for left, right, result in dots:
        assert left.endswith("xbf16>") and right.endswith("xbf16>") and result.endswith("xf32>")
        assert (left if rows == 8 else right) in stored


def test_a_stray_token_is_clipped_not_wrapped_into_nan() -> None:
    config, graphdef, params = support.tiny_model(families.hf_config("llama2"))
    step = support.contiguous_step(graphdef)
    cache = support.contiguous_cache(config, 8)
    last, _ = step(params, jnp.asarray([159]), jnp.int32(0), cache)
    stray, _ = step(params, jnp.asarray([100_000]), jnp.int32(0), cache)
    np.testing.assert_array_equal(stray, last)


def test_rows_meet_in_attention_only() -> None:
    """NaN in one row (its embedding) stays in that row when attention does not mix them."""
    _, graphdef, params = support.tiny_model(families.hf_config("qwen2"))
    params = {**params, "embedding": params["embedding"].at[7].set(jnp.nan)}

    @jax.jit
    def hidden(params: Any, tokens: jax.Array) -> jax.Array:
        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, rotary: Any, cache: Any, spec: AttentionSpec, layer: Any
        ) -> Any:
            return q, cache

        return merge_params(graphdef, params)(tokens, jnp.arange(3), None, attend)[0]

    rows = hidden(params, jnp.asarray([3, 7, 4]))
    assert np.isnan(rows[1]).all()
    assert np.isfinite(rows[0]).all() and np.isfinite(rows[2]).all()


def test_cache_layout_and_refusals() -> None:
    config = ModelConfig.from_hf(families.hf_config("qwen3"))
    cache = init_cache(config, 5, 4, jnp.float32)
    assert len(cache) == config.num_layers
    leaves = jax.tree.leaves(cache)
    assert all(x.shape == (5, config.num_kv_heads, 4, config.head_dim) for x in leaves)
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)  # donation needs separate buffers
    for blocks, size in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            init_cache(config, blocks, size, jnp.float32)
