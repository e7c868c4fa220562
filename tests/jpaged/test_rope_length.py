"""A model whose rotary scaling depends on the longest sequence is built for the engine's max_model_len."""

import dataclasses

import pytest
from jpaged_models import ModelConfig
from tiny import HF_CONFIG, tiny_model

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(("length", "use_long"), [(64, False), (65, True)])
def test_longrope_follows_max_model_len(length, use_long):
    config = ModelConfig.from_hf({**HF_CONFIG, "rope_scaling": LONGROPE})
    loaded = dataclasses.replace(tiny_model(), config=config).with_max_length(length)
    assert loaded.config.rope.use_long is use_long
    assert loaded.params is tiny_model().params


def test_other_models_are_left_as_they_are():
    assert tiny_model().with_max_length(64) is tiny_model()
