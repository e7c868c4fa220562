"""Hermes and Qwen 2.5 / 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of them after content."""

from __future__ import annotations

from jpaged.server.tool_parsers.base import MarkedCalls, Piece, read_call, read_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(MarkedCalls):
    needs_special_tokens = False

    def feed(self, text: str) -> list[Piece]:
        self.text += text
        pieces: list[Piece] = []
        while True:
            pieces += self.content_until(OPEN)
            body, ends, after = self.text.partition(CLOSE)
            if not self.inside or not ends:
                return pieces
            self.text, self.inside = after, False
            pieces += self._call(body, CLOSE)

    def finish(self) -> list[Piece]:
        """A call that ends with the output needs no end mark."""
        text, self.text = self.text, ""
        return self._call(text, "") if self.inside else self.content(text)

    def _call(self, body: str, close: str) -> list[Piece]:
        found = read_json(body.strip())
        call = read_call(found[0]) if found is not None else None
        if call is None:
            return [OPEN + body + close]
        self.called = True
        return [call]
