"""What is asked of a simulated engine: lengths and times, and which prompts begin alike. Imports no JAX."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jpaged.beam_search import BeamGroup, BeamSearchParams
from jpaged.request import Request
from jpaged.sampling_params import SamplingParams
from jpaged.simulation.device import END
from jpaged.traces import TRACE_BLOCK, read_trace


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it comes (seconds), how long its prompt is and how long each of its outputs will be.

    prefix      what its first tokens are, a number for `prefix_block` of them: equal ones mean equal tokens up to there
    outputs     of one prompt (parallel sampling)
    beams       whether these are the beams of one search, which go on or not by `beam_parents.py`
    max_tokens  the limit that the scheduler knows; None: the output's true length (as if with ignore_eos)
    """

    arrival: float
    prompt: int
    output: int
    prefix: tuple[int, ...] = ()
    prefix_block: int = TRACE_BLOCK
    outputs: int = 1
    beams: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.beams and self.max_tokens is not None:
            raise ValueError(f"beams end with their output: max_tokens must be None, got {self.max_tokens}")


def make_request(job: Job, number: int, block_size: int, caching: bool) -> Request:
    """The engine's request of a job. Its tokens are made up, equal to another's where `job.prefix` says so.

    Raises ValueError if the blocks that the job names are no multiple of the engine's.
    """
    known = job.max_tokens is None
    ends = frozenset() if known else frozenset({END})
    limit = job.output if job.max_tokens is None else max(job.max_tokens, job.output)
    prompt = [-1 - number] + [1] * (job.prompt - 1)  # no other's
    request = Request(str(number), prompt, SamplingParams(max_tokens=None), limit, seed=number, eos_token_ids=ends)
    if job.prefix and caching:
        each, odd = divmod(job.prefix_block, block_size)
        if odd or not each:
            raise ValueError(
                f"the trace names blocks of {job.prefix_block} tokens, so block_size must divide that, got {block_size}"
            )
        blocks = job.prompt // block_size
        whole = min(len(job.prefix) * each, blocks)
        if whole * block_size < job.prompt:
            request.prompt_token_ids[whole * block_size] = -1 - number
        request.block_keys = [b"%d.%d" % (job.prefix[column // each], column % each) for column in range(whole)]
    if job.beams:
        search = BeamSearchParams(beam_width=job.outputs, max_tokens=limit, ignore_eos=True)
        request.beams = BeamGroup(search, limit)
    if job.outputs > 1:
        request.add_siblings(job.outputs)
    return request


# ------------------------------------------------------------------ lengths


def sharegpt_lengths() -> np.ndarray:
    """i64[7980, 2]: prompt and output tokens of ShareGPT conversations' first turns, by a Llama-3 style tokenizer."""
    text = importlib.resources.files("jpaged.simulation.data").joinpath("sharegpt_lengths.csv").read_text("utf-8")
    return np.array([row.split(",") for row in text.split()[1:]], np.int64)


def fit_lengths(
    lengths: np.ndarray, prompt: tuple[float, float], output: tuple[float, float], limit: int = 2048
) -> np.ndarray:
    """Lengths i64[N, 2] changed to given means, each by x -> a * x ** b, and cut at `limit` tokens in all.

    prompt, output: (mean, mean over requests weighted by their output's length): the second is what a system sees that
    runs a request as long as its output takes. The order of lengths, and which go together, stay.
    """
    powers = np.linspace(0.3, 2.5, 111)
    x = np.maximum(lengths, 1).astype(float)

    def shape(values: np.ndarray, mean: float, power: float) -> np.ndarray:
        scaled = values**power
        for _ in range(20):  # the cut takes from the mean
            scaled *= mean / np.clip(scaled, 1, limit - 1).mean()
        return np.clip(scaled, 1, limit - 1)

    outputs = [shape(x[:, 1], output[0], power) for power in powers]
    chosen = min(outputs, key=lambda o: abs((o * o).sum() / o.sum() - output[1]))
    prompts = [shape(x[:, 0], prompt[0], power) for power in powers]
    prompt_lengths = min(prompts, key=lambda p: abs((p * chosen).sum() / chosen.sum() - prompt[1]))
    result = np.maximum(np.rint(np.stack([prompt_lengths, chosen], 1)), 1).astype(np.int64)
    result[:, 0] = np.minimum(result[:, 0], limit // 2)
    result[:, 1] = np.minimum(result[:, 1], limit - result[:, 0])
    return result


def scale_lengths(lengths: np.ndarray, prompt: float, output: float, limit: int = 2048) -> np.ndarray:
    """Lengths i64[N, 2] multiplied to have these means, those that pass the limit cut."""
    result = np.maximum(np.rint(lengths * (np.array([prompt, output]) / lengths.mean(0))), 1).astype(np.int64)
    result[:, 0] = np.minimum(result[:, 0], limit // 2)
    result[:, 1] = np.minimum(result[:, 1], limit - result[:, 0])
    return result


def geometric_lengths(prompt: float, output: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths i64[N, 2], geometrically distributed with these means."""
    return np.stack([rng.geometric(1 / prompt, count), rng.geometric(1 / output, count)], 1).astype(np.int64)


def poisson_jobs(lengths: np.ndarray, rate: float, seconds: float, rng: np.random.Generator, **job) -> list[Job]:
    """Requests that come at random, `rate` a second, for so long; lengths drawn from `lengths`. job: fields of Job.

    At another rate the same generator gives the same requests, sooner or later.
    """
    times_rng, lengths_rng = rng.spawn(2)
    times = np.cumsum(times_rng.exponential(1 / rate, int(rate * seconds * 1.2) + 100))
    times = times[times < seconds]
    drawn = lengths[lengths_rng.integers(0, len(lengths), len(times))].tolist()
    return [Job(at, p, o, **job) for at, (p, o) in zip(times.tolist(), drawn, strict=True)]


# ------------------------------------------------------------------ traces


def read_jobs(path: Path, count: int | None = None, speedup: float = 1.0) -> list[Job]:
    """Requests of a trace (see `jpaged.traces`), its clock `speedup` times as fast; where it has none all come at once.

    Requests of no tokens get one, which a request must have.
    """
    return [
        Job(
            (each.arrival or 0.0) / speedup,
            max(each.prompt, 1),
            max(each.output, 1),
            each.blocks[: each.prompt // TRACE_BLOCK],
        )
        for each in read_trace(path, count)
    ]


def with_limit(jobs: Iterable[Job], limit: int) -> list[Job]:
    """Those of at most `limit` tokens in all."""
    return [job for job in jobs if job.prompt + job.output <= limit]


def without_prefixes(jobs: Sequence[Job]) -> list[Job]:
    """The same requests, no two of which begin alike."""
    return [replace(job, prefix=()) for job in jobs]
