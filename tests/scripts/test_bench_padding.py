"""Steps in a fitting program and in a larger one: what bench_padding.py times must give the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
from bench_padding import Step
from jpaged_models import random_model
from jpaged_models.random_weights import TINY

from jpaged.step import unpack_result


@pytest.mark.parametrize(("kind", "count"), [("decode", 3), ("mixed", 21)])
def test_a_larger_program_gives_the_same_tokens(kind: str, count: int) -> None:
    loaded = random_model({**TINY, "max_position_embeddings": 1024}, scale=2.0)
    drawn = []
    for rows, tokens in ((8, 32), (16, 64)):
        step = Step(loaded, kind, count, rows, tokens)
        one, again = (unpack_result(np.asarray(step()), rows).tokens for _ in range(2))
        np.testing.assert_array_equal(one, again)
        drawn.append(one[0, : count if kind == "decode" else 1])
    assert (drawn[0] >= 0).all()
    np.testing.assert_array_equal(*drawn)
