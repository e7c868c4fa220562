"""What an engine did and how full its memory is: counted as steps are read, summed up on request."""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

RECENT_STEPS = 512  # step times kept for the percentiles
PREFILL_MEMORY = 0.95  # what a step counts for the prefill rate when the next one is read


class BlockCounts(NamedTuple):
    """Blocks by state, used + cached + free = all but the null block, and what sequences have in them.

    i32[] each on the device, int on the host.
    """

    used: Any  # in the table of a sequence
    cached: Any  # kept under a name, in no table
    shared: Any  # in more than one table
    free: Any
    entries: Any  # of all tables: the blocks that would be used if none were shared
    tokens: Any  # in used blocks, those of a shared block once


@dataclass(frozen=True)
class BlockStats:
    """KV blocks by state; `total` excludes the null block, used + cached + free = total."""

    total: int
    used: int  # by a sequence
    cached: int  # kept for later prompts, used by no sequence now
    shared: int  # used by more than one sequence
    free: int
    saved: int  # more blocks that would be used if none were shared


@dataclass(frozen=True)
class PrefixCacheStats:
    """What prompts found in the prefix cache."""

    queried_tokens: int  # of all admitted prompts
    hit_tokens: int  # of them, those that need not be computed
    restored_tokens: int  # of the hits, those whose blocks were copied back from the host or read from disk
    evictions: int  # blocks that had to make way
    pinned_blocks: int
    disk_blocks: int  # in files
    disk_bytes: int
    disk_reads: int  # blocks read from files
    disk_damaged: int  # files whose checksum was wrong

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


@dataclass(frozen=True)
class SwapStats:
    """Blocks copied between the device and host memory."""

    preemptions: int  # those that kept blocks on the host (of EngineStats.preemptions)
    saved_blocks: int  # copied to the host
    saved_bytes: int
    restored_blocks: int  # copied back
    restored_bytes: int
    held_blocks: int  # room that waiting requests have now, though blocks may still be on the device
    host_blocks: int  # blocks on the host now
    host_bytes: int


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
    """A snapshot. Counters run since the engine started; `utilization` is tokens over slots of used blocks.

    A token in a shared block counts once.
    """

    attention_backend: str  # what reads the pages, as `jpaged version` says it
    linear_backend: str  # what multiplies: "cpu" (packed weights, native kernels), "cpu, int8" or "xla"
    tensor_parallel_size: int  # devices
    blocks: BlockStats
    block_size: int
    kv_tokens: int
    waste_tokens: int  # slots of used blocks that hold no token
    utilization: float
    peak_blocks: BlockStats  # at the moment most blocks were used
    peak_utilization: float  # likewise
    mean_utilization: float  # over steps, each weighted by its used blocks
    sharing_saving: float  # blocks saved by sharing over blocks without it, mean over steps
    prefix_cache: PrefixCacheStats
    swap: SwapStats
    running: int
    waiting: int
    preemptions: int
    finished: int
    prompt_tokens: int  # computed by prefill: without cached ones, with those computed again after a preemption
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
    peak: BlockStats | None = None
    peak_utilization: float = 1.0
    used_sum: int = 0
    saved_sum: int = 0
    token_sum: int = 0
    counts: BlockCounts = field(init=False)  # at the end of the last step that was read
    timings: deque[StepTiming] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    prefill_tokens: float = 0.0  # of steps with prompts, the older the less they count
    prefill_seconds: float = 0.0  # likewise

    def record_time(self, timing: StepTiming, prefilled: int) -> None:
        """Note how long a step took; `prefilled`: all its tokens if some were a prompt's, 0 if none."""
        self.timings.append(timing)
        if prefilled:
            self.prefill_tokens = PREFILL_MEMORY * self.prefill_tokens + prefilled
            self.prefill_seconds = PREFILL_MEMORY * self.prefill_seconds + timing.total

    @property
    def prefill_rate(self) -> float | None:
        """Tokens a second in steps that compute prompts, None before the first."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds > 0 else None

    def __post_init__(self) -> None:
        self.counts = BlockCounts(0, 0, 0, self.total_blocks, 0, 0)

    def record_step(self, iterations: int, counts: BlockCounts, prompt: int, generated: int) -> None:
        """Count one step that was read; `counts` are those at its end."""
        self.steps += 1
        self.iterations += iterations
        self.prompt_tokens += prompt
        self.generation_tokens += generated
        used = counts.used
        self.used_sum += used
        self.saved_sum += counts.entries - used
        self.token_sum += counts.tokens
        if self.peak is None or used > self.peak.used:
            self.peak = self.by_state(counts)
            self.peak_utilization = self.utilization(counts)

    def by_state(self, counts: BlockCounts) -> BlockStats:
        saved = counts.entries - counts.used
        return BlockStats(self.total_blocks, counts.used, counts.cached, counts.shared, counts.free, saved)

    def utilization(self, counts: BlockCounts) -> float:
        return counts.tokens / (counts.used * self.block_size) if counts.used else 1.0

    def snapshot(
        self,
        counts: BlockCounts,
        prefix: PrefixCacheStats,
        *,
        backends: tuple[str, str],
        devices: int,
        running: int,
        waiting: int,
        preemptions: int,
        swap: SwapStats,
    ) -> EngineStats:
        totals = sorted(timing.total for timing in self.timings) or [0.0]

        def median(part: str) -> float:
            return statistics.median([getattr(timing, part) for timing in self.timings] or [0.0])

        attention, linear = backends
        return EngineStats(
            attention_backend=attention,
            linear_backend=linear,
            tensor_parallel_size=devices,
            blocks=self.by_state(counts),
            block_size=self.block_size,
            kv_tokens=counts.tokens,
            waste_tokens=counts.used * self.block_size - counts.tokens,
            utilization=self.utilization(counts),
            peak_blocks=self.peak or BlockStats(self.total_blocks, 0, 0, 0, self.total_blocks, 0),
            peak_utilization=self.peak_utilization,
            mean_utilization=self.token_sum / (self.used_sum * self.block_size) if self.used_sum else 1.0,
            sharing_saving=self.saved_sum / (self.saved_sum + self.used_sum) if self.used_sum else 0.0,
            prefix_cache=prefix,
            swap=swap,
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
