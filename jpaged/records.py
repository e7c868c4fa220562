"""Handing the records of log-probabilities that a step made to the requests that want them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jpaged.features import Feature
from jpaged.request import Request
from jpaged.scheduler import Schedule
from jpaged.step import Records


class Wanting(NamedTuple):
    """A row whose request wants log-probabilities, and how many tokens it had before the step was read."""

    row: int
    request: Request
    before: int


def find_wanting(schedule: Schedule) -> list[Wanting]:
    """Rows that want records of the tokens sampled; to be called before the schedule's results are taken."""
    rows = [*schedule.decode, *(chunk.request for chunk in schedule.prefill)]
    return [
        Wanting(row, request, len(request.output_token_ids))
        for row, request in enumerate(rows)
        if request.features & Feature.LOGPROBS
    ]


def keep_records(schedule: Schedule, wanting: list[Wanting], records: Records) -> None:
    """Append records to the requests: as many as tokens were taken, and those of prompt tokens not seen before.

    Arrays are fetched from the device only if somebody wants them.
    """
    if wanting:
        sampled = np.asarray(records.sampled)
        for row, request, before in wanting:
            request.records += list(sampled[: len(request.output_token_ids) - before, row])
    offset, prompt = len(schedule.decode), None
    for chunk in schedule.prefill:
        request = chunk.request
        if request.features & Feature.PROMPT_LOGPROBS:
            prompt = np.asarray(records.prompt) if prompt is None else prompt
            # The record at position p is of token p + 1. After a preemption they come a second time.
            first = len(request.prompt_records)
            last = min(chunk.start + chunk.length, len(request.prompt_token_ids) - 1)
            if chunk.start <= first:
                request.prompt_records += list(prompt[offset + first - chunk.start : offset + last - chunk.start])
        offset += chunk.length
