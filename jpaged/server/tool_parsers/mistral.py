"""Mistral: content, then [TOOL_CALLS] and a list [{"name": …, "arguments": {…}}, …], or (from tokenizer version 11 on)
[TOOL_CALLS]name[ARGS]{…} for each call. The marks are special tokens."""

from __future__ import annotations

import re

from jpaged.server.tool_parsers.base import MarkedCalls, Piece, ToolCall, read_call, read_json

MARK, ARGS = "[TOOL_CALLS]", "[ARGS]"
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")


class MistralParser(MarkedCalls):
    needs_special_tokens = True

    def feed(self, text: str) -> list[Piece]:
        self.text += text
        pieces: list[Piece] = []
        while True:
            pieces += self.content_until(MARK)
            found = self._read() if self.inside else None
            if found is None:
                return pieces
            calls, self.text = found
            pieces += calls
            self.inside, self.called = False, True

    def finish(self) -> list[Piece]:
        text, self.text = self.text, ""
        return [MARK * self.inside + text] if text or self.inside else []

    def _read(self) -> tuple[list[ToolCall], str] | None:
        """(calls, the text after them) at the beginning of the text; None while they are not whole."""
        named = _NAMED.match(self.text)
        start = named.end() if named else len(self.text) - len(self.text.lstrip())
        found = read_json(self.text, start) if self.text[start : start + 1] in ("[", "{") else None
        if found is None:
            return None
        value, end = found
        if named:
            calls = [read_call({"name": named[1], "arguments": value})]
        else:
            calls = [read_call(each) for each in (value if isinstance(value, list) else [value])]
        good = [call for call in calls if call is not None]
        return (good, self.text[end:]) if good and len(good) == len(calls) else None
