"""/v1/completions."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.server.event_stream import DONE, event, start_stream, until_disconnect
from jpaged.server.generation import Job, Usage, run_jobs
from jpaged.server.logprob_objects import completion_logprobs, prompt_logprobs
from jpaged.server.protocol_completions import CompletionBody
from jpaged.server.service import Service, read_body


async def create_completion(service: Service, request: Request) -> Response:
    body = await read_body(request, CompletionBody)
    service.check_model(body.model)
    request_id = body.request_id or request.scope["request_id"]
    jobs = await _make_jobs(service, body, request_id)
    answer = Answer(f"cmpl-{request_id}", service, body)
    if body.stream:
        return await start_stream(request, _stream(answer, jobs), service.settings.write_timeout)
    return JSONResponse(await until_disconnect(request.receive, _complete(answer, jobs)))


async def _make_jobs(service: Service, body: CompletionBody, request_id: str) -> list[Job]:
    params = body.sampling_params(service.defaults, max_tokens=body.max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = body.sampling_params(
            service.defaults, max_tokens=body.max_tokens, logprobs=body.logprobs, prompt_logprobs=body.logprobs
        )
    jobs = []
    prompts = body.prompts()
    for number, prompt in enumerate(prompts):
        ids, text = prompt, None
        if isinstance(prompt, str):
            ids, text = await service.encode(prompt, add_special_tokens=body.add_special_tokens is not False), prompt
        assert not isinstance(ids, str)
        fitted = service.fit_prompt(ids, params)
        if len(fitted) != len(ids):
            text = None
        each = request_id if len(prompts) == 1 else f"{request_id}-{number}"
        asked = body.search_params(params, service.max_model_len - len(fitted))
        jobs.append(Job(each, fitted, asked, text, body.cache_salt, body.user, body.priority, body.n or 1))
    return jobs


@dataclass
class Answer:
    """Makes the objects of one answer."""

    id: str
    service: Service
    body: CompletionBody
    created: int = field(default_factory=lambda: int(time.time()))
    usage: Usage = field(default_factory=Usage)
    offsets: dict[int, int] = field(default_factory=dict)  # characters of each choice's text, for log-probabilities

    def object(self, choices: list[dict[str, Any]], usage: bool) -> dict[str, Any]:
        found = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.model,
            "choices": choices,
        }
        return {**found, "usage": self.usage.as_dict()} if usage else found

    def choice(self, job: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        body, index = self.body, job * (self.body.n or 1) + completion.index
        begins = index not in self.offsets
        text, tokens = completion.text, list(completion.token_ids)
        found: list = list(completion.logprobs or [])
        if begins:
            self.offsets[index] = 0
            if body.echo:
                text = self._prompt_text(output) + text
                tokens = [*output.prompt_token_ids, *tokens]
                found = [*self._prompt_logprobs(output), *found]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if body.logprobs is not None:
            choice["logprobs"] = completion_logprobs(
                tokens, found, body.logprobs, offset=self.offsets[index], as_ids=body.return_tokens_as_token_ids
            )
            self.offsets[index] += sum(map(len, choice["logprobs"]["tokens"]))
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if begins else None
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return choice

    def _prompt_logprobs(self, output: RequestOutput) -> list:
        """Of the prompt's first token only the text is known."""
        text = self.service.tokenizer.decode(output.prompt_token_ids[:1], skip_special_tokens=False)
        found: list = list(output.prompt_logprobs or [])
        return [{output.prompt_token_ids[0]: Logprob(math.nan, None, text)}, *found[1:]]

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self.service.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


async def _complete(answer: Answer, jobs: list[Job]) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    async with contextlib.aclosing(run_jobs(answer.service.engine, jobs)) as outputs:
        async for job, output in outputs:
            answer.usage.add(job, output)
            choices += [answer.choice(job, output, each) for each in output.outputs]
    return answer.object(sorted(choices, key=lambda choice: choice["index"]), usage=True)


async def _stream(answer: Answer, jobs: list[Job]) -> AsyncGenerator[bytes, None]:
    body = answer.body
    options = body.stream_options
    always = options is not None and options.continuous_usage_stats
    async with contextlib.aclosing(run_jobs(answer.service.engine, jobs)) as outputs:
        async for job, output in outputs:
            answer.usage.add(job, output)
            for each in output.outputs:
                choice = answer.choice(job, output, each)
                if choice["text"] or choice["finish_reason"] or choice["logprobs"] or body.return_token_ids:
                    yield event(answer.object([choice], usage=always))
    if options is not None and options.include_usage:
        yield event(answer.object([], usage=True))
    yield DONE
