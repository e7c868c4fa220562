"""What a request's tools mean for its answer: how it is read, and whether a form is enforced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jpaged.server.errors import ApiError
from jpaged.server.protocol_chat import ChatBody, NamedTool
from jpaged.server.tool_parsers import (
    PARSERS,
    NamedCall,
    RequiredCalls,
    ToolParser,
    schema_of_named,
    schema_of_required,
)
from jpaged.structured_params import StructuredOutputsParams


@dataclass(frozen=True)
class ToolUse:
    """make_parser: None for answers that are content and nothing else.

    ends_with_calls   whether an answer with calls has finish_reason "tool_calls" (not so where a function was named)
    """

    make_parser: Callable[[], ToolParser] | None = None
    structure: StructuredOutputsParams | None = None
    ends_with_calls: bool = True

    @property
    def needs_special_tokens(self) -> bool:
        return self.make_parser is not None and self.make_parser().needs_special_tokens


def read_tool_use(body: ChatBody, parser: str | None) -> ToolUse:
    """`parser`: the name of the model's format. Raises ApiError where it would be needed and is not known."""
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if choice == "none":
        return ToolUse()
    functions = [schema["function"] for schema in body.tool_schemas() or []]
    if choice == "auto":
        if parser is None:
            raise ApiError(
                'tool_choice "auto" needs the model\'s format of tool calls, which its chat template does not show: '
                f"start the server with --tool-call-parser ({', '.join(PARSERS)})",
                param="tool_choice",
            )
        return ToolUse(PARSERS[parser])
    if body.structure() is not None:
        raise ApiError("a forced tool_choice and a response_format exclude each other", param="tool_choice")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        (function,) = (each for each in functions if each["name"] == name)
        structure = StructuredOutputsParams(json=schema_of_named(function), disable_any_whitespace=True)
        return ToolUse(lambda: NamedCall(name), structure, ends_with_calls=False)
    parallel = body.parallel_tool_calls is not False
    schema = schema_of_required(functions, parallel=parallel)
    return ToolUse(RequiredCalls, StructuredOutputsParams(json=schema, disable_any_whitespace=True))
