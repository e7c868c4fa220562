"""Tiny models of each family: their configs, and weights anyone can make again from a tensor's name alone.

``scripts/make_goldens.py`` feeds these to transformers, the tests feed them to our decoder; so a golden file
holds only the config, the tokens and the logits. Needs NumPy only.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

PROMPT_LENGTH, STEPS = 20, 10

_BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = {**_BASE, "model_type": "llama", "rope_theta": 10000.0}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}

# as config.json says it; ``prompt_length`` (default PROMPT_LENGTH) is ours
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {**_LLAMA, "num_key_value_heads": 4},
    "llama3": {
        **_LLAMA,
        "rope_theta": 500000.0,
        "eos_token_id": [2, 5, 7],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "linear": {**_LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    # so short that decoding grows past it
    "dynamic": {
        **_LLAMA,
        "max_position_embeddings": 24,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "yarn": {
        **_LLAMA,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "yarn_mscale": {
        **_LLAMA,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    },
    "longrope": {
        **_LLAMA,
        "original_max_position_embeddings": 24,
        "rope_scaling": {**_LONG, "original_max_position_embeddings": 24},
        "prompt_length": 28,
    },
    "longrope_short": {
        **_LLAMA,
        "original_max_position_embeddings": 64,
        "rope_scaling": {**_LONG, "original_max_position_embeddings": 64},
    },
    "llama_bias": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "smollm": {
        **_LLAMA,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "tie_word_embeddings": True,
        "rope_theta": 100000.0,
    },
    "tinyllama": {**_LLAMA, "num_attention_heads": 8, "num_key_value_heads": 1},
    "mistral": {**_BASE, "model_type": "mistral", "head_dim": 32, "rope_theta": 1e6, "sliding_window": None},
    "mistral_window": {**_BASE, "model_type": "mistral", "rope_theta": 1e6, "sliding_window": 7},
    "qwen2_window": {
        **_BASE,
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "rope_theta": 1e6,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen3_window": {
        **_BASE,
        "model_type": "qwen3",
        "head_dim": 32,
        "rope_theta": 1e6,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2": {
        **_BASE,
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 64,
        "tie_word_embeddings": True,
    },
    "qwen3": {**_BASE, "model_type": "qwen3", "head_dim": 32, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
}


def hf_config(family: str) -> dict[str, Any]:
    """The ``config.json`` of a family."""
    return {key: value for key, value in FAMILIES[family].items() if key != "prompt_length"}


def tokens(family: str) -> np.ndarray:
    """Prompt and forced continuation, i64[prompt + STEPS]."""
    length = FAMILIES[family].get("prompt_length", PROMPT_LENGTH) + STEPS
    return np.random.RandomState(zlib.crc32(family.encode())).randint(0, _BASE["vocab_size"], length)


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 weight called ``name`` (a Hugging Face name). RandomState's stream is frozen for good."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("norm.weight"):
        return (1 + 0.2 * noise).astype(np.float32)
    if name.endswith(".bias"):
        return (0.3 * noise).astype(np.float32)
    if "embed_tokens" in name:
        return (0.5 * noise).astype(np.float32)
    # large enough that attention is far from uniform and every part of the model matters
    return (1.5 * noise / np.sqrt(shape[-1])).astype(np.float32)
