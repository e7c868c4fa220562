"""Token ids to text as they arrive: text that was given out never changes, and none is lost.

A token's text can depend on its neighbours: a character of several bytes may be spread over tokens, and a decoder
may drop a space at the start of a text. So a window of tokens is decoded anew each time, starting at tokens whose
text is out already, and what lies beyond the text given out is new. Held back is
  - a replacement character at the end: the bytes so far may be the first of a character;
  - with a decoder that has byte tokens (SentencePiece's byte fallback) a run of those, until it ends: the library
    decodes a run as a whole, and one wrong byte in it makes every byte of it a replacement character.

The window starts in the prompt, so that the text is what follows the prompt's text: a first token "▁Paris" gives
" Paris", and a character begun by the prompt's last token is given out whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jpaged_models import Tokenizer

REPLACEMENT = "\ufffd"
CONTEXT = 5  # tokens kept before the first one whose text is not out
WINDOW = 16  # tokens decoded again before the window moves on
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """The text of one output. `feed` gives what is new, `flush` what was held back when no token follows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self.join_added = not skip_special_tokens and not spaces_between_special_tokens
        self.window = self._context(self._without_skipped(prompt_token_ids))
        self.given = self._shown_by_prompt()  # characters of the window's text that are out

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete."""
        token_ids = self._without_skipped(token_ids)
        if self.join_added:
            return "".join(self._feed_one(token) for token in token_ids)
        return self._feed(token_ids)

    def flush(self) -> str:
        """Text held back, as it stands. Nothing may be fed after it."""
        return self._give(self._decode(self.window), 0)

    def _feed(self, token_ids: Sequence[int]) -> str:
        self.window += token_ids
        text = self._decode(self.window)
        held = self._held(text)
        new = self._give(text, held)
        if len(self.window) > WINDOW and not held:
            rest = self.window[-CONTEXT:]
            out = self._decode(rest)
            if out:  # a decoder that drops a space at the start must have done so in text that is out
                self.window, self.given = rest, len(out)
        return new

    def _feed_one(self, token: int) -> str:
        """An added token right after another one is joined to it as it is, whatever the decoder puts between."""
        if not (self._is_added(token) and self.window and self._is_added(self.window[-1])):
            return self._feed([token])
        self.window.append(token)
        self.given = len(self._decode(self.window))
        return self.tokenizer.backend.id_to_token(token) or ""

    def _give(self, text: str, held: int) -> str:
        new = text[self.given : len(text) - held]
        self.given += len(new)
        return new

    def _held(self, text: str) -> int:
        """How many characters at the end of the window's text may still change."""
        run = self._byte_run()
        if run:
            return len(text) - len(self._decode(self.window[: len(self.window) - len(run)]))
        return int(text.endswith(REPLACEMENT))

    def _shown_by_prompt(self) -> int:
        """Characters of the window's text that the prompt holds whole."""
        run = self._byte_run()
        text = self._decode(self.window[: len(self.window) - len(run)])
        return len(text) - int(not run and text.endswith(REPLACEMENT)) + len(run.decode("utf-8", "ignore"))

    def _byte_run(self) -> bytes:
        """The byte tokens at the end of the window, if the decoder treats them as a run."""
        run = bytearray()
        if self.tokenizer.byte_fallback:
            for token in reversed(self.window):
                byte = _BYTE_TOKEN.fullmatch(self.tokenizer.backend.id_to_token(token) or "")
                if byte is None:
                    break
                run.append(int(byte[1], 16))
        return bytes(reversed(run))

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _without_skipped(self, token_ids: Sequence[int]) -> list[int]:
        # They are taken out before decoding: to the library the tokens around one are neighbours.
        return [token for token in token_ids if token not in self.skipped]

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last tokens: enough for their text to be there and to begin with a whole character."""
        size = CONTEXT
        while size < len(prompt):
            text = self._decode(prompt[-size:])
            if text.strip(REPLACEMENT):
                break
            size *= 2
        return list(prompt[-size:])

    def _is_added(self, token: int) -> bool:
        return token in self.tokenizer.added_token_ids
