"""From a request as the engine keeps it to what its user is shown."""

from __future__ import annotations

from jpaged_models import Tokenizer

from jpaged.logprobs import sum_own, unpack_records
from jpaged.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jpaged.request import Request
from jpaged.sampling_params import RequestOutputKind


def make_metrics(request: Request) -> RequestMetrics:
    return RequestMetrics(
        request.arrival_time,
        request.first_scheduled_time,
        request.first_token_time,
        request.last_token_time,
        request.finished_time,
    )


def make_completion(
    request: Request, tokenizer: Tokenizer | None, *, first_token: int = 0, first_character: int = 0
) -> CompletionOutput:
    """The continuation a request has so far, from a token and a character of its text on.

    `tokenizer` is for the text of tokens among log-probabilities.
    """
    if request.beams is not None:
        return _make_beam_completion(request, tokenizer)
    tokens, most = request.output_token_ids[first_token:], request.params.logprobs
    return CompletionOutput(
        request.index,
        "" if request.text is None else request.text.shown(request)[first_character:],
        tokens,
        cumulative_logprob=None if most is None else sum_own(request.records),
        logprobs=None if most is None else unpack_records(request.records[first_token:], tokens, most, tokenizer),
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )


def _make_beam_completion(request: Request, tokenizer: Tokenizer | None) -> CompletionOutput:
    """A finished sequence of a search with beams. Its log-probabilities are known anyway, those of other tokens not."""
    assert request.beams is not None
    found, tokens = request.beams.finished[request.index], request.output_token_ids
    texts = [None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
    entries = zip(tokens, found.beam.logprobs(), texts, strict=True)
    return CompletionOutput(
        request.index,
        "" if request.text is None else request.text.shown(request),
        tokens,
        cumulative_logprob=found.beam.cum_logprob,
        logprobs=[{token: Logprob(logprob, None, text)} for token, logprob, text in entries],
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )


def make_output(
    request: Request,
    completions: list[CompletionOutput],
    tokenizer: Tokenizer | None = None,
    *,
    prompt: list[int] | None = None,
) -> RequestOutput:
    """A prompt with its continuations; `request` is the one that stands for the prompt.

    `prompt`: a copy of its tokens made before; one for each token of a stream would cost as much as the prompt is long.
    """
    prompt = list(request.prompt_token_ids) if prompt is None else prompt
    most = request.params.prompt_logprobs
    return RequestOutput(
        request.request_id,
        request.prompt,
        prompt,
        prompt_logprobs=None
        if most is None
        else [None, *unpack_records(request.prompt_records, prompt[1:], most, tokenizer)],
        outputs=completions,
        finished=request.group_finished,
        metrics=make_metrics(request),
        num_cached_tokens=request.num_cached_tokens,
        error=request.error,
    )


def make_refusal(request_id: str, prompt: str | None, error: str) -> RequestOutput:
    """What a request that cannot be served gets in place of an answer."""
    refused = CompletionOutput(0, "", [], finish_reason="error")
    return RequestOutput(request_id, prompt, [], outputs=[refused], error=error)


class OutputStream:
    """What a stream shows of one prompt each time its outputs got tokens, as `output_kind` asks.

    interval    tokens that an output must have got before it is shown again; its first and its last are shown at once
    """

    def __init__(self, tokenizer: Tokenizer | None, interval: int = 1) -> None:
        self.tokenizer = tokenizer
        self.interval = interval
        self.prompt: list[int] | None = None
        self.shown: dict[int, tuple[int, int]] = {}  # output -> tokens and characters shown before

    def next(self, touched: list[Request]) -> RequestOutput | None:
        """From the outputs of a step that got tokens or ended; None while there is nothing to show."""
        first, kind = touched[0].group[0], touched[0].params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY:
            if not first.group_finished:
                return None
            touched = first.group if first.beams is None else first.group[: len(first.beams.finished)]
        else:
            touched = [request for request in touched if self._is_due(request)]
            if not touched:
                return None
        if self.prompt is None:
            self.prompt = list(first.prompt_token_ids)
        make = self._make_delta if kind is RequestOutputKind.DELTA else self._make_whole
        return make_output(first, [make(request) for request in touched], self.tokenizer, prompt=self.prompt)

    def _is_due(self, request: Request) -> bool:
        shown = self.shown.get(request.index)
        return shown is None or request.finished or len(request.output_token_ids) - shown[0] >= self.interval

    def _make_whole(self, request: Request) -> CompletionOutput:
        completion = make_completion(request, self.tokenizer)
        self.shown[request.index] = len(request.output_token_ids), len(completion.text)
        return completion

    def _make_delta(self, request: Request) -> CompletionOutput:
        tokens, characters = self.shown.get(request.index, (0, 0))
        completion = make_completion(request, self.tokenizer, first_token=tokens, first_character=characters)
        self.shown[request.index] = len(request.output_token_ids), characters + len(completion.text)
        return completion
