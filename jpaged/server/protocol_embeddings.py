"""The body of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, WithJsonSchema

from jpaged.server.protocol_completions import PROMPT_SCHEMA, check_prompts, is_prompt
from jpaged.server.protocol_sampling import Body


class EmbeddingBody(Body):
    input: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    add_special_tokens: bool = True

    @pydantic.field_validator("input")
    @classmethod
    def _check_input(cls, value: Any) -> Any:
        return check_prompts(value)

    def inputs(self) -> list[str | list[int]]:
        return [self.input] if is_prompt(self.input) else self.input
