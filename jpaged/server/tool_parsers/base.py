"""What a tool parser is: text in as it arrives, pieces of content and tool calls out."""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass, field
from typing import Any, Protocol

from jpaged.stop_strings import count_held

ID_LETTERS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Nine letters or digits, the one form that Mistral's templates accept; other models take any."""
    return "".join(secrets.choice(ID_LETTERS) for _ in range(9))


@dataclass(frozen=True)
class ToolCall:
    """A call begins. `arguments`: JSON text, all of it or the beginning of what `Arguments` go on with."""

    name: str
    arguments: str
    id: str = field(default_factory=new_call_id, compare=False)


@dataclass(frozen=True)
class Arguments:
    """More of the JSON text of the last call's arguments."""

    text: str


Piece = str | ToolCall | Arguments  # a str is content


class ToolParser(Protocol):
    """Reads one output. What is not a call as the format has it stays content: nothing a model wrote is lost."""

    needs_special_tokens: bool  # whether the format's marks are special tokens, which must then be in the text

    def feed(self, text: str) -> list[Piece]:
        """What these characters complete."""

    def finish(self) -> list[Piece]:
        """What was held back, when nothing follows."""


def read_call(value: Any, arguments: tuple[str, ...] = ("arguments", "parameters")) -> ToolCall | None:
    """The call that a JSON value means: {"name": …, "arguments": {…}}, None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    for key in arguments:
        if isinstance(value.get(key), dict):
            return ToolCall(value["name"], json.dumps(value[key], ensure_ascii=False))
        if isinstance(value.get(key), str):
            return ToolCall(value["name"], value[key])
    return None if any(key in value for key in arguments) else ToolCall(value["name"], "{}")


def read_json(text: str, start: int = 0) -> tuple[Any, int] | None:
    """(value, where it ends) of the JSON object or list that begins at `start`; None while it is not whole."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None


class MarkedCalls:
    """Text as it arrives in which a mark begins a call: what comes before is content, except lines between calls."""

    def __init__(self) -> None:
        self.text = ""  # not given out yet
        self.inside = False  # the text goes on after a mark
        self.called = False

    def content_until(self, mark: str) -> list[Piece]:
        """The content before the next mark, behind which the text is `inside`. What may become a mark is kept."""
        if self.inside:
            return []
        before, found, after = self.text.partition(mark)
        if found:
            self.text, self.inside = after, True
            return self.content(before)
        keep = len(self.text) - count_held(self.text, (mark,))
        before, self.text = self.text[:keep], self.text[keep:]
        return self.content(before)

    def content(self, text: str) -> list[Piece]:
        return [text] if text and not (self.called and text.isspace()) else []
