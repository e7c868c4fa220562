"""What a request returns; field names as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jpaged.request import Request


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


def make_metrics(request: Request) -> RequestMetrics:
    return RequestMetrics(
        request.arrival_time,
        request.first_scheduled_time,
        request.first_token_time,
        request.last_token_time,
        request.finished_time,
    )


def make_completion(request: Request, text: str, index: int = 0) -> CompletionOutput:
    """The continuation a request has so far, as output number `index` of its prompt."""
    return CompletionOutput(
        index,
        text,
        list(request.output_token_ids),
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )


def make_output(request: Request, completions: list[CompletionOutput]) -> RequestOutput:
    """A prompt with its continuations; `request` is the one that stands for the prompt."""
    return RequestOutput(
        request.request_id,
        request.prompt,
        list(request.prompt_token_ids),
        outputs=completions,
        finished=all(completion.finished() for completion in completions),
        metrics=make_metrics(request),
        num_cached_tokens=request.num_cached_tokens,
    )


def make_refusal(request_id: str, prompt: str | None, error: str) -> RequestOutput:
    """What a request that cannot be served gets in place of an answer."""
    refused = CompletionOutput(0, "", [], finish_reason="error")
    return RequestOutput(request_id, prompt, [], outputs=[refused], error=error)
