"""The controls and filters again, for one row in float64 NumPy, straight from the words of `SamplingParams`;
and the logits to apply them to, by whole forward passes."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from tiny import _forward, tiny_model

from jpaged import SamplingParams


def next_logits(tokens: list[int]) -> np.ndarray:
    """f32[V]: logits of the tiny model's next token after `tokens`, without a cache (padded to one length)."""
    length = 128
    padded = jnp.asarray(tokens + [0] * (length - len(tokens)))
    return np.asarray(_forward(("float32", 0), length)(tiny_model().params, padded)[len(tokens) - 1])


def controlled_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """f64[V]: the logits of the token after prompt + output, with everything before temperature applied."""
    x = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        x[[token for token in range(x.size) if token not in params.allowed_token_ids]] = -np.inf
    for word in bad_words:
        before = list(word[:-1])
        if not before or list(output[-len(before) :]) == before:
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        for token in stop_ids:
            x[token] = -np.inf
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    return x


def probabilities(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """f64[V] after temperature, min_p, top_k and top_p, by sorting."""
    if params.greedy:
        return (np.arange(x.size) == np.argmax(x)).astype(np.float64)
    scaled = x / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    if 0 < params.top_k < p.size:
        p[p < np.sort(p)[-params.top_k]] = 0
    p /= p.sum()
    if params.top_p < 1:  # else rounding of the sum could cut off the tail
        order = np.argsort(-p, kind="stable")
        before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
        p[p < p[order][before < params.top_p].min()] = 0
    return p / p.sum()
