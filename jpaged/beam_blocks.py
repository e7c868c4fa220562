"""Which blocks the beams of a group have in common, as far as the host has read what they did. Imports no JAX.

The host learns no block ids, but it can tell from which beam each beam went on: that one's block table is then its own
too. A block that is full is never written again, so of a column in which every beam once filled a block of its own ever
fewer blocks are left: steps that are under way can only make them fewer. What is known here is therefore safe to count
on when the next step is planned.
"""

from __future__ import annotations

from collections.abc import Sequence


class BeamBlocks:
    """The columns that the beams have filled since their prompt."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.columns: list[list[int]] = []  # of each beam, the beam that filled its block; not of columns ...
        self.common = 0  # ... whose block all beams have: so many

    def fill(self) -> None:
        """Every beam has filled its last block, which nobody else has."""
        self.columns.append(list(range(self.width)))

    def reorder(self, parents: Sequence[int]) -> None:
        """Beam i goes on from parents[i], whose blocks it gives up its own for."""
        columns = [[column[parent] for parent in parents] for column in self.columns]
        self.columns = [column for column in columns if any(block != column[0] for block in column)]
        self.common += len(columns) - len(self.columns)

    def doubled(self) -> list[int]:
        """Of each beam, how many of its blocks a beam before it has too."""
        counts = [0] + [self.common] * (self.width - 1)
        for column in self.columns:
            seen = set()
            for beam, block in enumerate(column):
                counts[beam] += block in seen
                seen.add(block)
        return counts
