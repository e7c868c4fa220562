"""Paragraphs and lists are filled, and nothing else changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from markdown_prose import wrap_prose

WORDS = st.lists(st.sampled_from(["a", "word", "`code`", "[link](page.md)", "0.25", "very-long-word"]), min_size=1)


def test_what_is_filled_and_what_is_not():
    text = "# A heading that is long\n\none\ntwo three four five\n\n- item one goes on\n  here\n- item two\n"
    keeps = "\n| a | table that is long |\n|---|---|\n\n```\ncode that is   long enough\n\nto be left\n```\n"
    keeps += "\n![a picture](that/is/long.png)\n"
    filled = "# A heading that is long\n\none two three\nfour five\n\n- item one\n  goes on here\n- item two\n"
    assert wrap_prose(text + keeps, 14) == filled + keeps


@given(st.lists(st.tuples(st.booleans(), WORDS), min_size=1))
def test_words_stay_in_order_and_lines_fit(paragraphs):
    text = "\n\n".join(("- " if item else "") + " ".join(words) for item, words in paragraphs)
    filled = wrap_prose(text, 30)
    assert filled.split() == text.split()
    assert all(len(line) <= 30 for line in filled.split("\n"))
    assert wrap_prose(filled, 30) == filled
