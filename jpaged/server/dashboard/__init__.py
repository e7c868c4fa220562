"""/dashboard: a page that shows the paging as it happens, without a build step or anything from elsewhere.

The page is `index.html`; it reads /dashboard/events, which tells it a few times a second how things stand. A look costs
a wait for the step under way, and all who watch share one look; while nobody watches nothing is read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.resources
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from jpaged.engine import Engine
from jpaged.page_map import take_page_map
from jpaged.server.event_stream import event, start_stream
from jpaged.server.metrics import Metrics
from jpaged.server.service import Service

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def describe(engine: Engine, metrics: Metrics) -> dict[str, Any]:
    """How things stand, as the page wants it; counters run since the start, and the page takes differences."""
    scheduler, collector = engine.scheduler, engine.collector
    found = take_page_map(engine)
    return {
        "time": time.time(),
        "block_size": collector.block_size,
        "max_num_seqs": engine.config.max_num_seqs,
        "blocks": found.states,
        "sequences": [dataclasses.asdict(each) for each in found.sequences],
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting) + len(engine.grammars.compiling),
        "preemptions": scheduler.num_preemptions,
        "prefix_queries": scheduler.prefix_queries,
        "prefix_hits": scheduler.prefix_hits,
        "evictions": scheduler.index.evictions,
        "tokens": collector.counts.tokens,
        "entries": collector.counts.entries,
        "prompt_tokens": collector.prompt_tokens,
        "generation_tokens": collector.generation_tokens,
        "finished": collector.finished,
        "first_token": [metrics.first_token_sum, metrics.first_token_count],
        "between_tokens": [metrics.between_tokens_sum, metrics.between_tokens_count],
    }


async def show_page(service: Service, request: Request) -> Response:
    page = importlib.resources.files(__package__).joinpath("index.html").read_text(encoding="utf-8")
    return HTMLResponse(page, headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"})


async def send_events(service: Service, request: Request) -> Response:
    return await start_stream(request, _look_on(service), service.settings.write_timeout)


async def _take(service: Service) -> bytes:
    found = await service.engine.call(lambda engine: describe(engine, service.metrics))
    return event({"model": service.model, **found})


async def _look_on(service: Service) -> AsyncGenerator[bytes, None]:
    while not service.stopping.is_set():
        yield await service.feed.next(lambda: _take(service))
        try:
            await asyncio.wait_for(service.stopping.wait(), service.feed.interval)
        except TimeoutError:
            continue
