"""What Prometheus is told at /metrics: vLLM's names under the prefix `jpaged:`, and paging's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged.engine import Engine
from jpaged.request import Request
from jpaged.server.block_times import BlockTimes

# Bounds of the histograms, in seconds and tokens; as vLLM's where it has them.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 320)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5)
BLOCK_LIFE = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@dataclass
class Progress:
    """What was told of a request so far."""

    tokens: int = 0
    time: float = 0.0


class Metrics:
    """Counts what an engine does; an `Observer` of it, called in its thread."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model, "engine": "0"}
        self.progress: dict[Request, Progress] = {}
        self.last: dict[str, int] = {}  # the engine's counters when they were last looked at
        self.last_step: float | None = None
        self.first_token_sum, self.first_token_count = 0.0, 0  # seconds; for the dashboard, as those below
        self.between_tokens_sum, self.between_tokens_count = 0.0, 0
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._describe_requests()
        self._describe_engine(engine)
        self._describe_blocks(engine)
        index = engine.scheduler.index
        index.policy = BlockTimes(
            index.policy,
            on_life=self._histogram(
                "kv_block_lifetime_seconds", "From the caching of a block to its eviction", BLOCK_LIFE
            ),
            on_idle=self._histogram(
                "kv_block_idle_before_evict_seconds", "From the last use of a block to its eviction", BLOCK_LIFE
            ),
            on_reuse=self._histogram(
                "kv_block_reuse_gap_seconds", "From the last use of a block to the next", BLOCK_LIFE
            ),
        )

    # ------------------------------------------------------------------ what there is

    def _describe_requests(self) -> None:
        self.success = Counter(
            "jpaged:request_success", "Outputs that ended", [*self.labels, "finished_reason"], registry=self.registry
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts whose computation is complete")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to first token", FIRST_TOKEN)
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds", "Between tokens of an output", BETWEEN_TOKENS
        )
        self.per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between tokens of an output that ended", BETWEEN_TOKENS
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end", WHOLE)
        self.queued = self._histogram("request_queue_time_seconds", "From arrival to the first step", WHOLE)
        self.prefilling = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token", WHOLE
        )
        self.decoding = self._histogram("request_decode_time_seconds", "From the first token to the last", WHOLE)
        self.inference = self._histogram(
            "request_inference_time_seconds", "From the first step to the last token", WHOLE
        )
        self.request_prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt", TOKENS)
        self.request_generation = self._histogram("request_generation_tokens", "Tokens of an output", TOKENS)
        self.asked_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request", TOKENS)
        self.asked_outputs = self._histogram("request_params_n", "n of a request", (1, 2, 5, 10, 20))
        self.http_requests = Counter(
            "jpaged:http_requests", "Answers by status", ["method", "path", "status"], registry=self.registry
        )

    def _describe_engine(self, engine: Engine) -> None:
        scheduler, config = engine.scheduler, engine.config
        self._gauge("num_requests_running", "Outputs that run", lambda: len(scheduler.running))
        self._gauge(
            "num_requests_waiting",
            "Prompts that wait, those whose grammar is being compiled among them",
            lambda: len(scheduler.waiting) + len(engine.grammars.compiling),
        )
        self.preemptions = self._counter("num_preemptions", "Outputs that made way for others")
        self.queries = self._counter("prefix_cache_queries", "Tokens of prompts looked up in the prefix cache")
        self.hits = self._counter("prefix_cache_hits", "Of them, those found")
        self.evictions = self._counter("prefix_cache_evictions", "Cached blocks that had to make way")
        self.restored = self._counter(
            "prefix_cache_restored_tokens", "Of the hits, those copied back from host or disk"
        )
        self.swapped_out = self._counter("swap_out_bytes", "Bytes of KV blocks copied to host memory")
        self.swapped_in = self._counter("swap_in_bytes", "Bytes of KV blocks copied back")
        store = scheduler.store
        self._gauge("kv_host_blocks", "KV blocks in host memory", lambda: len(store.blocks))
        self._gauge("kv_disk_blocks", "KV blocks in files", lambda: 0 if store.disk is None else len(store.disk))
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens computed in a step", ITERATION)
        self.step_time = self._histogram("step_duration_seconds", "From the end of a step to that of the next", STEP)
        info = {
            "block_size": config.block_size,
            "num_gpu_blocks": config.num_blocks,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
        }
        names = [*self.labels, *info]
        settings = Gauge("jpaged:cache_config_info", "The engine's settings", names, registry=self.registry)
        settings.labels(**self.labels, **{name: str(value) for name, value in info.items()}).set(1)

    def _describe_blocks(self, engine: Engine) -> None:
        collector = engine.collector
        total, size = collector.total_blocks, collector.block_size

        def counts() -> Any:
            return collector.counts

        self._gauge(
            "kv_cache_usage_perc",
            "Share of KV blocks in use by sequences, 1 is all",
            lambda: counts().used / total,
        )
        blocks = Gauge("jpaged:kv_blocks", "KV blocks by state", [*self.labels, "state"], registry=self.registry)
        states: dict[str, Callable[[], float]] = {
            "free": lambda: counts().free,
            "private": lambda: counts().used - counts().shared,
            "shared": lambda: counts().shared,
            "cached": lambda: counts().cached,
        }
        for state, read in states.items():
            blocks.labels(**self.labels, state=state).set_function(read)
        self._gauge("kv_blocks_pinned", "Cached blocks that users keep", lambda: engine.scheduler.index.num_pinned)
        self._gauge("kv_tokens", "Tokens in used blocks, those of a shared block once", lambda: counts().tokens)
        self._gauge(
            "kv_fragmentation",
            "Share of the slots of used blocks that hold no token",
            lambda: 1 - counts().tokens / (counts().used * size) if counts().used else 0.0,
        )
        self._gauge(
            "kv_sharing_saving",
            "Blocks that sharing saves over those that would be used without it",
            lambda: 1 - counts().used / counts().entries if counts().entries else 0.0,
        )

    def _counter(self, name: str, text: str) -> Any:
        return Counter(f"jpaged:{name}", text, list(self.labels), registry=self.registry).labels(**self.labels)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        gauge = Gauge(f"jpaged:{name}", text, list(self.labels), registry=self.registry)
        gauge.labels(**self.labels).set_function(read)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Any:
        names = list(self.labels)
        return Histogram(f"jpaged:{name}", text, names, registry=self.registry, buckets=buckets).labels(**self.labels)

    # ------------------------------------------------------------------ what happens

    def on_step(self, engine: Engine, touched: list[Request]) -> None:
        scheduler, collector = engine.scheduler, engine.collector
        self._count_up(self.preemptions, "preemptions", scheduler.num_preemptions)
        self._count_up(self.queries, "queries", scheduler.prefix_queries)
        self._count_up(self.hits, "hits", scheduler.prefix_hits)
        self._count_up(self.evictions, "evictions", scheduler.index.evictions)
        swapping, size = scheduler.swapping, scheduler.store.block_bytes
        self._count_up(self.restored, "restored", swapping.cache_hits * engine.config.block_size)
        self._count_up(self.swapped_out, "saved", swapping.saved * size)
        self._count_up(self.swapped_in, "restored bytes", swapping.restored * size)
        computed = collector.prompt_tokens + collector.generation_tokens
        if computed > self.last.get("computed", 0):
            self.iteration_tokens.observe(computed - self.last.get("computed", 0))
            self.last["computed"] = computed
        now = time.perf_counter()
        if self.last_step is not None:
            self.step_time.observe(now - self.last_step)
        self.last_step = now if engine.has_unfinished() else None
        for request in touched:
            self._count_tokens(request)
            if request.finished:
                self._count_end(request)

    def on_abort(self, request: Request) -> None:
        for each in request.group:
            if each.finish_reason == "abort":
                self._count_end(each)
            self.progress.pop(each, None)

    def _count_up(self, counter: Any, name: str, value: int) -> None:
        counter.inc(value - self.last.get(name, 0))
        self.last[name] = value

    def _count_tokens(self, request: Request) -> None:
        if request.first_token_time is None or request.last_token_time is None:
            return
        seen = self.progress.get(request)
        tokens = len(request.output_token_ids)
        if seen is None:
            seen = self.progress[request] = Progress()
            if request.index == 0:
                self.prompt_tokens.inc(len(request.prompt_token_ids))
            waited = request.first_token_time - request.arrival_time
            self.first_token.observe(waited)
            self.first_token_sum += waited
            self.first_token_count += 1
        elif tokens > seen.tokens:
            new = tokens - seen.tokens
            self.between_tokens_sum += request.last_token_time - seen.time
            self.between_tokens_count += new
            for _ in range(new):  # tokens that come together took their shares of the time
                self.between_tokens.observe((request.last_token_time - seen.time) / new)
        # A stop string may have taken tokens off again that were counted.
        self.generation_tokens.inc(max(tokens - seen.tokens, 0))
        seen.tokens, seen.time = tokens, request.last_token_time

    def _count_end(self, request: Request) -> None:
        self.progress.pop(request, None)
        self.success.labels(**self.labels, finished_reason=request.finish_reason).inc()
        tokens = len(request.output_token_ids)
        self.request_generation.observe(tokens)
        if request.index == 0:
            self.request_prompt.observe(len(request.prompt_token_ids))
            self.asked_outputs.observe(len(request.group))
            self.asked_tokens.observe(request.max_tokens)
        arrival, scheduled = request.arrival_time, request.first_scheduled_time
        first, last = request.first_token_time, request.last_token_time
        if request.finished_time is not None:
            self.whole.observe(request.finished_time - arrival)
        if scheduled is not None:
            self.queued.observe(scheduled - arrival)
        if scheduled is not None and first is not None and last is not None:
            self.prefilling.observe(first - scheduled)
            self.decoding.observe(last - first)
            self.inference.observe(last - scheduled)
            if tokens > 1:
                self.per_output_token.observe((last - first) / (tokens - 1))

    def show(self) -> Response:
        """Everything, in Prometheus' text format."""
        return Response(generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


class CountAnswers:
    """Middleware: counts answers by status. Methods and paths are known ones, so that nobody can make up series."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self.app = app
        self.metrics = metrics
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path = scope["path"] if scope["path"] in self.paths else "other"
        method = scope["method"] if scope["method"] in METHODS else "other"

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.http_requests.labels(method, path, str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, send_counted)
