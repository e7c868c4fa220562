"""What operators and probes ask: /health, /version, /metrics, /reset_prefix_cache."""

from __future__ import annotations

import importlib.metadata

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jpaged.server.errors import SHUTDOWN_RETRY_AFTER, ApiError
from jpaged.server.service import Service


async def health(service: Service, request: Request) -> Response:
    """200 while requests are served; 503 with the reason once a step has failed, or while the server stops."""
    if service.engine.error is not None:
        raise ApiError(service.engine.error, 503)
    if service.engine.closing:
        raise ApiError("the server is shutting down", 503, retry_after=SHUTDOWN_RETRY_AFTER)
    return JSONResponse({"status": "ok"})


async def version(service: Service, request: Request) -> Response:
    return JSONResponse({"version": importlib.metadata.version("jpaged")})


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """Forget every cached block. `complete` is false if running sequences still use some, which go with them."""
    complete = await service.engine.call(lambda engine: engine.reset_prefix_cache())
    return JSONResponse({"complete": complete})


async def metrics(service: Service, request: Request) -> Response:
    return service.metrics.show()
