"""ModelConfig: what is read from config.json, and what is refused and how."""

from __future__ import annotations

import json
from typing import Any

import families
import pytest
from jpaged_models import ConfigError, ModelConfig

LLAMA = families.hf_config("llama2")
DROP = object()


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**base, **changes}.items() if value is not DROP}


def test_switches_of_the_families() -> None:
    read = {name: ModelConfig.from_hf(families.hf_config(name)) for name in families.FAMILIES}
    qwen2, qwen3, bias = read["qwen2"], read["qwen3"], read["llama_bias"]
    assert (qwen2.qkv_bias, qwen2.attention_out_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 32)
    assert (bias.qkv_bias, bias.attention_out_bias, bias.mlp_bias) == (True, True, True)
    assert read["smollm"].tie_word_embeddings and not read["tinyllama"].tie_word_embeddings
    assert read["llama3"].eos_token_ids == (2, 5, 7) and read["llama2"].eos_token_ids == (2,)


def test_defaults_where_old_configs_say_nothing() -> None:
    config = ModelConfig.from_hf(changed(LLAMA, num_key_value_heads=DROP, rope_theta=DROP, hidden_act=DROP))
    assert config.num_kv_heads == config.num_heads == 4
    assert config.rope.theta == 10000.0
    assert config.head_dim == 16
    assert ModelConfig.from_hf(changed(families.hf_config("qwen3"), head_dim=DROP)).head_dim == 128


@pytest.mark.parametrize("family", families.FAMILIES)
def test_survives_json(family: str) -> None:
    config = ModelConfig.from_hf(families.hf_config(family))
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(ModelConfig.from_hf(families.hf_config(family)))


def test_a_damaged_saved_config_is_refused() -> None:
    saved = ModelConfig.from_hf(LLAMA).to_dict()
    for damaged in ({**saved, "surprise": 1}, {k: v for k, v in saved.items() if k != "rope"}, {"rope": 3}):
        with pytest.raises(ConfigError, match="saved ModelConfig"):
            ModelConfig.from_dict(damaged)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_neox"}, "model_type 'gpt_neox' .* allowed: llama, mistral, qwen2, qwen3"),
        ({"model_type": DROP}, "model_type None"),
        ({"hidden_size": DROP, "vocab_size": DROP}, "needs 'vocab_size', 'hidden_size'"),
        ({"rms_norm_eps": DROP}, "needs 'rms_norm_eps'"),
        ({"max_position_embeddings": None}, "needs 'max_position_embeddings'"),
        ({"model_type": "qwen2", "num_key_value_heads": DROP}, "needs 'num_key_value_heads'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' .* allowed: silu, swish"),
        ({"hidden_size": -64, "head_dim": 16}, "hidden_size must be a positive integer, got -64"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, got 'many'"),
        ({"num_hidden_layers": True}, "num_layers must be a positive integer"),
        ({"num_attention_heads": 7}, "multiple of 7 heads"),
        ({"num_key_value_heads": 3}, "multiple of the number of key/value heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
            "sliding_attention.* in a llama model; allowed: full_attention",
        ),
        (
            {"model_type": "mistral", "layer_types": ["full_attention"] * 2, "sliding_window": 8},
            "full_attention.* in a mistral model; allowed: sliding_attention",
        ),
        ({"layer_types": ["linear_attention"]}, "linear_attention.* allowed: full_attention, sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types must name num_hidden_layers=2 layers, got 1"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be null or a positive integer, got 0"),
        ({"model_type": "mistral", "sliding_window": "all"}, "sliding_window must be null or .* got 'all'"),
        (
            {"rope_scaling": {"type": "su", "factor": 2.0}},
            "'su' .* allowed: default, linear",
        ),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs 'factor'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "needs 'original_max_position_embeddings'",
        ),
        ({"rope_scaling": 4}, "rope scaling must be a dict"),
        (
            {
                "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
                "original_max_position_embeddings": 32,
            },
            "head_dim / 2 = 8",
        ),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(changed(LLAMA, **changes))


QWEN = {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, (64, 64)),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "mistral", "sliding_window": 128}, ()),  # as long as the longest sequence
        ({"model_type": "mistral", "max_position_embeddings": 8192}, (4096, 4096)),  # transformers' default
        ({"model_type": "mistral", "sliding_window": None, "layer_types": ["full_attention"] * 2}, ()),
        ({**QWEN, "max_window_layers": 1}, (None, 64)),
        ({**QWEN, "max_window_layers": 2}, ()),
        ({**QWEN, "use_sliding_window": False, "max_window_layers": 0}, ()),
        ({**QWEN, "layer_types": ["sliding_attention", "full_attention"]}, (64, None)),
        ({**QWEN, "sliding_window": None, "layer_types": ["sliding_attention"] * 2}, ()),
        ({"sliding_window": 64}, ()),  # transformers' Llama ignores it
        ({"layer_types": ["full_attention", "full_attention"]}, ()),
    ],
)
def test_sliding_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = ModelConfig.from_hf(changed(LLAMA, **changes))
    assert config.windows == windows
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_swish_is_silu() -> None:
    assert ModelConfig.from_hf(changed(LLAMA, hidden_act="swish")) == ModelConfig.from_hf(LLAMA)


def test_longrope_factors_follow_the_longest_sequence() -> None:
    config = ModelConfig.from_hf(families.hf_config("longrope"))
    assert config.rope.use_long
    assert not config.with_max_length(24).rope.use_long
    assert config.with_max_length(24).with_max_length(25) == config
    plain = ModelConfig.from_hf(LLAMA)
    assert plain.with_max_length(8) == plain
