"""Llama 3.1 to 3.3: the whole output is {"name": …, "parameters": {…}}, several divided by ";", perhaps after
<|python_tag|>. An output that begins otherwise is content."""

from __future__ import annotations

from jpaged.server.tool_parsers.base import Piece, read_call, read_json

TAG = "<|python_tag|>"


class Llama3Parser:
    needs_special_tokens = False

    def __init__(self) -> None:
        self.text = ""  # not given out yet
        self.is_content = False  # the output, or what is left of it, is no call

    def feed(self, text: str) -> list[Piece]:
        self.text += text
        pieces: list[Piece] = []
        while not self.is_content:
            rest = self.text.lstrip(" \n\t;").removeprefix(TAG).lstrip()
            if not rest or TAG.startswith(rest):
                return pieces
            if not rest.startswith("{"):
                self.is_content = True
                break
            found = read_json(rest)
            if found is None:
                return pieces
            call = read_call(found[0], ("parameters", "arguments"))
            if call is None:
                self.is_content = True
                break
            pieces.append(call)
            self.text = rest[found[1] :]
        return pieces + self._take()

    def finish(self) -> list[Piece]:
        return self._take() if self.is_content or self.text.strip(" \n\t;") else []

    def _take(self) -> list[Piece]:
        text, self.text = self.text, ""
        return [text] if text else []
