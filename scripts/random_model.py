"""Random-weight models for benchmarks: the shape of a real one, no download."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jpaged_models import GenerationDefaults, LoadedModel, ModelConfig, param_shapes

SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def random_model(hf_config: dict[str, Any], dtype: str, seed: int = 0) -> LoadedModel:
    """A model without tokenizer whose matrices are normal with deviation 1 / sqrt(inputs)."""
    config = ModelConfig.from_hf(hf_config)
    graphdef, shapes = param_shapes(config, jnp.dtype(dtype))
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if "norm" in name:
            return np.ones(shape, np.float32)
        return rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))

    params = {name: jnp.asarray(draw(name, s.shape), s.dtype) for name, s in shapes.items()}
    return LoadedModel(config, graphdef, params, None, GenerationDefaults())
