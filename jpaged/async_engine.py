"""An engine in a thread of its own, for requests that come and go in an asyncio event loop.

The thread owns the engine and with it the device. It takes orders from an inbox between steps (a request, an abort,
a question), and hands over what a step yields with one call into the loop:

    engine = AsyncEngine(llm.engine)
    engine.start()
    async with engine.submit("a", [1, 2, 3], SamplingParams(output_kind=RequestOutputKind.DELTA)) as outputs:
        async for output in outputs: ...
    await engine.shutdown(timeout=10)

Leaving the block ends the request wherever it is: its blocks go back with the next step. A request that is refused or
fails raises in its own block. If a step fails, the engine is `dead`: every block raises `EngineDead`, and so does
whoever comes later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, TypeVar

from jpaged.beam_search import BeamSearchParams
from jpaged.completion import OutputStream
from jpaged.engine import Engine
from jpaged.output_queue import OutputQueue
from jpaged.outputs import RequestOutput
from jpaged.request import Request
from jpaged.sampling_params import RequestOutputKind, SamplingParams

log = logging.getLogger(__name__)
T = TypeVar("T")
GRAMMAR_POLL = 0.005  # seconds between looks at a grammar that is being compiled, while nothing else is to be done
RECENT = 64  # finished requests from which the wait of a full queue is estimated
MAX_RETRY_AFTER = 60  # seconds


class EngineDead(RuntimeError):
    """A step of the engine failed; nothing more can be computed."""


class ShuttingDown(RuntimeError):
    """The server is about to end and takes no more requests, or ends one that runs."""


class QueueFull(RuntimeError):
    """More requests wait than may; `retry_after` is an estimate in seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DuplicateRequest(ValueError):
    """A live request has this id."""


class Observer(Protocol):
    """Who is told what the engine does, in its thread."""

    def on_step(self, engine: Engine, touched: list[Request]) -> None:
        """A step was read: these requests got tokens or ended (those with a `finish_reason`)."""

    def on_abort(self, request: Request) -> None:
        """A request was ended by its client."""


class Ticket(OutputQueue):
    """A request on its way: what the loop knows of it (the queue) and what the thread does (how it is shown)."""

    def __init__(self, request_id: str, kind: RequestOutputKind, outputs: int, shown: OutputStream) -> None:
        super().__init__(kind)
        self.request_id = request_id
        self.outputs = outputs  # how many it asks for
        self.shown = shown
        self.arrival = time.perf_counter()


class AsyncEngine:
    """Made, started and used in one event loop.

    max_queue_len     outputs that may wait beyond the `max_num_seqs` that run; more are refused with QueueFull
    stream_interval   tokens that an output must have got before its client is told; the first and the last at once
    """

    def __init__(
        self, engine: Engine, *, max_queue_len: int = 1024, stream_interval: int = 1, observer: Observer | None = None
    ) -> None:
        if max_queue_len < 0:
            raise ValueError(f"max_queue_len must be at least 0, got {max_queue_len}")
        if stream_interval < 1:
            raise ValueError(f"stream_interval must be at least 1, got {stream_interval}")
        self.engine = engine
        self.limit = engine.config.max_num_seqs + max_queue_len
        self.stream_interval = stream_interval
        self.observer = observer
        self.error: str | None = None  # why the engine is dead
        self.closing = False
        self.live: dict[str, Ticket] = {}  # the loop's: requests whose block has not been left
        self.calls: set[asyncio.Future] = set()
        self.finish_times: deque[float] = deque(maxlen=RECENT)
        self.left = asyncio.Event()  # set each time a block is left
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, Ticket] = {}  # the thread's: requests that have not finished
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # ------------------------------------------------------------------ in the event loop

    def start(self) -> None:
        """Start the thread; results go to the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @contextlib.asynccontextmanager
    async def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        prompt: str | None = None,
        cache_salt: str | None = None,
        priority: int | None = None,
        tenant: str | None = None,
    ) -> AsyncIterator[AsyncIterator[RequestOutput]]:
        """Queue a prompt; an iterator of its outputs, in the form `params.output_kind` asks for. Of a search with beams
        there is one, at the end: its sequences, best first.

        Raises EngineDead, ShuttingDown, QueueFull or DuplicateRequest at once. ValueError for a prompt that cannot be
        served comes from the iterator, where the other errors may come too.
        """
        if isinstance(params, BeamSearchParams):
            sampling, beams, outputs, kind = None, params, params.beam_width, RequestOutputKind.FINAL_ONLY
        else:
            sampling, beams, outputs, kind = params, None, params.n, params.output_kind
        self._check_open(request_id, outputs)
        ticket = Ticket(request_id, kind, outputs, OutputStream(self.engine.tokenizer, self.stream_interval))

        def add() -> None:
            request = self.engine.add_request(
                request_id,
                prompt_token_ids,
                sampling,
                prompt=prompt,
                cache_salt=cache_salt,
                priority=priority,
                tenant=tenant,
                beams=beams,
            )
            for each in request.group:
                each.arrival_time = ticket.arrival  # the time in the inbox counts
            self._running[request_id] = ticket

        self.live[request_id] = ticket
        try:
            self._inbox.put(lambda: self._guard(ticket, add))
            yield ticket
        finally:
            del self.live[request_id]
            if ticket.finished:
                self.finish_times.append(time.monotonic())
            else:
                self._inbox.put(lambda: self._abort(ticket))
            self.left.set()

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function of the engine in its thread, between two steps. What it raises is raised here."""
        if self.error is not None:
            raise EngineDead(self.error)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.calls.add(future)
        future.add_done_callback(self.calls.discard)

        def run() -> None:
            try:
                result = function(self.engine)
            except Exception as error:
                self._post(_settle, future, None, error)
            else:
                self._post(_settle, future, result, None)

        self._inbox.put(run)
        return await future

    async def shutdown(self, timeout: float) -> None:
        """Take no more requests, wait `timeout` seconds for those under way, end the rest, stop the thread."""
        self.closing = True
        deadline = time.monotonic() + timeout
        while self.live and self.error is None and time.monotonic() < deadline:
            self.left.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.left.wait(), deadline - time.monotonic())
        for ticket in self.live.values():
            ticket.fail(ShuttingDown("the server is shutting down"))

        def stop() -> None:
            for ticket in list(self._running.values()):
                self._abort(ticket)
            self._stopping = True

        self._inbox.put(stop)
        await asyncio.to_thread(self._thread.join, 30.0)

    @property
    def num_live(self) -> int:
        """Outputs that run or wait."""
        return sum(ticket.outputs for ticket in self.live.values())

    def _check_open(self, request_id: str, outputs: int) -> None:
        if self.error is not None:
            raise EngineDead(self.error)
        if self.closing:
            raise ShuttingDown("the server is shutting down")
        if request_id in self.live:
            raise DuplicateRequest(f"request id {request_id!r} is in use by a request that has not finished")
        if self.num_live + outputs > self.limit:
            raise QueueFull(
                f"{self.num_live} outputs are being computed or wait, and at most {self.limit} may: try again later",
                self._estimate_wait(),
            )

    def _estimate_wait(self) -> int:
        """Seconds until a place is free, from how fast the last requests finished."""
        if len(self.finish_times) < 2:
            return 1
        each = (self.finish_times[-1] - self.finish_times[0]) / (len(self.finish_times) - 1)
        return int(min(max(each, 1.0), MAX_RETRY_AFTER))

    def _fail_all(self) -> None:
        assert self.error is not None
        for ticket in self.live.values():
            ticket.fail(EngineDead(self.error))
        for future in list(self.calls):
            _settle(future, None, EngineDead(self.error))
        self.left.set()

    # ------------------------------------------------------------------ in the engine's thread

    def _run(self) -> None:
        engine = self.engine
        try:
            while True:
                busy = engine.has_unfinished()
                if self._stopping and not busy:
                    return
                if engine.waits_for_grammar:
                    self._take_orders(GRAMMAR_POLL)
                else:
                    self._take_orders(0.0 if busy else None)
                if engine.has_unfinished() and not engine.waits_for_grammar:
                    self._deliver(engine.step())
        except BaseException as error:
            log.exception("the engine failed")
            self.error = f"the engine failed: {type(error).__name__}: {error}"
            self._post(self._fail_all)

    def _take_orders(self, wait: float | None) -> None:
        """Carry out what is in the inbox; if it is empty, wait so many seconds for something (None: for ever)."""
        try:
            order = self._inbox.get(block=wait != 0.0, timeout=wait)
            while True:
                order()
                order = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _guard(self, ticket: Ticket, work: Callable[[], None]) -> None:
        """Let what fails for one request be the failure of that request alone."""
        try:
            work()
        except Exception as error:
            if not isinstance(error, ValueError):
                log.exception("request %s failed", ticket.request_id)
            self._abort(ticket)
            self._post(ticket.fail, error)

    def _abort(self, ticket: Ticket) -> None:
        """End a request in the engine; one that has finished, or failed before it came in, is left alone."""
        if self._running.get(ticket.request_id) is not ticket:
            return
        del self._running[ticket.request_id]
        request = self.engine.requests.get(ticket.request_id)
        self.engine.abort(ticket.request_id)
        if request is not None and self.observer is not None:
            self.observer.on_abort(request)

    def _deliver(self, touched: list[Request]) -> None:
        """Show a step's tokens to those who wait for them, all in one call into the loop."""
        outputs: dict[str, list[Request]] = {}
        for request in touched:
            outputs.setdefault(request.request_id, []).append(request)
        arrived: list[tuple[Ticket, RequestOutput]] = []

        def show(ticket: Ticket, requests: list[Request]) -> None:
            output = ticket.shown.next(requests)
            if output is not None:
                arrived.append((ticket, output))
                if output.finished:
                    self._running.pop(ticket.request_id, None)

        for request_id, requests in outputs.items():
            ticket = self._running.get(request_id)
            if ticket is not None:
                self._guard(ticket, lambda ticket=ticket, requests=requests: show(ticket, requests))  # type: ignore[misc]
        if arrived:
            self._post(_put_all, arrived)
        if self.observer is not None:
            self.observer.on_step(self.engine, touched)

    def _post(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function in the loop; if that has ended there is nobody left to tell."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _put_all(arrived: list[tuple[Ticket, RequestOutput]]) -> None:
    for ticket, output in arrived:
        ticket.put(output)


def _settle(future: asyncio.Future, result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
