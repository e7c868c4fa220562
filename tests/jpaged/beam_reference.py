"""Beam search on the tiny model, written after transformers' `_beam_search`, over whole forward passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from tiny import _forward, tiny_model

from jpaged import BeamSearchParams


def log_probs(tokens: list[int]) -> np.ndarray:
    """f32[V]: of what follows `tokens` (at most 128), by a whole forward pass."""
    padded = jnp.asarray([*tokens, *[0] * (128 - len(tokens))])
    logits = _forward(("float32", 0, None), 128)(tiny_model().params, padded)[len(tokens) - 1]
    return np.asarray(jax.nn.log_softmax(logits))


def beam_reference(prompt: list[int], params: BeamSearchParams, eos: tuple[int, ...]) -> list[tuple[list[int], float]]:
    """(generated tokens, score) of the sequences kept, best first."""
    width, penalty = params.beam_width, params.length_penalty
    running = [([], 0.0)]
    kept: list[tuple[list[int], float]] = []
    for length in range(1, params.max_tokens + 1):
        candidates = []
        for tokens, score in running:
            found = log_probs(prompt + tokens)
            candidates += [([*tokens, token], score + found[token]) for token in range(97)]
        candidates.sort(key=lambda each: -each[1])
        candidates = candidates[: max(2, 1 + len(eos)) * width]
        ends = [each[0][-1] in eos or length == params.max_tokens for each in candidates]
        finished = [each for each, end in list(zip(candidates, ends, strict=True))[:width] if end]
        kept += [(tokens, score / length**penalty) for tokens, score in finished]
        kept = sorted(kept, key=lambda each: -each[1])[:width]
        running = [each for each, end in zip(candidates, ends, strict=True) if not end][:width]
        if len(kept) == width and running:
            if params.early_stopping is True:
                break
            reach = params.max_tokens if params.early_stopping == "never" and penalty > 0 else length
            if running[0][1] / reach**penalty <= kept[-1][1]:
                break
    return kept
