"""Text in Markdown whose values were put in afterwards, with lines of one length again."""

from __future__ import annotations

import re
import textwrap

ITEM = re.compile(r"^(?=- )", re.MULTILINE)


def wrap_prose(text: str, width: int = 120) -> str:
    """Paragraphs and lists filled to `width`; headings, tables, images and code stay as they are."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _wrap_outside_code(part, width) for part in parts)


def _wrap_outside_code(text: str, width: int) -> str:
    blocks = re.split(r"(\n{2,})", text)
    return "".join(
        block if not block.strip() or block.lstrip()[0] in "#|!" else _fill(block, width) for block in blocks
    )


def _fill(block: str, width: int) -> str:
    before, after = re.match(r"\n*", block).group(), re.search(r"\n*\Z", block).group()  # type: ignore[union-attr]
    lines = [
        textwrap.fill(
            " ".join(each.split()),
            width,
            subsequent_indent="  " if each.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for each in ITEM.split(block.strip("\n"))
        if each
    ]
    return before + "\n".join(lines) + after
