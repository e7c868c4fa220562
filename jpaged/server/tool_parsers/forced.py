"""Calls that the request demands: the output is JSON of a form that is enforced while it is generated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jpaged.server.tool_parsers.base import Arguments, Piece, ToolCall, read_call, read_json


class NamedCall:
    """One call of a given function: the output is its arguments, passed on as they come."""

    needs_special_tokens = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.begun = False

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        first, self.begun = not self.begun, True
        return [ToolCall(self.name, text) if first else Arguments(text)]

    def finish(self) -> list[Piece]:
        return [] if self.begun else [ToolCall(self.name, "")]


class RequiredCalls:
    """At least one call of any function: the output is a list [{"name": …, "parameters": {…}}, …]."""

    needs_special_tokens = False

    def __init__(self) -> None:
        self.text = ""  # not given out yet

    def feed(self, text: str) -> list[Piece]:
        self.text += text
        pieces: list[Piece] = []
        while True:
            rest = self.text.lstrip(" \n\t[,]")
            found = read_json(rest) if rest.startswith("{") else None
            call = read_call(found[0], ("parameters",)) if found is not None else None
            if found is None or call is None:
                return pieces
            pieces.append(call)
            self.text = rest[found[1] :]

    def finish(self) -> list[Piece]:
        """What is left of an output that was cut off is content."""
        text, self.text = self.text, ""
        return [text] if text.strip(" \n\t[],") else []


def schema_of_named(function: dict[str, Any]) -> str:
    """The JSON schema, as text, of a named function's arguments."""
    return json.dumps(function.get("parameters") or {"type": "object", "properties": {}})


def schema_of_required(functions: Sequence[dict[str, Any]], *, parallel: bool) -> str:
    """The JSON schema, as text, of a list of calls; of exactly one unless `parallel`."""
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
        definitions |= parameters.pop("$defs", {})  # references in them begin at the root
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    return json.dumps(schema | ({"$defs": definitions} if definitions else {}))
