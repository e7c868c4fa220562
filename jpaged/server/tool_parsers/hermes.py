"""Hermes and Qwen 2.5 / 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of them after content."""

from __future__ import annotations

from jpaged.server.tool_parsers.base import Piece, read_call, read_json
from jpaged.stop_strings import count_held

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    needs_special_tokens = False

    def __init__(self) -> None:
        self.text = ""  # not given out yet
        self.inside = False
        self.called = False

    def feed(self, text: str) -> list[Piece]:
        self.text += text
        pieces: list[Piece] = []
        while True:
            mark = CLOSE if self.inside else OPEN
            before, found, after = self.text.partition(mark)
            if found:
                self.text = after
                pieces += self._call(before, mark) if self.inside else self._content(before)
                self.inside = not self.inside
                continue
            if not self.inside:
                keep = len(self.text) - count_held(self.text, (OPEN,))
                pieces += self._content(self.text[:keep])
                self.text = self.text[keep:]
            return pieces

    def finish(self) -> list[Piece]:
        """A call that ends with the output needs no end mark."""
        text, self.text = self.text, ""
        return self._call(text, "") if self.inside else self._content(text)

    def _content(self, text: str) -> list[Piece]:
        # Lines between calls are the format's, not content.
        return [text] if text and not (self.called and text.isspace()) else []

    def _call(self, body: str, close: str) -> list[Piece]:
        found = read_json(body.strip())
        call = read_call(found[0]) if found is not None else None
        if call is None:
            return [OPEN + body + close]
        self.called = True
        return [call]
