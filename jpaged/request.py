"""A request as the host sees it: its tokens so far and where it stands. Imports no JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from jpaged.beam_search import BeamGroup
from jpaged.prefix_index import NamedBlock
from jpaged.sampling_params import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Text(Protocol):
    """The text of an output; see `output_text.OutputText`."""

    def update(self, request: Request) -> str | None: ...

    def shown(self, request: Request) -> str: ...


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its continuation.

    `max_tokens` is the effective limit (already capped by the model's length), `eos_token_ids` the ids that
    end the text unless `params.ignore_eos`. The counters of a running request live in the scheduler's
    per-slot arrays; here is only what survives a preemption.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    prompt: str | None = None
    bad_word_ids: list[tuple[int, ...]] = field(default_factory=list)  # the token sequences of params.bad_words
    features: int = 0  # bits of Feature: what it needs besides plain sampling
    output_token_ids: list[int] = field(default_factory=list)
    grammar: Any = None  # a structured.Grammar: where a structured output stands
    text: Text | None = None  # None: the request wants none, or there is no tokenizer
    records: list[Any] = field(default_factory=list)  # of log-probabilities, i32[C] for each token of the output
    prompt_records: list[Any] = field(default_factory=list)  # likewise of the prompt's tokens, from the second on
    status: Status = Status.WAITING
    slot: int = -1
    prefill_target: int = 0  # tokens to compute before the next one can be sampled
    prefilled: int = 0  # of them, those already dispatched to the device
    readable_from: int = 0  # steps that must have been read before all its tokens are known (set by a preemption)
    num_preemptions: int = 0
    num_cached_tokens: int | None = None  # prompt tokens found in the cache when it was first admitted
    priority: int = 0  # lower ones first, under a policy that looks at it
    tenant: str | None = None  # on whose behalf, likewise
    arrival: int = 0  # number among the requests of its scheduler
    index: int = 0  # among the outputs of its prompt
    siblings: list[Request] = field(default_factory=list)  # all outputs of a prompt with several, itself included
    beams: BeamGroup | None = None  # of all outputs of a prompt that are beams
    forks: list[Request] = field(default_factory=list)  # those that wait for this one to compute the prompt
    root_key: bytes = b""  # what the content of its blocks depends on besides the tokens: see prefix_index.py
    block_keys: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were computed
    chain: list[NamedBlock] = field(default_factory=list)  # the blocks it has locked, from the first on
    admitted: int = 0  # when it was given a slot, by the clock of the prefix index
    slid: int = 0  # columns it has given up because its window left them behind; the chain's blocks there are no locks
    foreign: set[int] = field(default_factory=set)  # columns of the chain whose block is another's with equal content
    kept: list[bytes] = field(default_factory=list)  # keys of the blocks it comes back to, while it is swapped out
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # why it failed (finish_reason "error")
    arrival_time: float = 0.0  # these by the engine's clock, in seconds
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        self.stop_ids = eos | frozenset(self.params.stop_token_ids)

    @property
    def group(self) -> list[Request]:
        """All outputs of its prompt, in order."""
        return self.siblings or [self]

    @property
    def group_finished(self) -> bool:
        return all(request.finished for request in self.group)

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host: the prompt and what was read back."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_range(self, start: int, stop: int) -> list[int]:
        """Token ids at positions [start, stop) of prompt + output."""
        prompt = len(self.prompt_token_ids)
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        if start >= prompt:
            return self.output_token_ids[start - prompt : stop - prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - prompt]

    def add_siblings(self, count: int) -> None:
        """Let the prompt have `count` outputs: the others wait for this one to compute it. Seeds count up."""
        lists = ("output_token_ids", "records", "prompt_records", "block_keys", "chain")

        def fork(index: int) -> Request:
            own: dict[str, Any] = {name: [] for name in lists}
            return dataclasses.replace(self, index=index, seed=_wrap(self.seed + index), foreign=set(), **own)

        forks = [fork(index) for index in range(1, count)]
        group = [self, *forks]
        for request in group:
            request.siblings = group
        self.forks = forks

    def check_length(self, limit: int) -> None:
        """Raises ValueError for a prompt that can never run where a sequence has at most `limit` tokens."""
        length = len(self.prompt_token_ids)
        if length >= limit:
            raise ValueError(
                f"the prompt has {length} tokens, but max_model_len is {limit}, of which at least one is generated: "
                f"at most {limit - 1} are allowed"
            )

    def prompt_token(self, position: int) -> int:
        """The prompt's token at `position`, -1 past its end."""
        return self.prompt_token_ids[position] if position < len(self.prompt_token_ids) else -1

    def append(self, token_ids: list[int]) -> None:
        """Take tokens read from the device, up to the first that ends the request."""
        if self.params.max_tokens == 0:  # only its prompt was wanted
            self.finish("length")
            return
        for token in token_ids:
            self.output_token_ids.append(token)
            if token in self.stop_ids:
                # An id the user listed is named as the reason; the model's own end of text is not (as vLLM does).
                self.finish("stop", token if token in self.params.stop_token_ids else None)
                return
            if len(self.output_token_ids) >= self.max_tokens:
                self.finish("length")
                return

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.status = Status.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED


def _wrap(seed: int) -> int:
    """A seed of 64 bits, signed as it was given."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
