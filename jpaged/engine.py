"""Requests in, tokens out: the loop that joins the scheduler (host) and the runner (device)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jpaged_models import LoadedModel

from jpaged.audit import AllocatorError
from jpaged.bad_words import find_bad_words
from jpaged.beam_search import BeamGroup, BeamSearchParams
from jpaged.config import EngineConfig
from jpaged.control_rows import check_controls, find_features, next_mask
from jpaged.features import Feature
from jpaged.memory import find_window, make_store
from jpaged.output_text import OutputText
from jpaged.policies import SchedulingPolicy, make_policy
from jpaged.prefix_index import EvictionPolicy, block_keys, root_key
from jpaged.records import find_wanting, keep_records
from jpaged.request import Request
from jpaged.runner import Dispatched, Runner
from jpaged.sampling_params import SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.stats import EngineStats, PrefixCacheStats, StatsCollector, StepTiming, SwapStats
from jpaged.structured import GrammarCompiler, GrammarQueue


@dataclass(frozen=True)
class PinnedPrefix:
    """The beginning of a prompt whose cached blocks are kept: its first `num_tokens` tokens."""

    pin: int
    num_tokens: int


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
        scheduling_policy: str | SchedulingPolicy = "fcfs",
        eviction_policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config = dataclasses.replace(config, window=find_window(loaded.config))
        self.model = loaded.config
        self.tokenizer = loaded.tokenizer
        self.eos_token_ids = frozenset(loaded.generation.eos_token_ids)
        self.model_key = root_key(loaded.config, config.kv_cache_dtype, loaded.quantization)
        policy, store = make_policy(scheduling_policy), make_store(loaded, config, self.model_key)
        self.scheduler = Scheduler(config, policy, eviction_policy, store, self._swap_pays)
        self.runner = Runner(loaded, config, store)
        self.copy_seconds: float | None = None  # of a block to the host and back, once measured
        self.collector = StatsCollector(config.num_blocks - 1, config.block_size)
        self.requests: dict[str, Request] = {}
        self.attended: set[str] = set()  # those the host has work for at every token: stop strings, masks, records
        self.grammars = GrammarQueue(GrammarCompiler(self.tokenizer, self.model.vocab_size, self.eos_token_ids))
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
        cache_salt: str | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        beams: BeamSearchParams | None = None,
    ) -> Request:
        """Queue a prompt. Raises ValueError, before any device work, for one that cannot be served.

        cache_salt: only requests of the same salt share cached blocks, so that tenants cannot learn of each other's
        prompts from how fast an answer comes.
        priority, tenant: for scheduling policies that look at them; lower priorities go first. None: params.priority.
        beams: search with beams, in place of `params`; the results are `request.beams.finished`.
        """
        if beams is not None:
            if params is not None:
                raise ValueError("give either params or beams: beam search does not sample")
            params = beams.as_sampling_params()
        params = params or SamplingParams()
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use by a request that has not finished")
        token_ids = self._check_prompt(prompt_token_ids)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model came without one: pass tokenizer=")
        room = self.config.max_model_len - len(token_ids)
        request = Request(
            request_id,
            token_ids,
            params,
            max_tokens=room if params.max_tokens is None else max(min(params.max_tokens, room), 1),
            seed=self._draw_seed() if params.seed is None else params.seed,
            eos_token_ids=self.eos_token_ids,
            prompt=prompt,
            arrival_time=self.clock(),
            priority=params.priority if priority is None else priority,
            tenant=tenant,
            root_key=self._root_key(cache_salt),
            bad_word_ids=find_bad_words(params.bad_words, self.tokenizer),
        )
        request.features = find_features(request)
        check_controls(request, self.model.vocab_size, self.config)
        request.check_length(self.config.max_model_len)
        if beams is not None:
            request.beams = BeamGroup(beams, request.max_tokens)
        outputs = params.n if beams is None else beams.beam_width
        if outputs > 1:
            request.add_siblings(outputs)
        if self.tokenizer is not None and params.detokenize:
            for each in request.group:
                each.text = OutputText(self.tokenizer, token_ids, params)
        if params.structured_outputs is not None:
            self.grammars.add(request)
        else:
            self.scheduler.add(request)
        self.requests[request_id] = request
        if params.stop or request.features & (Feature.LOGPROBS | Feature.PROMPT_LOGPROBS | Feature.STRUCTURED):
            self.attended.add(request_id)
        return request

    def _check_prompt(self, prompt_token_ids: Sequence[int]) -> list[int]:
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
        return ids.tolist()

    def abort(self, request_id: str) -> None:
        """End a request wherever it is. An id that is unknown or has finished is left alone."""
        first = self.requests.pop(request_id, None)
        if first is None:
            return
        self.attended.discard(request_id)
        compiling = self.grammars.discard(first)
        for request in first.group:
            if compiling:
                request.finish("abort")
            self.scheduler.abort(request)
            request.finished_time = self.clock()

    def pin_prefix(self, token_ids: Sequence[int], *, cache_salt: str | None = None) -> PinnedPrefix:
        """Keep what is cached of a prompt's beginning from being evicted, until `unpin_prefix`.

        Only full blocks that were computed before can be kept: `num_tokens` of the result says how many tokens are.
        Raises ValueError where the blocks left over could no longer hold one sequence of max_model_len.
        """
        size = self.config.block_size
        ids = self._check_prompt(token_ids)
        pin, count = self.scheduler.pin_prefix(block_keys(self._root_key(cache_salt), ids, size))
        return PinnedPrefix(pin, count * size)

    def unpin_prefix(self, pinned: PinnedPrefix) -> None:
        """Let the blocks of a pin be evicted again; one undone before, or by a reset, is left alone."""
        self.scheduler.index.unpin(pinned.pin)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block, pins included; their memory is freed by the steps that follow (where nothing
        runs, at once). Returns False if running sequences still use some, which are freed with them."""
        complete = self.scheduler.reset_prefix_cache()
        while self.has_unfinished() and not self.requests:
            self.step()
        return complete

    def save_prefix_cache(self) -> int:
        """Write to `prefix_cache_dir` what the device and the host have cached. Returns the blocks that are there then.

        What has left the host is there anyway. Raises ValueError if no folder is in use.
        """
        store, scheduler = self.scheduler.store, self.scheduler
        if store.disk is None:
            raise ValueError("there is nowhere to save the prefix cache to: give prefix_cache_dir=, a folder in use")
        coming = {name for _, _, name in scheduler.to_name}  # the device does not know of them yet
        wanted = [
            (key, block.name)
            for key, block in scheduler.index.blocks.items()
            if key not in store.disk and key not in store.blocks and block.name not in coming
        ]
        self.runner.wait_for_saves()
        for block in store.unheld.values():
            if block.data is not None:
                store.disk.put(block.key, block.data, wait=True)
        # Blocks are known from the first of a sequence on: the last are written first, and are the first to make way.
        for key, data in self.runner.read_blocks(wanted[::-1]):
            store.disk.put(key, data, wait=True)
        store.disk.flush()
        return len(store.disk)

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do, the release of blocks included."""
        return self.pending is not None or self.scheduler.has_unfinished() or bool(self.grammars.compiling)

    @property
    def waits_for_grammar(self) -> bool:
        """Whether `step` would do nothing but wait for a grammar to be compiled."""
        if not self.grammars.compiling or self.grammars.any_ready():
            return False
        return self.pending is None and not self.scheduler.has_unfinished()

    # ------------------------------------------------------------------ the loop

    def step(self) -> list[Request]:
        """Plan and dispatch one step, read the one before it. Returns the requests that got tokens or finished.

        Each output of a prompt with several (`params.n`) is a request of its own with the same id: see `Request.group`.
        """
        timing, clock = StepTiming(), self.clock
        start = clock()
        touched = self._take_compiled()
        schedule = self.scheduler.schedule()
        scheduled = clock()
        for request in schedule.admit:
            if request.first_scheduled_time is None:
                request.first_scheduled_time = scheduled
        dispatched = self.runner.dispatch(schedule) if schedule.has_work else None
        sent = clock()
        if self.config.async_scheduling:
            dispatched, self.pending = self.pending, dispatched
        timing.schedule, timing.dispatch = scheduled - start, sent - scheduled
        if dispatched is not None:
            touched += self._read(dispatched, timing)
        elif self.pending is None and self.scheduler.has_unfinished():
            raise RuntimeError("the scheduler has requests but neither runs nor waits for any: a bug in jpaged")
        end = clock()
        timing.total = end - (self.last_step_end or start)
        self.last_step_end = end if self.has_unfinished() else None
        if dispatched is not None:
            self.collector.record_time(timing, dispatched.schedule.num_tokens if dispatched.schedule.prefill else 0)
        if self.last_step_end is None:
            self.audit()
        return touched

    def audit(self) -> None:
        """Check the allocator's invariants, and that the device has what the host counts.

        While sequences own blocks the host's count of free ones is a lower bound; when none does it is exact.
        """
        self.runner.audit()
        if self.pending is not None:
            return
        scheduler, blocks = self.scheduler, self.runner.count_blocks()
        difference = blocks.free - scheduler.free_blocks
        if difference < 0 or (difference and not (scheduler.running or scheduler.to_release)):
            raise AllocatorError(
                f"the device has {blocks.free} free blocks, the scheduler counts {scheduler.free_blocks}"
            )
        names = self.runner.names_in_use()
        if names != scheduler.index.num_named - len(scheduler.to_name):
            raise AllocatorError(f"{names} blocks have a name on the device, {scheduler.index.num_named} on the host")

    def warm_up(self, on_program: Callable[[str], None] | None = None) -> None:
        """Compile every program an engine of this configuration can need. Calls on_program(name) when one is ready."""
        self.runner.warm_up(on_program)
        if self.config.preemption == "auto" and self.scheduler.store.in_use:
            self.copy_seconds = self.runner.measure_copies()

    def _swap_pays(self, blocks: int) -> bool:
        """Whether a sequence that makes way is better copied than computed again: by what both took, measured."""
        if self.config.preemption == "swap":
            return True
        rate = self.collector.prefill_rate
        if rate is None:  # nothing to compare with yet
            return True
        if self.copy_seconds is None:
            self.copy_seconds = self.runner.measure_copies()
        return blocks * self.copy_seconds < blocks * self.config.block_size / rate

    def stats(self) -> EngineStats:
        """A snapshot; waits for the step under way."""
        scheduler = self.scheduler
        disk = scheduler.store.disk
        prefix = PrefixCacheStats(
            queried_tokens=scheduler.prefix_queries,
            hit_tokens=scheduler.prefix_hits,
            restored_tokens=scheduler.swapping.cache_hits * self.config.block_size,
            evictions=scheduler.index.evictions,
            pinned_blocks=scheduler.index.num_pinned,
            disk_blocks=0 if disk is None else len(disk),
            disk_bytes=0 if disk is None else len(disk) * disk.file_bytes,
            disk_reads=0 if disk is None else disk.reads,
            disk_damaged=0 if disk is None else disk.damaged,
        )
        return self.collector.snapshot(
            self.runner.count_blocks(),
            prefix,
            backends=self.runner.backends,
            devices=self.config.tensor_parallel_size,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.num_preemptions,
            swap=self._count_swap(),
        )

    def _count_swap(self) -> SwapStats:
        swapping, store = self.scheduler.swapping, self.scheduler.store
        return SwapStats(
            preemptions=swapping.swapped,
            saved_blocks=swapping.saved,
            saved_bytes=swapping.saved * store.block_bytes,
            restored_blocks=swapping.restored,
            restored_bytes=swapping.restored * store.block_bytes,
            held_blocks=len(store.holds),
            host_blocks=len(store.blocks),
            host_bytes=len(store.blocks) * store.block_bytes,
        )

    def _read(self, dispatched: Dispatched, timing: StepTiming) -> list[Request]:
        start = self.clock()
        result = self.runner.read(dispatched)
        arrived = self.clock()
        schedule = dispatched.schedule
        attending = bool(self.attended)  # else there is nothing to do for a token
        wanting = find_wanting(schedule) if attending else []
        touched = self.scheduler.update(schedule, result.tokens, result.left, result.beams)
        for request in touched:
            if attending:
                self._look_for_end(request)
            if request.first_token_time is None:
                request.first_token_time = arrived
            request.last_token_time = arrived
            if request.finished:
                self._forget(request, arrived)
        if attending:
            keep_records(schedule, wanting, dispatched.records)
            self._write_masks([request for request in touched if request.grammar is not None])
        self.collector.counts = result.counts
        if schedule.has_rows:
            prompt = sum(chunk.length for chunk in schedule.prefill)
            generated = int((result.tokens >= 0).sum())
            self.collector.record_step(result.iterations, result.counts, prompt, generated)
        timing.wait, timing.update = arrived - start, self.clock() - arrived
        return touched

    def _root_key(self, cache_salt: str | None) -> bytes:
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise ValueError(f"cache_salt must be None or a text that is not empty, got {cache_salt!r}")
        return self.model_key if cache_salt is None else root_key(self.model_key, cache_salt)

    def _look_for_end(self, request: Request) -> None:
        """End a request where only the host can tell: at a stop string, or where its grammar is complete."""
        stop = request.text.update(request) if request.text is not None else None
        if stop is not None:
            self.scheduler.end(request, "stop", stop)
        elif request.grammar is not None and not request.finished:
            token = request.output_token_ids[-1]
            if not request.grammar.accept(token):
                request.error = f"structured_outputs: no token was allowed that the grammar allows too (got {token})"
                self.scheduler.end(request, "error")
            elif request.grammar.complete:
                self.scheduler.end(request, "stop")

    def _write_masks(self, requests: list[Request]) -> None:
        """The masks for the next tokens of structured requests, while the device runs the step after theirs."""
        running = [request for request in requests if request.slot >= 0]
        if running:
            masks = [next_mask(request, self.model.vocab_size) for request in running]
            self.runner.write_masks([request.slot for request in running], masks)
        for request in running:
            self.scheduler.resume(request)

    def _take_compiled(self) -> list[Request]:
        """Hand requests whose grammar is compiled to the scheduler. Returns those whose grammar was bad."""
        idle = self.pending is None and not self.scheduler.has_unfinished()
        failed = []
        for request in self.grammars.take_ready(wait=idle):
            if request.error is None:
                self.scheduler.add(request)
                continue
            for each in request.group:
                each.finish("error")
                each.error = request.error
                self._forget(each, self.clock())
                failed.append(each)
        return failed

    def _forget(self, request: Request, now: float) -> None:
        request.finished_time = now
        if request.group_finished and self.requests.pop(request.request_id, None) is not None:
            self.attended.discard(request.request_id)
            self.collector.finished += 1

    def _draw_seed(self) -> int:
        return int(self.seeds.integers(0, 2**63))
