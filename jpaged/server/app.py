"""The web application: routes and what every request passes."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jpaged.server import admin, chat, completions, dashboard, embeddings, models, tokens
from jpaged.server.errors import handle_error
from jpaged.server.metrics import CountAnswers
from jpaged.server.middleware import ApiKeys, BodyLimit, RequestIds
from jpaged.server.openapi import describe_api
from jpaged.server.service import Service

Endpoint = Callable[[Service, Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/completions", completions.create_completion),
    ("POST", "/v1/chat/completions", chat.create_chat_completion),
    ("POST", "/v1/embeddings", embeddings.create_embeddings),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{model:path}", models.get_model),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("GET", "/health", admin.health),
    ("GET", "/ping", admin.health),
    ("GET", "/version", admin.version),
    ("POST", "/reset_prefix_cache", admin.reset_prefix_cache),
    ("GET", "/metrics", admin.metrics),
    ("GET", "/dashboard", dashboard.show_page),
    ("GET", "/dashboard/events", dashboard.send_events),
)


def make_app(service: Service) -> Starlette:
    """The application of one engine, which is started and ended by whoever runs it (see serving.py)."""
    settings = service.settings

    def route(method: str, path: str, endpoint: Endpoint) -> Route:
        return Route(path, functools.partial(_answer, endpoint, service), methods=[method])

    paths = frozenset(path for _, path, _ in ROUTES)
    middleware = [Middleware(CountAnswers, metrics=service.metrics, paths=paths), Middleware(RequestIds)]
    if settings.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=settings.allowed_methods,
                allow_headers=settings.allowed_headers,
                allow_credentials=settings.allow_credentials,
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        )
    if settings.api_keys:
        middleware.append(Middleware(ApiKeys, keys=settings.api_keys))
    middleware.append(Middleware(BodyLimit, limit=settings.max_request_bytes))
    document = describe_api([(method, path) for method, path, _ in ROUTES])

    async def show_document(service: Service, request: Request) -> Response:
        return JSONResponse(document)

    return Starlette(
        routes=[*(route(*each) for each in ROUTES), route("GET", "/openapi.json", show_document)],
        middleware=middleware,
        exception_handlers={HTTPException: handle_error},
    )


async def _answer(endpoint: Endpoint, service: Service, request: Request) -> Response:
    try:
        return await endpoint(service, request)
    except Exception as error:
        return await handle_error(request, error)
