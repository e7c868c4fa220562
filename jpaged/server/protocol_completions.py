"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic
from pydantic import Field, WithJsonSchema

from jpaged.server.protocol_sampling import SamplingFields

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
PROMPT_SCHEMA = {
    "anyOf": [_TEXT, _IDS, {"type": "array", "items": _TEXT, "minItems": 1}, {"type": "array", "items": _IDS}]
}
MAX_PROMPTS = 1024


class CompletionBody(SamplingFields):
    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0)] | None = None
    suffix: str | None = None

    @pydantic.field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: Any) -> Any:
        return check_prompts(value)

    @pydantic.model_validator(mode="after")
    def _check_fields(self) -> CompletionBody:
        if self.suffix:
            raise ValueError("suffix is not supported")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are not streamed: use logprobs with echo, or stream=false")
        return self

    def prompts(self) -> list[str | list[int]]:
        return [self.prompt] if is_prompt(self.prompt) else self.prompt


def check_prompts(value: Any) -> Any:
    """The value, if it is a prompt or several. Raises ValueError."""
    prompts = [value] if is_prompt(value) else value
    if not isinstance(prompts, list) or not prompts or not all(map(is_prompt, prompts)):
        raise ValueError("must be a text, a list of token ids, or a list of either, none of them empty")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"holds {len(prompts)} prompts, at most {MAX_PROMPTS} are allowed")
    return value


def is_prompt(value: Any) -> bool:
    """Whether this is one prompt: a text or token ids, not empty."""
    if isinstance(value, list):
        return bool(value) and all(type(token) is int for token in value)
    return isinstance(value, str) and bool(value)
