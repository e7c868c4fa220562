"""A model of any shape with random weights, in memory: for trying things out, benchmarks and tests."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .config import ModelConfig
from .generation import GenerationDefaults
from .load import LoadedModel
from .params import param_shapes

TINY = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def random_model(
    hf_config: Mapping[str, Any] = TINY, dtype: str = "float32", seed: int = 0, *, scale: float = 1.0
) -> LoadedModel:
    """A model without tokenizer whose matrices are normal with deviation scale / sqrt(inputs); norms are 1.

    ``hf_config``: as ``config.json`` says it; by default a Llama of 2 layers and 97 tokens. Where outputs are to vary
    from token to token, 2 is a good scale for so small a model. Raises ``ConfigError`` as ``ModelConfig.from_hf`` does.
    """
    config = ModelConfig.from_hf(hf_config)
    graphdef, shapes = param_shapes(config, jnp.dtype(dtype))
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if "norm" in name:
            return np.ones(shape, np.float32)
        return rng.standard_normal(shape, np.float32) * np.float32(scale / np.sqrt(shape[-1]))

    params = {name: jnp.asarray(draw(name, s.shape), s.dtype) for name, s in shapes.items()}
    return LoadedModel(config, graphdef, params, None, GenerationDefaults(eos_token_ids=config.eos_token_ids))
