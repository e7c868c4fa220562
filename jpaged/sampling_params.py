"""What a request asks of the sampler: names, defaults and meanings as in vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from jpaged.structured_params import StructuredOutputsParams
from jpaged.validation import (
    TOKEN_ID_MAX,
    as_bool,
    as_integer,
    as_mapping,
    as_number,
    as_texts,
    as_token_id,
    as_token_ids,
)

SEED_MAX = 2**63 - 1


class RequestOutputKind(Enum):
    """What a streamed RequestOutput holds: all so far, what is new since the last one, or nothing until the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, checked when made: a ValueError says what was given and is allowed.

    Which token, in the order of application (on the model's own logits, in float32):

    structured_outputs   a form that the output must have, see StructuredOutputsParams
    allowed_token_ids    no other token is generated; None allows all
    bad_words            texts that are not generated: the last token of one never follows the others
    min_tokens           no end of text, stop token or stop string before this many tokens
    logit_bias           {token id: number added to its logit}
    repetition_penalty   above 1: logits of tokens in the prompt or output are divided by it, negative ones multiplied
    frequency_penalty    taken from a token's logit once for each time it is in the output; -2 to 2
    presence_penalty     taken from the logit of tokens that are in the output; -2 to 2
    temperature          0 is greedy (the most likely token, the lowest id of equals); otherwise divides the logits
    min_p                keep tokens at least min_p times as likely as the most likely one
    top_k                keep the k most likely tokens and those as likely as the k-th; 0 or -1 keeps all
    top_p                of what top_k left, keep the fewest most likely tokens whose probabilities reach top_p
    seed                 the same seed gives the same tokens whatever else is in the batch; None draws one
    extra_args           {name: number} for the engine's own logits processor

    When it ends and what it shows:

    n                    outputs per prompt, the i-th (from 0) with seed + i; the prompt is computed once
    max_tokens           most tokens to generate; None: as many as the model's length allows; 0: the prompt is read only
    stop                 texts that end the output where the first of them is complete
    stop_token_ids       tokens that end the output, besides the model's end-of-sequence tokens
    include_stop_str_in_output  show the stop text, or the text of the token that ended the output
    ignore_eos           go on after an end-of-sequence token
    logprobs             log-probabilities (of the raw logits) of the token taken and the most likely N; -1: all
    prompt_logprobs      the same for the tokens of the prompt
    detokenize           False: no text is made
    skip_special_tokens  leave special tokens out of the text
    spaces_between_special_tokens   False: added tokens in a row are joined as they are
    truncate_prompt_tokens          keep the last N tokens of the prompt; -1: what the model's length allows
    priority             lower ones are served first, where the engine's scheduling policy is "priority"
    output_kind          what a stream of outputs shows each time
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    priority: int = 0
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Normalise numpy scalars, lists and dicts to plain Python values, and refuse everything else."""
        self._check_numbers()
        self._check_integers()
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "detokenize",
        ):
            self._set(name, as_bool(name, getattr(self, name)))
        for name in ("stop", "bad_words"):
            self._set(name, as_texts(name, getattr(self, name)))
        self._set("stop_token_ids", as_token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", as_token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must hold at least one token id, or be None to allow all, got ()")
        bias = as_mapping("logit_bias", self.logit_bias).items()
        self._set("logit_bias", {as_token_id("logit_bias", k): as_number("logit_bias", v) for k, v in bias})
        for value in self.logit_bias.values():
            if not math.isfinite(value):
                raise ValueError(f"logit_bias must hold finite numbers, got {value!r} (see allowed_token_ids)")
        extra = as_mapping("extra_args", self.extra_args).items()
        self._set("extra_args", {str(k): as_number(f"extra_args[{k!r}]", v) for k, v in extra})
        if isinstance(self.structured_outputs, Mapping):
            self._set("structured_outputs", StructuredOutputsParams.from_mapping(self.structured_outputs))
        for name, kind in (("structured_outputs", StructuredOutputsParams), ("output_kind", RequestOutputKind)):
            value = getattr(self, name)
            if not isinstance(value, kind) and not (value is None and name == "structured_outputs"):
                raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}")
        if self.stop and not self.detokenize:
            raise ValueError("stop must be empty with detokenize=False: there is no text to search, got stop strings")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            self._set(name, as_number(name, getattr(self, name)))
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0 (0 is greedy), got {self.temperature!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p!r}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name} must be in [-2, 2], got {getattr(self, name)!r}")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be finite and above 0, got {self.repetition_penalty!r}")

    def _check_integers(self) -> None:
        for name in ("n", "top_k", "min_tokens", "priority"):
            self._set(name, as_integer(name, getattr(self, name)))
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
            value = getattr(self, name)
            self._set(name, None if value is None else as_integer(name, value))
        if not -1 <= self.top_k <= TOKEN_ID_MAX:
            raise ValueError(f"top_k must be at least 1, or 0 or -1 to keep all tokens, got {self.top_k!r}")
        if self.seed is not None and not -SEED_MAX - 1 <= self.seed <= SEED_MAX:
            raise ValueError(f"seed must be None or fit 64 bits (-2**63 .. 2**63 - 1), got {self.seed!r}")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, or None for the model's limit, got {self.max_tokens!r}")
        most = TOKEN_ID_MAX if self.max_tokens is None else self.max_tokens
        if not 0 <= self.min_tokens <= most:
            raise ValueError(f"min_tokens must be at least 0 and at most max_tokens={most}, got {self.min_tokens!r}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None and getattr(self, name) < -1:
                raise ValueError(f"{name} must be None, at least 0, or -1 for all tokens, got {getattr(self, name)!r}")
        truncate = self.truncate_prompt_tokens
        if truncate is not None and truncate < 1 and truncate != -1:
            raise ValueError(
                f"truncate_prompt_tokens must be None, at least 1, or -1 for the model's limit, got {truncate!r}"
            )
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n!r}")
        if self.n > 1 and self.temperature == 0.0:
            raise ValueError(f"n must be 1 with temperature 0, where all outputs would be the same; got {self.n!r}")

    @property
    def greedy(self) -> bool:
        """Whether the request takes the most likely token each time (and needs no seed)."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0
