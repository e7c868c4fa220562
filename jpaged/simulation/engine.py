"""The engine's loop with a simulated device and clock: the real scheduler, allocator rules and prefix index.

A discrete-event loop: a step ends when the cost model says so, requests come when their time has come, and the host
plans a step while the one before it runs, exactly as `Engine.step` does. Nothing is random, so that a run depends on
its jobs alone. Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jpaged.config import EngineConfig
from jpaged.policies import SchedulingPolicy
from jpaged.prefix_index import EvictionPolicy
from jpaged.request import Request
from jpaged.schedule import Schedule
from jpaged.scheduler import Scheduler
from jpaged.simulation.costs import CostModel
from jpaged.simulation.device import Parents, SimulatedDevice, Step
from jpaged.simulation.jobs import Job, make_request
from jpaged.simulation.records import Finished, Recorder, Report
from jpaged.tiers import HostStore


def make_config(kv_tokens: int, block_size: int = 16, **sizes: Any) -> EngineConfig:
    """A pool for `kv_tokens` tokens, and what every run here has in common with the engine it is compared to.

    sizes: other fields of EngineConfig; a step always has room for a token of each sequence.
    """
    common: dict[str, Any] = dict(preemption="recompute", free_padding=True) | sizes
    if "max_num_batched_tokens" in common:
        common["max_num_batched_tokens"] = max(common["max_num_batched_tokens"], common.get("max_num_seqs", 0))
    return EngineConfig(num_blocks=kv_tokens // block_size + 1, block_size=block_size, **common)


class SimulatedEngine:
    """Runs jobs.

    engine = SimulatedEngine(EngineConfig(num_blocks=1000, max_model_len=2048), cost)
    print(engine.run(jobs).mean_batch)
    """

    def __init__(
        self,
        config: EngineConfig,
        cost: CostModel,
        *,
        policy: SchedulingPolicy | None = None,
        eviction_policy: EvictionPolicy | None = None,
        block_bytes: int = 1 << 20,
        swap_pays: Callable[[int], bool] = lambda blocks: True,
        watch: Callable[[Schedule, Step], None] | None = None,
        parents: Parents | None = None,
        queue: int | None = None,
    ) -> None:
        """block_bytes: of a KV block; budgets of host memory are counted in them. watch: sees every step.

        parents: how beams go on (beam_parents.py); without it there can be none.
        queue: most requests that wait: others come when there is room, however early they were to come.
        """
        self.config = config
        self.cost = cost
        swap = 0 if config.preemption == "recompute" else config.swap_space_bytes
        store = HostStore(block_bytes, swap, config.prefix_cache_host_bytes)
        self.scheduler = Scheduler(config, policy, eviction_policy, store, swap_pays)
        self.device = SimulatedDevice(config, store, lambda request: self.jobs[request.request_id].output, parents)
        self.queue = queue
        self.jobs: dict[str, Job] = {}
        self.watch = watch

    def run(
        self,
        jobs: Iterable[Job],
        *,
        since: float = 0.0,
        until: float = float("inf"),
        stop_at: float = float("inf"),
        progress: Callable[[int], object] | None = None,
    ) -> Report:
        """Serve jobs, which must be in order of arrival, to the end. Means count the steps begun in [since, until).

        stop_at: when to leave whatever still runs or waits; what has finished by then is reported. progress(n): n
        more requests have finished. Raises ValueError for a job that can never run.
        """
        recorder = Recorder((self.config.num_blocks - 1) * self.config.block_size, since, until)
        self.moved = 0
        coming, number = iter(jobs), 0
        job = next(coming, None)
        now = device_free = 0.0
        pending: tuple[Schedule, Step, float] | None = None
        while now < stop_at:
            while job is not None and job.arrival <= now and self._may_wait():
                self._add(job, number)
                number += 1
                following = next(coming, None)
                if following is not None and following.arrival < job.arrival:
                    raise ValueError(f"jobs must be in order of arrival: {following.arrival} comes after {job.arrival}")
                job = following
            if pending is None and not self.scheduler.has_unfinished():
                if job is None:
                    break
                now = max(now, job.arrival)
                continue
            plan = self.scheduler.schedule()
            for request in plan.admit:
                if request.first_scheduled_time is None:
                    request.first_scheduled_time = now
            current = None
            if plan.has_work:
                step = self.device.run(plan)
                seconds = self.cost.seconds(step.shape) if plan.has_rows else 0.0
                device_free = max(device_free, now) + seconds
                self._record(recorder, plan, step, device_free, seconds)
                current = plan, step, device_free
            if self.config.async_scheduling:
                current, pending = pending, current
            if current is not None:
                now = max(now, current[2])
                done = self._read(current, recorder)
                if progress is not None and done:
                    progress(done)
            elif pending is None and self.scheduler.has_unfinished():
                raise RuntimeError("the scheduler has requests but neither runs nor waits for any: a bug in jpaged")
        scheduler = self.scheduler
        return recorder.report(
            preemptions=scheduler.num_preemptions,
            hit_rate=scheduler.prefix_hits / max(scheduler.prefix_queries, 1),
            moved_blocks=self.moved,
        )

    def _may_wait(self) -> bool:
        return self.queue is None or len(self.scheduler.waiting) < self.queue

    def _add(self, job: Job, number: int) -> None:
        request = make_request(job, number, self.config.block_size, self.config.enable_prefix_caching)
        for each in request.group:
            each.arrival_time = job.arrival
        self.scheduler.add(request)
        self.jobs[request.request_id] = job

    def _record(self, recorder: Recorder, plan: Schedule, step: Step, end: float, seconds: float) -> None:
        counts, shape = step.counts, step.shape
        recorder.step(
            end,
            seconds,
            shape.rows + shape.chunks,
            counts.tokens,
            0,
            counts.used * self.config.block_size - counts.tokens,
        )
        recorder.saved += counts.entries - counts.used
        recorder.entries += counts.entries
        self.moved += shape.moved
        if self.watch is not None:
            self.watch(plan, step)

    def _read(self, current: tuple[Schedule, Step, float], recorder: Recorder) -> int:
        """Take a step's results. Returns how many requests ended with it."""
        plan, step, arrived = current
        done = 0
        for request in self.scheduler.update(plan, step.tokens, step.remaining, step.beams):
            if request.first_token_time is None:
                request.first_token_time = arrived
            # Of outputs that end in the same step the first one seen ends the request.
            if request.finished and request.group_finished and request.request_id in self.jobs:
                self._finish(request.group, arrived, recorder)
                done += 1
        return done

    def _finish(self, group: list[Request], now: float, recorder: Recorder) -> None:
        first = group[0]
        job = self.jobs.pop(first.request_id)
        tokens = [request.first_token_time for request in group if request.first_token_time is not None]
        started = now if first.first_scheduled_time is None else first.first_scheduled_time
        output = sum(len(request.output_token_ids) for request in group)
        recorder.finished.append(Finished(job.arrival, started, min(tokens), now, job.prompt, output, len(group)))
