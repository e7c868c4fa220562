"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic
from pydantic import Field

from jpaged.server.protocol_chat import Message, Tool
from jpaged.server.protocol_sampling import Body


class TokenizeBody(Body):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None

    @pydantic.model_validator(mode="after")
    def _check_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is not None and self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message needs add_generation_prompt=false: one of the two")
        return self

    def conversation(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages or []]

    def tool_schemas(self) -> list[dict[str, Any]] | None:
        return [tool.model_dump(exclude_none=True) for tool in self.tools] if self.tools else None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
