"""The shape of SmolLM2-135M, for benchmarks on random weights: no download."""

from __future__ import annotations

from jpaged_models import random_model

__all__ = ["SMOLLM2_135M", "random_model"]

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
