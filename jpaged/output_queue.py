"""What a client has not taken yet, merged into one output when it takes it.

So the engine never waits for a client that reads slowly or not at all, and what is kept for it is bounded by the
longest output: that is all the back-pressure there is to give, for a sequence that stands still would keep its blocks.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from jpaged.outputs import CompletionOutput, RequestOutput
from jpaged.sampling_params import RequestOutputKind

MOST_UNMERGED = 64  # outputs; merging each as it comes would cost a slow client's every token a copy of all its text


class OutputQueue:
    """Used from one event loop. Iterating gives outputs as they come, until the one that says `finished`."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self.kind = kind
        self.waiting: list[RequestOutput] = []
        self.error: Exception | None = None
        self.finished = False  # the last output, or an error, was taken
        self.taker: asyncio.Future[None] | None = None  # who waits for something to take

    def put(self, output: RequestOutput) -> None:
        if self.kind is not RequestOutputKind.DELTA:
            self.waiting = [output]
        else:
            self.waiting.append(output)
            if len(self.waiting) > MOST_UNMERGED:
                self.waiting = [merge_outputs(self.waiting)]
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raise `error` to the client, after what was put before it."""
        self.error = error
        self._wake()

    def _wake(self) -> None:
        if self.taker is not None and not self.taker.done():
            self.taker.set_result(None)

    def __aiter__(self) -> OutputQueue:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        while not self.waiting and self.error is None:
            self.taker = asyncio.get_running_loop().create_future()
            await self.taker
        if self.waiting:
            outputs, self.waiting = self.waiting, []
            output = outputs[0] if len(outputs) == 1 else merge_outputs(outputs)
            self.finished = output.finished
            return output
        assert self.error is not None
        self.finished = True
        raise self.error


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Outputs of a stream of what is new (`RequestOutputKind.DELTA`) as one."""
    found: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for each in output.outputs:
            found.setdefault(each.index, []).append(each)
    return dataclasses.replace(outputs[-1], outputs=[_merge(found[index]) for index in sorted(found)])


def _merge(parts: Sequence[CompletionOutput]) -> CompletionOutput:
    last = parts[-1]
    return dataclasses.replace(
        last,
        text="".join([part.text for part in parts]),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=None if last.logprobs is None else [each for part in parts for each in part.logprobs or []],
    )
