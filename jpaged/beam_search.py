"""Beam search as the host sees it: what a user asks for, the beams' tokens, and when a group is done. Imports no JAX.

The device ranks candidates and moves block tables (beams.py) and tells, iteration by iteration, which candidates go on
and which of the best ended the text. Scores, the choice of what is kept and the rule that ends a group are those of
transformers' `generate(num_beams=...)`: a finished sequence scores the sum of its log-probabilities divided by
length ** length_penalty, where the length counts generated tokens, the one that ended it included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from jpaged.beam_blocks import BeamBlocks
from jpaged.sampling_params import RequestOutputKind, SamplingParams
from jpaged.validation import as_number

MAX_BEAM_WIDTH = 16


@dataclass(frozen=True)
class BeamSearchParams:
    """What a request asks of beam search; names as in vLLM, `early_stopping` as in transformers.

    beam_width      beams that go on at once, and sequences returned
    max_tokens      most tokens to generate
    ignore_eos      end-of-text tokens are like any other
    length_penalty  above 0 favours long sequences, below 0 short ones
    early_stopping  False: end when no running beam can beat the worst finished one if it ended now; "never": if it
                    went on to max_tokens; True: end as soon as beam_width sequences are finished
    include_stop_str_in_output  show the text of the token that ended a sequence
    skip_special_tokens         leave special tokens out of the text
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, least, most in (("beam_width", 1, MAX_BEAM_WIDTH), ("max_tokens", 1, 2**31 - 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
                raise ValueError(f"{name} must be an integer of {least} to {most}, got {value!r}")
        if not math.isfinite(as_number("length_penalty", self.length_penalty)):
            raise ValueError(f"length_penalty must be finite, got {self.length_penalty!r}")
        if self.early_stopping not in (False, True, "never"):
            raise ValueError(f'early_stopping must be False, True or "never", got {self.early_stopping!r}')

    def as_sampling_params(self) -> SamplingParams:
        """What the scheduler and the device need to know of a beam besides."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


@dataclass(frozen=True)
class BeamSearchSequence:
    """One result. `tokens` are the prompt's and the generated ones; `score` is cum_logprob / generated ** penalty."""

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True)
class BeamSearchOutput:
    """A prompt's sequences, best first."""

    sequences: list[BeamSearchSequence]


class Beam(NamedTuple):
    """A token after those of its parent."""

    parent: Beam | None
    token: int
    cum_logprob: float

    def tokens(self) -> list[int]:
        found, beam = [], self
        while beam is not None:
            found.append(beam.token)
            beam = beam.parent  # type: ignore[assignment]
        return found[::-1]

    def logprobs(self) -> list[float]:
        """Of each token, after those before it."""
        found, beam = [], self
        while beam is not None:
            found.append(beam.cum_logprob - (beam.parent.cum_logprob if beam.parent is not None else 0.0))
            beam = beam.parent  # type: ignore[assignment]
        return found[::-1]


class Finished(NamedTuple):
    score: float
    beam: Beam
    reason: str


class BeamGroup:
    """The beams of one prompt."""

    def __init__(self, params: BeamSearchParams, max_tokens: int) -> None:
        self.params = params
        self.max_tokens = max_tokens
        self.restart()

    def restart(self) -> None:
        """Forget everything: the group begins again from its prompt."""
        self.beams: list[Beam | None] = [None] * self.params.beam_width
        self.blocks = BeamBlocks(self.params.beam_width)
        self.finished: list[Finished] = []
        self.length = 0
        self.done = False

    def advance(self, records: np.ndarray, members: dict[int, int]) -> None:
        """Take one iteration: records i32[W, 6] of beams.py, in order of the beams; members: slot -> beam."""
        scores = np.ascontiguousarray(records).view(np.float32)[:, 2::3].tolist()
        self.length += 1
        ended = 0
        going = []
        origins = list(range(len(scores)))  # the blocks of a beam that does not go on stay what they were
        for index, ((slot, token, _, end_slot, end_token, _), (score, end_score)) in enumerate(
            zip(records.tolist(), scores, strict=True)
        ):
            if end_slot >= 0:
                self._finish(Beam(self.beams[members[end_slot]], end_token, end_score), "stop")
                ended += 1
            if slot >= 0:
                origins[index] = members[slot]
                going.append(Beam(self.beams[members[slot]], token, score))
        self.blocks.reorder(origins)
        # At the limit the best W of all candidates are finished, whether they end the text or not.
        if self.length == self.max_tokens:
            for beam in going[: self.params.beam_width - ended]:
                self._finish(beam, "length")
            self.done = True
            return
        self.beams = [*going, *[None] * (self.params.beam_width - len(going))]
        self.done = not going or not self._can_improve(going[0].cum_logprob)

    def _finish(self, beam: Beam, reason: str) -> None:
        """Keep a finished sequence if it is among the best W."""
        score = beam.cum_logprob / self.length**self.params.length_penalty
        self.finished.append(Finished(score, beam, reason))
        self.finished.sort(key=lambda each: -each.score)
        del self.finished[self.params.beam_width :]

    def _can_improve(self, best_running: float) -> bool:
        """Whether going on may change what is returned."""
        if len(self.finished) < self.params.beam_width:
            return True
        if self.params.early_stopping is True:
            return False
        long = self.params.early_stopping == "never" and self.params.length_penalty > 0
        length = self.max_tokens if long else self.length
        return best_running / length**self.params.length_penalty > self.finished[-1].score
