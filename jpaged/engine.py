"""Requests in, tokens out: the loop that joins the scheduler (host) and the runner (device)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from jpaged_models import LoadedModel

from jpaged.audit import AllocatorError
from jpaged.config import EngineConfig
from jpaged.request import Request
from jpaged.runner import Dispatched, Runner
from jpaged.sampling_params import SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.stats import EngineStats, StatsCollector, StepTiming


class Engine:
    """One model, one pool of KV blocks, any number of requests.

        engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0))
        while engine.has_unfinished():
            for request in engine.step(): ...

    With `config.async_scheduling` a call of `step` dispatches a step and then reads the one before it, so that the
    host plans while the device runs; tokens arrive one call later.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.model = loaded.config
        self.eos_token_ids = frozenset(loaded.generation.eos_token_ids)
        self.scheduler = Scheduler(config)
        self.runner = Runner(loaded, config)
        self.collector = StatsCollector(config.num_blocks - 1, config.block_size)
        self.requests: dict[str, Request] = {}
        self.pending: Dispatched | None = None
        self.clock = clock
        self.last_step_end: float | None = None
        self.seeds = np.random.default_rng(seed)

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
    ) -> Request:
        """Queue a prompt. Raises ValueError, before any device work, for one that cannot be served."""
        params = params or SamplingParams()
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use by a request that has not finished")
        token_ids = self._check_prompt(prompt_token_ids, params)
        room = self.config.max_model_len - len(token_ids)
        request = Request(
            request_id,
            token_ids,
            params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=self._draw_seed() if params.seed is None else params.seed,
            eos_token_ids=self.eos_token_ids,
            prompt=prompt,
            arrival_time=self.clock(),
        )
        self.scheduler.add(request)
        self.requests[request_id] = request
        return request

    def _check_prompt(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt as Python ints. Raises ValueError if it is empty or an id is unknown; its length is the
        scheduler's to check."""
        ids = np.asarray(prompt_token_ids)
        vocab = self.model.vocab_size
        if ids.ndim != 1 or ids.size == 0:
            raise ValueError(f"a prompt must hold at least one token id in one dimension, got shape {ids.shape}")
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"a prompt must hold integer token ids, got {ids.dtype}")
        bad = ids[(ids < 0) | (ids >= vocab)]
        if bad.size:
            raise ValueError(f"token id {bad[0]} is outside the model's vocabulary: ids are 0 to {vocab - 1}")
        stray = [token for token in params.stop_token_ids if token >= vocab]
        if stray:
            raise ValueError(f"stop_token_ids: {stray[0]} is outside the model's vocabulary: ids are 0 to {vocab - 1}")
        return ids.tolist()

    def abort(self, request_id: str) -> None:
        """End a request wherever it is. An id that is unknown or has finished is left alone."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request)
            request.finished_time = self.clock()

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do, the release of blocks included."""
        return self.pending is not None or self.scheduler.has_unfinished()

    # ------------------------------------------------------------------ the loop

    def step(self) -> list[Request]:
        """Plan and dispatch one step, read the one before it. Returns the requests that got tokens or finished."""
        timing, clock = StepTiming(), self.clock
        start = clock()
        schedule = self.scheduler.schedule()
        scheduled = clock()
        for request in schedule.admit:
            if request.first_scheduled_time is None:
                request.first_scheduled_time, request.num_cached_tokens = scheduled, 0
        dispatched = self.runner.dispatch(schedule) if schedule.has_rows or schedule.release else None
        sent = clock()
        if self.config.async_scheduling:
            dispatched, self.pending = self.pending, dispatched
        timing.schedule, timing.dispatch = scheduled - start, sent - scheduled
        touched: list[Request] = []
        if dispatched is not None:
            touched = self._read(dispatched, timing)
        elif self.pending is None and self.scheduler.has_unfinished():
            raise RuntimeError("the scheduler has requests but neither runs nor waits for any: a bug in jpaged")
        end = clock()
        timing.total = end - (self.last_step_end or start)
        self.last_step_end = end if self.has_unfinished() else None
        if dispatched is not None:
            self.collector.timings.append(timing)
        if self.last_step_end is None:
            self.audit()
        return touched

    def audit(self) -> None:
        """Check the allocator's invariants; with no step under way also that host and device count alike."""
        self.runner.audit()
        if self.pending is None:
            free, counted = self.runner.count_blocks()[0].free, self.scheduler.free_blocks
            if free != counted:
                raise AllocatorError(f"the device has {free} free blocks, the scheduler counts {counted}")

    def warm_up(self, on_program: Callable[[str], None] | None = None) -> None:
        """Compile every program an engine of this configuration can need. Calls on_program(name) when one is ready."""
        self.runner.warm_up(on_program)

    def stats(self) -> EngineStats:
        """A snapshot; waits for the step under way."""
        blocks, tokens = self.runner.count_blocks()
        scheduler = self.scheduler
        return self.collector.snapshot(
            blocks, tokens, len(scheduler.running), len(scheduler.waiting), scheduler.num_preemptions
        )

    def _read(self, dispatched: Dispatched, timing: StepTiming) -> list[Request]:
        start = self.clock()
        result = self.runner.read(dispatched)
        arrived = self.clock()
        schedule = dispatched.schedule
        touched = self.scheduler.update(schedule, result.tokens, result.left)
        for request in touched:
            if request.first_token_time is None:
                request.first_token_time = arrived
            request.last_token_time = arrived
            if request.finished:
                request.finished_time = arrived
                self.requests.pop(request.request_id, None)
                self.collector.finished += 1
        if schedule.has_rows:
            prompt = sum(chunk.length for chunk in schedule.prefill)
            generated = int((result.tokens >= 0).sum())
            self.collector.record_step(result.iterations, result.num_free, result.num_tokens, prompt, generated)
        timing.wait, timing.update = arrived - start, self.clock() - arrived
        return touched

    def _draw_seed(self) -> int:
        return int(self.seeds.integers(0, 2**63))
