"""What a request uses beyond plain sampling, as bits: the device skips whatever no row of a batch uses."""

from __future__ import annotations

from enum import IntFlag


class Feature(IntFlag):
    MASK = 1  # allowed_token_ids, bad words of one token, structured output
    BIAS = 2  # logit_bias, min_tokens
    BAD_WORDS = 4  # of several tokens
    PENALTIES = 8
    PROCESSOR = 16  # extra_args for the engine's logits processor
    LOGPROBS = 32
    PROMPT_LOGPROBS = 64
    STRUCTURED = 128  # the host writes a new mask for every token: one token a dispatch


CONTROLLED = Feature.MASK | Feature.BIAS | Feature.BAD_WORDS | Feature.PENALTIES | Feature.PROCESSOR
