"""Answers in pieces (server-sent events), and the end of work for clients that have gone away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jpaged.server.errors import Disconnected, as_api_error

log = logging.getLogger(__name__)
T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One event whose data is JSON."""
    return b"data: " + to_json(data) + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away first: then raises Disconnected.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Disconnected
    finally:
        for each in (task, gone):
            each.cancel()
        # What was cancelled has its own end to come to: only then are the blocks of its request on their way back.
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Events as they come. Errors after the first one are events too; the generator is closed whatever happens.

    A client that takes nothing for `write_timeout` seconds is given up.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], write_timeout: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.first = first
        self.events = events
        self.write_timeout = write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(Disconnected):
            await until_disconnect(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        limit = WriteLimit(self.write_timeout)
        try:
            async with contextlib.aclosing(self.events):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await limit.write(send, self.first)
                try:
                    async for data in self.events:
                        await limit.write(send, data)
                except Exception as error:
                    await limit.write(send, event(as_api_error(error).body()) + DONE)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not limit.exceeded:
                raise
            log.warning("a client that took nothing for %g s was given up", self.write_timeout)
            raise Disconnected from None
        finally:
            limit.close()


class WriteLimit:
    """Cancels the task that made it if one of its writes takes `seconds` or longer.

    One timer, which looks now and then whether a write is under way: a timer for each token of each stream is work.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.exceeded = False
        self.since: float | None = None  # when the write under way began
        self.loop = asyncio.get_running_loop()
        self.task = asyncio.current_task()
        self.timer = self.loop.call_later(seconds, self._look)

    async def write(self, send: Send, data: bytes) -> None:
        self.since = self.loop.time()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self.since = None

    def close(self) -> None:
        self.timer.cancel()

    def _look(self) -> None:
        left = self.seconds if self.since is None else self.since + self.seconds - self.loop.time()
        if left > 0:
            self.timer = self.loop.call_later(left, self._look)
            return
        self.exceeded = True
        assert self.task is not None
        self.task.cancel()


async def start_stream(request: Request, events: AsyncGenerator[bytes, None], write_timeout: float) -> Response:
    """An answer in pieces, once the first is there: what fails before it has a status of its own."""
    try:
        first = await until_disconnect(request.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, write_timeout)
