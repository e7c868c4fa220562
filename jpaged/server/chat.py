"""/v1/chat/completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jpaged.outputs import CompletionOutput, RequestOutput
from jpaged.server.errors import ApiError
from jpaged.server.event_stream import DONE, event, start_stream, until_disconnect
from jpaged.server.generation import Job, Usage, run_jobs
from jpaged.server.logprob_objects import chat_logprobs, prompt_logprobs
from jpaged.server.protocol_chat import ChatBody
from jpaged.server.service import Service, read_body
from jpaged.server.tool_parsers import Arguments, Piece, ToolCall, ToolParser
from jpaged.server.tool_use import ToolUse, read_tool_use


async def create_chat_completion(service: Service, request: Request) -> Response:
    body = await read_body(request, ChatBody)
    service.check_model(body.model)
    request_id = body.request_id or request.scope["request_id"]
    tools = read_tool_use(body, service.tool_call_parser)
    job = await _make_job(service, body, tools, request_id)
    answer = Answer(f"chatcmpl-{request_id}", service, body, tools)
    if body.stream:
        return await start_stream(request, _stream(answer, job), service.settings.write_timeout)
    return JSONResponse(await until_disconnect(request.receive, _complete(answer, job)))


async def render_chat(service: Service, body: Any) -> str:
    """The prompt text of a body with messages (ChatBody or that of /tokenize)."""
    if body.chat_template is not None and not service.settings.trust_request_chat_template:
        raise ApiError(
            "this server takes no chat template from clients (--trust-request-chat-template)", param="chat_template"
        )
    tokenizer = service.tokenizer
    return await service.work(
        lambda: tokenizer.apply_chat_template(
            body.conversation(),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=body.tool_schemas(),
            chat_template=body.chat_template or service.settings.chat_template,
            **(body.chat_template_kwargs or {}),
        )
    )


async def _make_job(service: Service, body: ChatBody, tools: ToolUse, request_id: str) -> Job:
    changes: dict[str, Any] = {"max_tokens": body.limit}
    if body.logprobs:
        changes["logprobs"] = body.top_logprobs or 0
    if tools.structure is not None:
        changes["structured_outputs"] = tools.structure
    if tools.needs_special_tokens:
        changes["skip_special_tokens"] = False
    params = body.sampling_params(service.defaults, **changes)
    text = await render_chat(service, body)
    ids: Sequence[int] = await service.encode(text, add_special_tokens=bool(body.add_special_tokens))
    ids = service.fit_prompt(ids, params)
    asked = body.search_params(params, service.max_model_len - len(ids))
    return Job(request_id, ids, asked, text, body.cache_salt, body.user, body.priority, body.n or 1)


@dataclass
class Choice:
    """One choice as it is read: which calls it has made so far."""

    parser: ToolParser | None
    calls: int = 0
    begun: bool = False

    def read(self, completion: CompletionOutput) -> list[Piece]:
        if self.parser is None:
            return [completion.text] if completion.text else []
        pieces = self.parser.feed(completion.text)
        if completion.finish_reason is not None:
            pieces += self.parser.finish()
        return pieces


@dataclass
class Answer:
    """Makes the objects of one answer."""

    id: str
    service: Service
    body: ChatBody
    tools: ToolUse
    created: int = field(default_factory=lambda: int(time.time()))
    usage: Usage = field(default_factory=Usage)
    choices: dict[int, Choice] = field(default_factory=dict)

    def object(self, choices: list[dict[str, Any]], *, usage: bool, chunk: bool) -> dict[str, Any]:
        found = {
            "id": self.id,
            "object": "chat.completion.chunk" if chunk else "chat.completion",
            "created": self.created,
            "model": self.service.model,
            "choices": choices,
        }
        return {**found, "usage": self.usage.as_dict()} if usage else found

    def choice(self, completion: CompletionOutput) -> Choice:
        if completion.index not in self.choices:
            make = self.tools.make_parser
            self.choices[completion.index] = Choice(None if make is None else make())
        return self.choices[completion.index]

    def begin(self) -> str:
        """The text that content begins with: of the last message, where that is asked for and goes on."""
        last = self.body.conversation()[-1]
        return last["content"] or "" if self.body.echo and last["role"] == "assistant" else ""

    def logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None or not self.body.logprobs:
            return None
        most, as_ids = self.body.top_logprobs or 0, self.body.return_tokens_as_token_ids
        return chat_logprobs(completion.token_ids, completion.logprobs, most, as_ids=as_ids)

    def finish_reason(self, choice: Choice, completion: CompletionOutput) -> str | None:
        if completion.finish_reason == "stop" and choice.calls and self.tools.ends_with_calls:
            return "tool_calls"
        return completion.finish_reason

    def message(self, completion: CompletionOutput) -> dict[str, Any]:
        """A choice of an answer in one piece."""
        choice = self.choice(completion)
        content, calls = self.begin(), []
        for piece in choice.read(completion):
            match piece:
                case ToolCall():
                    function = {"name": piece.name, "arguments": piece.arguments}
                    calls.append({"id": piece.id, "type": "function", "function": function})
                case Arguments():
                    calls[-1]["function"]["arguments"] += piece.text  # type: ignore[index]
                case str():
                    content += piece
        choice.calls = len(calls)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if calls:
            message["tool_calls"] = calls
        found = {
            "index": completion.index,
            "message": message,
            "logprobs": self.logprobs(completion),
            "finish_reason": self.finish_reason(choice, completion),
            "stop_reason": completion.stop_reason,
        }
        return {**found, "token_ids": completion.token_ids} if self.body.return_token_ids else found

    def deltas(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """What is new of a choice, in pieces of a stream."""
        choice = self.choice(completion)
        deltas: list[dict[str, Any]] = []
        if not choice.begun:
            choice.begun = True
            deltas.append({"role": "assistant", "content": self.begin()})
        for piece in choice.read(completion):
            match piece:
                case ToolCall():
                    function = {"name": piece.name, "arguments": piece.arguments}
                    call = {"index": choice.calls, "id": piece.id, "type": "function", "function": function}
                    deltas.append({"tool_calls": [call]})
                    choice.calls += 1
                case Arguments():
                    call = {"index": choice.calls - 1, "function": {"arguments": piece.text}}
                    deltas.append({"tool_calls": [call]})
                case str():
                    deltas.append({"content": piece})
        # The tokens and the end of what is shown go with the last piece.
        logprobs, reason = self.logprobs(completion), self.finish_reason(choice, completion)
        if (logprobs or reason or self.body.return_token_ids) and (not deltas or "role" in deltas[-1]):
            deltas.append({})
        found: list[dict[str, Any]] = [
            {"index": completion.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if found:
            found[-1]["logprobs"] = logprobs
            found[-1]["finish_reason"] = reason
            if reason is not None:
                found[-1]["stop_reason"] = completion.stop_reason
            if self.body.return_token_ids:
                found[-1]["token_ids"] = completion.token_ids
        return found


async def _complete(answer: Answer, job: Job) -> dict[str, Any]:
    body = answer.body
    async with contextlib.aclosing(run_jobs(answer.service.engine, [job])) as outputs:
        async for _, output in outputs:
            answer.usage.add(0, output)
            choices = [answer.message(each) for each in output.outputs]
    found = answer.object(choices, usage=True, chunk=False)
    if body.prompt_logprobs is not None:
        found["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    if body.return_token_ids:
        found["prompt_token_ids"] = output.prompt_token_ids
    return found


async def _stream(answer: Answer, job: Job) -> AsyncGenerator[bytes, None]:
    options = answer.body.stream_options
    always = options is not None and options.continuous_usage_stats
    first: RequestOutput | None = None
    async with contextlib.aclosing(run_jobs(answer.service.engine, [job])) as outputs:
        async for _, output in outputs:
            answer.usage.add(0, output)
            for each in output.outputs:
                for delta in answer.deltas(each):
                    found = answer.object([delta], usage=always, chunk=True)
                    if first is None and answer.body.return_token_ids:
                        found["prompt_token_ids"] = output.prompt_token_ids
                    first = output
                    yield event(found)
    if options is not None and options.include_usage:
        yield event(answer.object([], usage=True, chunk=True))
    yield DONE
