"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def show(value: Any) -> str:
    """A number as people read it: floats with three digits that count, or fewer if they have no more."""
    if value is None:
        return ""
    if isinstance(value, float):
        value = float(value)  # NumPy's too
        if abs(value) >= 1000:
            return f"{value:,.0f}"
        return min(f"{value:#.3g}".rstrip("."), repr(value), key=len)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def make_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Lines of a table, without a newline at the end."""
    lines = [header, *([show(value) for value in row] for row in rows)]
    head, *body = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([head, "|" + "---|" * len(header), *body])
