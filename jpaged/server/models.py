"""/v1/models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jpaged.server.service import Service


async def list_models(service: Service, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_describe(service, name) for name in _names(service)]})


async def get_model(service: Service, request: Request) -> Response:
    name = request.path_params["model"]
    service.check_model(name)
    return JSONResponse(_describe(service, name))


def _names(service: Service) -> tuple[str, ...]:
    return service.settings.served_model_names


def _describe(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jpaged",
        "root": service.model,
        "parent": None,
        "max_model_len": service.max_model_len,
        "vocab_size": service.engine.engine.model.vocab_size,
    }
