"""The body of /v1/chat/completions, and a conversation as chat templates want it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from jpaged.server.protocol_sampling import SamplingFields

ROLES = Literal["system", "developer", "user", "assistant", "tool", "function"]


class TextPart(BaseModel):
    """One part of a message; only text can be read by a language model."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class CalledFunction(BaseModel):
    name: str
    arguments: str = "{}"


class CalledTool(BaseModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: ROLES
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None

    @pydantic.model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message of role {self.role!r} needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        """As templates want it: text in one piece, the arguments of tool calls as objects."""
        message = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text or part.refusal or "" for part in content)
        message.update(role=self.role, content=content)
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": _as_object(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatBody(SamplingFields):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @pydantic.model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message needs add_generation_prompt=false: one of the two")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are not streamed: use stream=false")
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) != len(names):
            raise ValueError(f"tools must have names of their own, got {names}")
        if self.tool_choice not in (None, "none") and not names:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is not among tools: {names}")
        return self

    def conversation(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]

    def tool_schemas(self) -> list[dict[str, Any]] | None:
        return [tool.model_dump(exclude_none=True) for tool in self.tools] if self.tools else None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def _as_object(arguments: str) -> Any:
    """Arguments of a call, JSON text in OpenAI's messages; what is no JSON is left as it is."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
