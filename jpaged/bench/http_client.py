"""A client small enough not to be measured itself: HTTP/1.1 with server-sent events on asyncio's streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any
from urllib.parse import urlsplit


class HttpError(RuntimeError):
    """A server that answered with something else than success."""


class HttpClient:
    """Asks one server, with a connection for each request."""

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"a server's address begins with http:// or https://, got {base_url!r}")
        self.host, self.tls = parts.hostname, parts.scheme == "https"
        self.port = parts.port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/")
        self.api_key = api_key

    async def get_json(self, path: str) -> Any:
        return json.loads(await self.get(path))

    async def get(self, path: str) -> bytes:
        """What is at a path. Raises HttpError, or OSError if nobody answers."""
        async with contextlib.aclosing(self._exchange("GET", path, None)) as pieces:
            return b"".join([piece async for piece in pieces])

    async def stream(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """The data, as JSON, of the events that answer a POST. Raises HttpError, for an event of an error too."""
        rest = b""
        async with contextlib.aclosing(self._exchange("POST", path, json.dumps(body).encode())) as pieces:
            async for piece in pieces:
                *events, rest = (rest + piece).split(b"\n\n")
                for event in events:
                    data = event.removeprefix(b"data: ")
                    if data == b"[DONE]":
                        return
                    found = json.loads(data)
                    if "error" in found:
                        raise HttpError(found["error"].get("message", str(found["error"])))
                    yield found
        raise HttpError("the stream ended before its end")

    async def _exchange(self, method: str, path: str, body: bytes | None) -> AsyncGenerator[bytes, None]:
        """The body of the answer in pieces as they come."""
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.tls or None)
        try:
            head = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
            if self.api_key is not None:
                head.append(f"Authorization: Bearer {self.api_key}")
            if body is not None:
                head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
            writer.write("\r\n".join([*head, "", ""]).encode() + (body or b""))
            await writer.drain()
            status, headers = await _read_head(reader)
            pieces = _read_body(reader, headers)
            if status != 200:
                content = b"".join([piece async for piece in pieces])
                raise HttpError(f"{status}: {content.decode(errors='replace')[:500]}")
            async for piece in pieces:
                yield piece
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise HttpError(f"the connection broke: {error}") from error
        finally:
            writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.strip().lower(): value.strip() for name, value in pairs}


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        rest, ended = b"", False
        while not ended:
            more = await reader.read(1 << 16)
            if not more:
                raise asyncio.IncompleteReadError(rest, None)
            piece, rest, ended = split_chunks(rest + more)
            if piece:
                yield piece
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(1 << 16):
            yield piece


def split_chunks(data: bytes) -> tuple[bytes, bytes, bool]:
    """Of a chunked body (RFC 9112, 7.1): what its whole chunks hold, the bytes after them, whether the last was there.

    All that came at once is one piece, so that the small events of a stream are read with few waits.
    """
    held, at = [], 0
    while (line := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:line].split(b";")[0], 16)
        begin, end = line + 2, line + 2 + size
        if len(data) < end + 2:
            break
        held.append(data[begin:end])
        at = end + 2
        if size == 0:
            return b"".join(held), data[at:], True
    return b"".join(held), data[at:], False
