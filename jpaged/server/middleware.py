"""What every request passes first: an id, a key, and a limit on the size of its body. Plain ASGI."""

from __future__ import annotations

import hmac
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged.server.errors import ApiError

MAX_ID_LENGTH = 128
# What a probe, a scraper or a browser must be able to get without a key; none of it tells of requests' contents.
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/dashboard"})
MAX_DISCARDED = 256 << 20  # bytes of a body that is too large which are still read, so that the client reads why
MAX_DISCARD_SECONDS = 20.0


class RequestIds:
    """Every answer carries X-Request-Id: the client's own, if it is one, else a new one (`scope["request_id"]`)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if re.fullmatch(rf"[\x21-\x7e]{{1,{MAX_ID_LENGTH}}}", given) else uuid.uuid4().hex
        scope["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class ApiKeys:
    """Refuse requests without one of the keys, as "Authorization: Bearer KEY"."""

    def __init__(self, app: ASGIApp, keys: frozenset[str]) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return await self.app(scope, receive, send)
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # All keys are compared in full: how long it takes tells nothing of them.
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self.keys]
        if scheme.lower() != "bearer" or not any(matches):
            error = ApiError("a valid API key is needed: Authorization: Bearer KEY", 401, code="invalid_api_key")
            return await error.response()(scope, receive, send)
        await self.app(scope, receive, send)


class BodyLimit:
    """Refuse bodies of more than `limit` bytes with 413, without keeping them."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("content-length", "0")
        if given.isdecimal() and int(given) > self.limit:
            return await self._refuse(scope, receive, send)
        body, more = [], True
        size = 0
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message.get("body", b""))
            if size > self.limit:
                return await self._refuse(scope, receive, send)
            body.append(message.get("body", b""))
            more = message.get("more_body", False)
        whole: list[Message] = [{"type": "http.request", "body": b"".join(body), "more_body": False}]

        async def receive_whole() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, receive_whole, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        left, until = MAX_DISCARDED, time.monotonic() + MAX_DISCARD_SECONDS
        while left > 0 and time.monotonic() < until:
            message = await receive()
            left -= len(message.get("body", b""))
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                break
        error = ApiError(f"the body is larger than {self.limit} bytes, the most this server takes", 413)
        response = error.response()
        response.headers["Connection"] = "close"
        await response(scope, receive, send)
