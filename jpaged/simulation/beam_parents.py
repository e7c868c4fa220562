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
        self.groups = groups

    def __call__(self, request: Request, generated: int) -> list[int]:
        """Of each beam of the group, whose first request this is, the one it goes on from after `generated` tokens."""
        width = len(request.group)
        if not self.groups.get(width):
            known = ", ".join(map(str, sorted(self.groups)))
            raise ValueError(f"no group of {width} beams was recorded; there are groups of {known}")
        records = self.groups[width]
        record = records[request.seed % len(records)]
        iterations = len(record) // width
        at = generated if generated < iterations else 1 + (generated - 1) % (iterations - 1)
        return [DIGITS.index(digit) for digit in record[at * width : (at + 1) * width]]


def recorded_parents() -> RecordedParents:
    """The groups that come with the package: widths 2, 4 and 6."""
    text = importlib.resources.files("jpaged.simulation.data").joinpath("beam_parents.json").read_text("utf-8")
    return RecordedParents({int(width): records for width, records in json.loads(text)["groups"].items()})
