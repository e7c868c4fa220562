#!/usr/bin/env python3
"""Draw the pictures of docs/tutorial.md from the states that its own code makes.

    python scripts/draw_tutorial.py     # needs matplotlib: pip install 'jpaged[plots]'

The page's code is run, block by block. Where the page shows a picture, what its function `look` has kept since the
picture before is drawn: physical blocks in the order of their ids, and the block tables of the slots that have one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tutorial.md"
PIECE = re.compile(r"^```python\n(.*?)^```$|^!\[[^\]]*\]\((figures/[^)]+)\)$", flags=re.M | re.S)

SLOTS = ("#3b6fb6", "#d1731f", "#2f8f57")  # a colour a slot
CACHED, FREE, NULL, INK = "#8a63b8", "#f1f1ef", "#cfcfcc", "#1f2328"
BLOCK, GAP, ROW = 1.0, 0.22, 0.23  # width of a block, space between two, height of a word


class Frame(NamedTuple):
    """A state as `look` keeps it."""

    title: str
    pool: Any  # BlockPool
    tables: Any  # BlockTables
    words: np.ndarray  # str[N, B]


def run_page(text: str, draw_at: dict[str, list[Frame]]) -> None:
    """Run the page's code and collect the frames of each picture."""
    namespace: dict[str, Any] = {"__name__": "tutorial"}
    drawn = 0
    for piece in PIECE.finditer(text):
        if piece[2] is None:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile("\n" * text.count("\n", 0, piece.start(1)) + piece[1], str(PAGE), "exec"), namespace)
        else:
            draw_at[piece[2]] = [Frame(*each) for each in namespace["frames"][drawn:]]
            drawn = len(namespace["frames"])


def draw(frames: list[Frame], path: Path) -> None:
    """Frames below each other."""
    heights = [height_of(frame) for frame in frames]
    width = len(frames[0].words) * (BLOCK + GAP)
    figure, axes = plt.subplots(
        len(frames), 1, figsize=(0.72 * width, 0.72 * sum(heights)), height_ratios=heights, squeeze=False
    )
    for axis, frame, height in zip(axes[:, 0], frames, heights, strict=True):
        draw_frame(axis, frame, width, height)
    figure.subplots_adjust(left=0, right=1, top=1, bottom=0, hspace=0)
    figure.savefig(path, dpi=110, facecolor="white", metadata={"Software": None})
    plt.close(figure)


def height_of(frame: Frame) -> float:
    return 2.35 + 0.42 * int((np.asarray(frame.tables.length) > 0).sum())


def owners_of(frame: Frame, block: int) -> list[int]:
    """The slots that have a block in their table."""
    return [slot for slot, row in enumerate(np.asarray(frame.tables.blocks)) if block in row[row > 0]]


def filled(frame: Frame, block: int, owners: int) -> int:
    """Words of a block that some owner reads; what the cache holds is full."""
    size, most = frame.words.shape[1], 0
    for row, length in zip(np.asarray(frame.tables.blocks), np.asarray(frame.tables.length).tolist(), strict=True):
        for column in np.flatnonzero(row == block).tolist() if block else ():
            most = max(most, min(size, length - column * size))
    return size if owners > len(owners_of(frame, block)) else most


def draw_frame(axis: Axes, frame: Frame, width: float, height: float) -> None:
    axis.set(xlim=(-0.15, width + 0.05), ylim=(-height, 0))
    axis.axis("off")
    axis.text(0, -0.3, frame.title, fontsize=12, fontweight="bold", color=INK, va="center")
    refcount, size = np.asarray(frame.pool.refcount), frame.words.shape[1]
    for block in range(len(refcount)):
        draw_block(axis, frame, block, block * (BLOCK + GAP), -0.85, int(refcount[block]), size)
    y = -0.85 - size * ROW - 0.5
    for slot, length in enumerate(np.asarray(frame.tables.length).tolist()):
        if length:
            draw_table(axis, frame, slot, length, y)
            y -= 0.42


def draw_block(axis: Axes, frame: Frame, block: int, x: float, y: float, owners: int, size: int) -> None:
    """A block with its words; its head has the colours of its owners."""
    slots, bottom, read = owners_of(frame, block), y - size * ROW, filled(frame, block, owners)
    colours = [SLOTS[slot] for slot in slots] + [CACHED] * (owners - len(slots))
    axis.add_patch(Rectangle((x, bottom), BLOCK, size * ROW, facecolor="white" if owners else FREE, edgecolor="none"))
    head = colours or [NULL if block == 0 else "#dededb"]
    for i, colour in enumerate(head):
        part = BLOCK / len(head)
        axis.add_patch(Rectangle((x + i * part, y), part, 0.26, facecolor=colour, edgecolor="none"))
    label = "null" if block == 0 else str(block)
    axis.text(
        x + BLOCK / 2, y + 0.13, label, ha="center", va="center", fontsize=8.5, color="white" if colours else "#6b6b68"
    )
    for offset in range(size):
        word = frame.words[block, offset] if block else ""
        axis.text(
            x + BLOCK / 2,
            y - (offset + 0.5) * ROW,
            word,
            ha="center",
            va="center",
            fontsize=8,
            color=INK if offset < read else "#b9b9b5",
        )
        if offset:
            axis.plot([x, x + BLOCK], [y - offset * ROW] * 2, color="#e3e3e0", linewidth=0.6)
    edge = colours[0] if colours else "#c9c9c5"
    axis.add_patch(Rectangle((x, bottom), BLOCK, size * ROW + 0.26, fill=False, edgecolor=edge, linewidth=1.0))


def draw_table(axis: Axes, frame: Frame, slot: int, length: int, y: float) -> None:
    """A slot's block table and what its sequence says."""
    size = frame.words.shape[1]
    blocks = np.asarray(frame.tables.blocks)[slot, : -(-length // size)].tolist()
    axis.text(0, y, f"slot {slot}", fontsize=9.5, color=SLOTS[slot], fontweight="bold", va="center")
    x = 0.85
    for block in blocks:
        shared = len(owners_of(frame, block)) > 1
        axis.add_patch(
            FancyBboxPatch(
                (x, y - 0.14),
                0.36,
                0.28,
                boxstyle="round,pad=0,rounding_size=0.06",
                facecolor="white" if shared else SLOTS[slot],
                edgecolor=SLOTS[slot],
                linewidth=1.4,
            )
        )
        colour = SLOTS[slot] if shared else "white"
        axis.text(x + 0.18, y, str(block), ha="center", va="center", fontsize=8.5, color=colour, fontweight="bold")
        x += 0.44
    said = " ".join(str(frame.words[blocks[i // size], i % size]) for i in range(length))
    axis.text(x + 0.15, y, f"{length} tokens: {said}", fontsize=9, color=INK, va="center")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=PAGE.parent, help="folder in place of docs/")
    args = parser.parse_args()
    pictures: dict[str, list[Frame]] = {}
    run_page(PAGE.read_text(encoding="utf-8"), pictures)
    for name, frames in pictures.items():
        (args.out / name).parent.mkdir(parents=True, exist_ok=True)
        draw(frames, args.out / name)
        print(f"{name}: {len(frames)} states")


if __name__ == "__main__":
    main()
