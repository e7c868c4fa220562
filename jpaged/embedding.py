"""Embeddings: a text's hidden states after the last norm, pooled to one vector of length 1.

A program of its own for each of a few lengths, without pages: a text is computed whole, one at a time, between two
steps of the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jpaged_models import CONTIGUOUS_TILE, contiguous_attend, merge_params

from jpaged.config import grow_sizes, pick_bucket
from jpaged.engine import Engine
from jpaged.parallel import PARAMS, SAME, on_all

POOLINGS = ("mean", "last")
GROWTH = 4  # from one length that programs are compiled for to the next


class Embedder:
    """Embeds token ids with an engine's weights. Used in the engine's thread."""

    def __init__(self, engine: Engine, pooling: str) -> None:
        """pooling: "mean" of all tokens, or the "last" one, which alone has seen them all. Raises ValueError."""
        if pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
        self.pooling = pooling
        self.params = engine.runner.params
        self.max_tokens = engine.config.max_model_len
        self.size = engine.model.hidden_size
        last = -(-self.max_tokens // CONTIGUOUS_TILE) * CONTIGUOUS_TILE
        self.buckets = grow_sizes(CONTIGUOUS_TILE, last, GROWTH)
        run = functools.partial(pool_hidden, engine.runner.graphdef)
        self.program = jax.jit(on_all(run, engine.runner.mesh, (PARAMS, SAME, SAME, SAME), SAME))

    def embed(self, token_ids: Sequence[int]) -> np.ndarray:
        """f32[H] of length 1. The ids must have been checked: 1 to `max_tokens` of them, each in the vocabulary."""
        padded = np.zeros(pick_bucket(self.buckets, len(token_ids)), np.int32)
        padded[: len(token_ids)] = token_ids
        mean = np.bool_(self.pooling == "mean")
        return np.asarray(self.program(self.params, padded, np.int32(len(token_ids)), mean))

    def warm_up(self) -> None:
        """Compile every program."""
        for bucket in self.buckets:
            self.embed([0] * min(bucket, self.max_tokens))


def pool_hidden(
    graphdef: nnx.GraphDef, params: dict, tokens: jax.Array, length: jax.Array, mean: jax.Array
) -> jax.Array:
    """f32[H] of length 1: of hidden states of tokens i32[T], whose first `length` count, the mean or the last."""
    model = merge_params(graphdef, params)
    at = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    hidden, _ = model(tokens, at, None, contiguous_attend(length), length)
    counts = jnp.where(mean, at < length, at == length - 1)
    pooled = jnp.sum(jnp.where(counts[:, None], hidden.astype(jnp.float32), 0.0), axis=0)
    return pooled / jnp.linalg.norm(pooled)
