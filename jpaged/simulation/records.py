"""What is kept of a simulated run, and what is reported of it. Imports no JAX."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Finished:
    """Times of one request, in seconds; `output` counts all of its outputs' tokens."""

    arrival: float
    started: float  # when it was first scheduled
    first_token: float
    end: float
    prompt: int
    output: int
    outputs: int = 1


@dataclass(frozen=True)
class Report:
    """A run in numbers. Means over time weigh each step by its duration; seconds are the simulated device's."""

    finished: int
    seconds: float
    steps: int
    requests_per_second: float
    output_tokens_per_second: float
    mean_batch: float  # sequences that a step computes something for; of contiguous systems requests
    peak_batch: int
    token_states: float  # share of the KV memory, mean over time: what holds a token,
    reserved: float  # what a running request was given and will use later,
    internal: float  # what it was given and never uses,
    external: float  # and what nobody has
    utilization: float  # tokens over what requests were given
    normalized_latency: float  # mean of (end - arrival) / tokens of one output, s/token
    latency_p50: float  # end - arrival, s
    latency_p99: float
    first_token_p50: float  # s after arrival
    first_token_p99: float
    token_seconds_p50: float  # between tokens of one request, its mean
    token_seconds_p99: float
    preemptions: int = 0
    hit_rate: float = 0.0  # share of prompt tokens found in the prefix cache
    moved_blocks: int = 0  # to the host and back
    mean_saved: float = 0.0  # share of blocks that sharing saves, mean over steps

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Recorder:
    """Collects steps and requests of a system with room for `slots` tokens of KV."""

    slots: int
    since: float = 0.0  # steps before are not counted in means
    until: float = float("inf")
    finished: list[Finished] = field(default_factory=list)
    steps: int = 0
    end: float = 0.0
    peak_batch: int = 0
    sums: np.ndarray = field(default_factory=lambda: np.zeros(4))  # tokens, reserved, internal, batch; times seconds
    weight: float = 0.0
    saved: float = 0.0  # blocks
    entries: float = 0.0

    def step(self, end: float, seconds: float, batch: int, tokens: int, reserved: int, internal: int) -> None:
        """A step that took `seconds` until `end`: its batch, and KV slots by use."""
        self.steps += 1
        self.end = max(self.end, end)
        self.peak_batch = max(self.peak_batch, batch)
        if self.since <= end - seconds < self.until:
            self.weight += seconds
            self.sums += np.array([tokens, reserved, internal, batch]) * seconds

    def report(self, **more: Any) -> Report:
        """Raises ValueError where nothing ran."""
        if not self.finished or not self.weight:
            raise ValueError("nothing was run: no request finished")
        tokens, reserved, internal, batch = (self.sums / self.weight).tolist()
        given = tokens + reserved + internal
        table = np.array([[f.arrival, f.first_token, f.end, f.output, f.outputs] for f in self.finished])
        arrival, first, end, output, outputs = table.T
        length = output / outputs
        latency, wait = end - arrival, first - arrival
        between = (end - first) / np.maximum(length - 1, 1)
        span = max(self.end - float(arrival.min()), 1e-12)
        return Report(
            finished=len(self.finished),
            seconds=self.end,
            steps=self.steps,
            requests_per_second=len(self.finished) / span,
            output_tokens_per_second=float(output.sum()) / span,
            mean_batch=batch,
            peak_batch=self.peak_batch,
            token_states=tokens / self.slots,
            reserved=reserved / self.slots,
            internal=internal / self.slots,
            external=1 - given / self.slots,
            utilization=tokens / given if given else 1.0,
            normalized_latency=float((latency / length).mean()),
            latency_p50=float(np.percentile(latency, 50)),
            latency_p99=float(np.percentile(latency, 99)),
            first_token_p50=float(np.percentile(wait, 50)),
            first_token_p99=float(np.percentile(wait, 99)),
            token_seconds_p50=float(np.percentile(between, 50)),
            token_seconds_p99=float(np.percentile(between, 99)),
            mean_saved=self.saved / self.entries if self.entries else 0.0,
            **more,
        )
