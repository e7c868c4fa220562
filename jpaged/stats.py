"""What an engine did and how full its memory is: counted as steps are read, summed up on request."""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

RECENT_STEPS = 512  # step times kept for the percentiles


@dataclass(frozen=True)
class BlockStats:
    """KV blocks by state; `total` excludes the null block, used + free = total."""

    total: int
    used: int
    cached: int  # used, but by no sequence
    shared: int  # used by more than one owner
    free: int


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the last steps, and where the host's part of them went (medians)."""

    p50: float
    p99: float
    schedule: float
    dispatch: float
    wait: float
    update: float


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Counters run since the engine started; `utilization` is tokens over slots of used blocks."""

    blocks: BlockStats
    block_size: int
    kv_tokens: int
    waste_tokens: int  # slots of used blocks that hold no token
    utilization: float
    peak_used_blocks: int
    peak_utilization: float  # at the moment most blocks were used
    mean_utilization: float  # over steps, each weighted by its used blocks
    running: int
    waiting: int
    preemptions: int
    finished: int
    prompt_tokens: int  # computed by prefill, tokens computed again after a preemption included
    generation_tokens: int
    steps: int
    iterations: int
    step_times: StepTimes

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass
class StepTiming:
    """Seconds of the host's parts of one step; `total` is from the last step's end to this one's."""

    schedule: float = 0.0
    dispatch: float = 0.0
    wait: float = 0.0
    update: float = 0.0
    total: float = 0.0


@dataclass
class StatsCollector:
    """Counters of one engine."""

    total_blocks: int
    block_size: int
    finished: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    iterations: int = 0
    peak_used: int = 0
    peak_utilization: float = 0.0
    slot_sum: int = 0
    token_sum: int = 0
    timings: deque[StepTiming] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def record_step(self, iterations: int, num_free: int, num_tokens: int, prompt: int, generated: int) -> None:
        """Count one step that was read: free blocks and cached tokens are those at its end."""
        self.steps += 1
        self.iterations += iterations
        self.prompt_tokens += prompt
        self.generation_tokens += generated
        used = self.total_blocks - num_free
        slots = used * self.block_size
        self.slot_sum += slots
        self.token_sum += num_tokens
        if used > self.peak_used:
            self.peak_used = used
            self.peak_utilization = num_tokens / slots

    def snapshot(self, blocks: BlockStats, kv_tokens: int, running: int, waiting: int, preemptions: int) -> EngineStats:
        slots = blocks.used * self.block_size
        totals = sorted(timing.total for timing in self.timings) or [0.0]

        def median(part: str) -> float:
            return statistics.median([getattr(timing, part) for timing in self.timings] or [0.0])

        return EngineStats(
            blocks=blocks,
            block_size=self.block_size,
            kv_tokens=kv_tokens,
            waste_tokens=slots - kv_tokens,
            utilization=kv_tokens / slots if slots else 1.0,
            peak_used_blocks=self.peak_used,
            peak_utilization=self.peak_utilization,
            mean_utilization=self.token_sum / self.slot_sum if self.slot_sum else 1.0,
            running=running,
            waiting=waiting,
            preemptions=preemptions,
            finished=self.finished,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            steps=self.steps,
            iterations=self.iterations,
            step_times=StepTimes(
                p50=totals[len(totals) // 2],
                p99=totals[min(len(totals) - 1, int(len(totals) * 0.99))],
                schedule=median("schedule"),
                dispatch=median("dispatch"),
                wait=median("wait"),
                update=median("update"),
            ),
        )
