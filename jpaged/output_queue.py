"""What a client has not taken yet: one output, into which those that follow are merged.

So the engine never waits for a client that reads slowly or not at all, and what is kept for it is bounded by the
longest output: that is all the back-pressure there is to give, for a sequence that stands still would keep its blocks.
"""

from __future__ import annotations

import asyncio
import dataclasses

from jpaged.outputs import CompletionOutput, RequestOutput
from jpaged.sampling_params import RequestOutputKind


class OutputQueue:
    """Used from one event loop. Iterating gives outputs as they come, until the one that says `finished`."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self.kind = kind
        self.output: RequestOutput | None = None
        self.error: Exception | None = None
        self.finished = False  # the last output, or an error, was taken
        self.changed = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self.output is None or self.kind is not RequestOutputKind.DELTA:
            self.output = output
        else:
            self.output = merge_outputs(self.output, output)
        self.changed.set()

    def fail(self, error: Exception) -> None:
        """Raise `error` to the client, after what was put before it."""
        self.error = error
        self.changed.set()

    def __aiter__(self) -> OutputQueue:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        await self.changed.wait()
        self.changed.clear()
        output, self.output = self.output, None
        if output is not None:
            self.finished = output.finished
            if self.error is not None:
                self.changed.set()
            return output
        assert self.error is not None
        self.finished = True
        raise self.error


def merge_outputs(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of a stream of what is new (`RequestOutputKind.DELTA`) as one."""
    found = {each.index: each for each in first.outputs}
    for each in second.outputs:
        found[each.index] = _merge(found[each.index], each) if each.index in found else each
    return dataclasses.replace(second, outputs=[found[index] for index in sorted(found)])


def _merge(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    return dataclasses.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=None if second.logprobs is None else (first.logprobs or []) + second.logprobs,
    )
