"""Which beams go on, as a real model's beams did: recorded, and played back to a simulated device. Imports no JAX.

Beam search goes by logits, which no simulation has. How long beams stay together, and so what they share, is taken from
groups of beams that a real model ran on real prompts (`scripts/bench_sharing.py record`): of each group and iteration
the number of the beam that each goes on from. A simulated group gets one of the recorded groups of its width; where it
runs longer than that did, what came after the record's first iteration is played again.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping, Sequence

from jpaged.request import Request

DIGITS = "0123456789abcdef"


class RecordedParents:
    """Plays records back: `groups[width]` are texts of `width` digits for each iteration."""

    def __init__(self, groups: Mapping[int, Sequence[str]]) -> None:
        for width, records in groups.items():
            for record in records:
                if len(record) < 2 * width or len(record) % width or not set(record) <= set(DIGITS[:width]):
                    raise ValueError(
                        f"a record of {width} beams must be digits below that, {width} an iteration, two or more"
                    )
        # Of each width, record and iteration the beams that are gone on from.
        self.groups = {width: [_parse(record, width) for record in records] for width, records in groups.items()}

    def __call__(self, request: Request, generated: int) -> Sequence[int]:
        """Of each beam of the group, whose first request this is, the one it goes on from after `generated` tokens."""
        return self.at(len(request.group), request.seed, generated)

    def at(self, width: int, number: int, generated: int) -> Sequence[int]:
        """The same of a group of `width` beams; equal numbers get the same record."""
        if not self.groups.get(width):
            known = ", ".join(map(str, sorted(self.groups)))
            raise ValueError(f"no group of {width} beams was recorded; there are groups of {known}")
        records = self.groups[width]
        record = records[number % len(records)]
        return record[generated if generated < len(record) else 1 + (generated - 1) % (len(record) - 1)]


def _parse(record: str, width: int) -> list[tuple[int, ...]]:
    return [tuple(DIGITS.index(digit) for digit in record[at : at + width]) for at in range(0, len(record), width)]


def recorded_parents() -> RecordedParents:
    """The groups that come with the package: widths 2, 4 and 6."""
    text = importlib.resources.files("jpaged.simulation.data").joinpath("beam_parents.json").read_text("utf-8")
    return RecordedParents({int(width): records for width, records in json.loads(text)["groups"].items()})
