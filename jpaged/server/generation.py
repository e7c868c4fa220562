"""From prompts to outputs for any route: submits to the engine, yields what comes, tells usage."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jpaged.async_engine import AsyncEngine
from jpaged.beam_search import BeamSearchParams
from jpaged.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams
from jpaged.server.errors import ApiError


@dataclass(frozen=True)
class Job:
    """A prompt of a request, ready for the engine. Of its outputs the first `keep` are shown."""

    request_id: str
    token_ids: Sequence[int]
    params: SamplingParams | BeamSearchParams
    text: str | None = None
    cache_salt: str | None = None
    tenant: str | None = None
    priority: int = 0
    keep: int = 1


@dataclass
class Usage:
    """Tokens of a request, counted as outputs come."""

    prompt: dict[int, int] = field(default_factory=dict)  # by job
    cached: dict[int, int] = field(default_factory=dict)
    completion: int = 0

    def add(self, job: int, output: RequestOutput) -> None:
        self.prompt[job] = len(output.prompt_token_ids)
        self.cached[job] = output.num_cached_tokens or 0
        self.completion += sum(len(each.token_ids) for each in output.outputs)

    def as_dict(self) -> dict[str, Any]:
        prompt = sum(self.prompt.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion,
            "total_tokens": prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


async def run_jobs(engine: AsyncEngine, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(number of the job, output) as they come. Leaving early ends all of them, and so does an error of one."""
    async with contextlib.AsyncExitStack() as stack:
        streams = []
        for job in jobs:
            submitted = engine.submit(
                job.request_id,
                job.token_ids,
                job.params,
                prompt=job.text,
                cache_salt=job.cache_salt,
                priority=job.priority,
                tenant=job.tenant,
            )
            streams.append(await stack.enter_async_context(submitted))
        if len(jobs) == 1:  # nearly every request: each step for each token of each stream counts
            async for output in streams[0]:
                yield 0, _kept(output, jobs[0])
            return
        async with contextlib.aclosing(interleave(streams)) as outputs:
            async for number, output in outputs:
                yield number, _kept(output, jobs[number])


def _kept(output: RequestOutput, job: Job) -> RequestOutput:
    """What is shown of an output. Raises ApiError for one that failed."""
    if output.error is not None:
        raise ApiError(output.error)
    if len(output.outputs) <= job.keep:
        return output
    return dataclasses.replace(output, outputs=output.outputs[: job.keep])


async def interleave(streams: Sequence[AsyncIterator[Any]]) -> AsyncGenerator[tuple[int, Any], None]:
    """(number of the stream, item) in the order in which they come."""
    waiting = {asyncio.ensure_future(_next(stream)): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                number = waiting.pop(task)
                item = task.result()
                if item is not None:
                    waiting[asyncio.ensure_future(_next(streams[number]))] = number
                    yield number, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: AsyncIterator[Any]) -> Any:
    return await anext(stream, None)
