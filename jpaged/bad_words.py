"""Texts that must not be generated, as token sequences."""

from __future__ import annotations

from collections.abc import Sequence

from jpaged_models import Tokenizer


def find_bad_words(words: Sequence[str], tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """Token sequences of the words: each at the start of a text and, where that differs, after a space (as vLLM).

    Raises ValueError if there are words but no tokenizer, or a word has no tokens.
    """
    if words and tokenizer is None:
        raise ValueError("bad_words need a tokenizer, and this model came without one: pass tokenizer=")
    found: list[tuple[int, ...]] = []
    for word in words:
        assert tokenizer is not None
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if not bare:
            raise ValueError(f"bad_words: {word!r} has no tokens; words of at least one token are allowed")
        found.append(bare)
        # One token more than the bare word is a space of its own: the bare sequence covers it.
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            found.append(spaced)
    return found
