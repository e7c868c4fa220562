"""Errors as OpenAI's API shows them: {"error": {"message", "type", "param", "code"}} with the right status."""

from __future__ import annotations

import logging
from typing import Any

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jpaged.async_engine import DuplicateRequest, EngineDead, QueueFull, ShuttingDown

log = logging.getLogger(__name__)

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
SHUTDOWN_RETRY_AFTER = 5  # seconds in which another server may have taken over
MAX_SHOWN = 200  # characters of a bad value that a message repeats


class ApiError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code or self.status}}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def response(self) -> Response:
        return JSONResponse(self.body(), self.status, self.headers())


class Disconnected(Exception):
    """The client has gone away: nobody is there to be answered."""


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error; one that is not his is logged."""
    match error:
        case ApiError():
            return error
        case pydantic.ValidationError():
            return _from_validation(error)
        case HTTPException():
            return ApiError(str(error.detail), error.status_code)
        case DuplicateRequest():
            return ApiError(str(error), 409, param="request_id")
        case ValueError():
            return ApiError(str(error), param=_named_parameter(str(error)))
        case QueueFull():
            return ApiError(str(error), 429, retry_after=error.retry_after)
        case ShuttingDown():
            return ApiError(str(error), 503, retry_after=SHUTDOWN_RETRY_AFTER)
        case EngineDead():
            return ApiError(str(error), 503)
    log.error("a request failed", exc_info=error)
    return ApiError(f"the server failed: {type(error).__name__}", 500)


async def handle_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler."""
    if isinstance(error, Disconnected):
        return Response(status_code=499)  # as nginx counts them in its log
    found = as_api_error(error)
    response = found.response()
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


def _named_parameter(message: str) -> str | None:
    """Messages of bad parameters begin with the parameter's name."""
    first = message.split(" ", 1)[0].split("[", 1)[0].rstrip(":")
    return first if first.islower() and ("_" in first or first in ("n", "stop", "seed", "temperature")) else None


def _from_validation(error: pydantic.ValidationError) -> ApiError:
    """The first thing wrong with a body, and where."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    places = [str(place) for place in first["loc"]]
    shown = "" if first["type"] == "missing" else f", got {_shorten(repr(first['input']))}"
    where = ".".join(places)
    return ApiError((f"{where}: " if where else "") + first["msg"].removeprefix("Value error, ") + shown, param=where)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"
