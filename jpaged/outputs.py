"""What a request returns; field names as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """Natural logarithm of a token's probability, its rank (1 = most likely) and its text on its own."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob]]  # per token of the output: token id -> Logprob


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds of the engine's clock; None where it has not come to that."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt. finish_reason: "stop", "length", "abort", "error", or None while it runs.

    stop_reason: the stop string or stop token id that the request named, if one ended it; None for end of text.
    cumulative_logprob, logprobs: of the tokens in token_ids, None unless the request asked for logprobs.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its continuations. `error` says why a request was refused (finish_reason "error").

    prompt_logprobs     per prompt token: token id -> Logprob; None for the first, which nothing precedes
    num_cached_tokens   prompt tokens whose keys and values were found in the cache; None if it never ran
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    error: str | None = None
