"""What a request returns; field names as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt. finish_reason: "stop", "length", "abort", "error", or None while it runs."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None  # the stop token id that the request named, if one ended it


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its continuations. `error` says why a request was refused (finish_reason "error")."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    error: str | None = None
