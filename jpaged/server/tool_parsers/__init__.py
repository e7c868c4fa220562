"""Tool calls out of what a model writes: a parser for each format, and which one a model's template speaks."""

from __future__ import annotations

from collections.abc import Callable

from jpaged.server.tool_parsers.base import Arguments, Piece, ToolCall, ToolParser
from jpaged.server.tool_parsers.forced import NamedCall, RequiredCalls, schema_of_named, schema_of_required
from jpaged.server.tool_parsers.hermes import HermesParser
from jpaged.server.tool_parsers.llama3 import Llama3Parser
from jpaged.server.tool_parsers.mistral import MistralParser

# By the names that vLLM has for them.
PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}

# What a chat template that teaches a format has in it.
MARKS = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3_json"}


def detect_parser(chat_template: str | None) -> str | None:
    """The name of the parser for a template's format, None if it shows none."""
    for mark, name in MARKS.items():
        if chat_template is not None and mark in chat_template:
            return name
    return None


__all__ = [
    "PARSERS",
    "Arguments",
    "NamedCall",
    "Piece",
    "RequiredCalls",
    "ToolCall",
    "ToolParser",
    "detect_parser",
    "schema_of_named",
    "schema_of_required",
]
