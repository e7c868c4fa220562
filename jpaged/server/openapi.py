"""/openapi.json: what can be asked, for tools that read OpenAPI documents. Made from the bodies' own models."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pydantic
from pydantic.json_schema import models_json_schema

from jpaged.server.protocol_chat import ChatBody
from jpaged.server.protocol_completions import CompletionBody
from jpaged.server.protocol_embeddings import EmbeddingBody
from jpaged.server.protocol_tokens import DetokenizeBody, TokenizeBody

BODIES: dict[str, type[pydantic.BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/embeddings": EmbeddingBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
STREAMS = frozenset({"/v1/completions", "/v1/chat/completions"})
# What any route may answer besides 200; see errors.py.
FAILURES = {
    "400": "the request is not as it should be",
    "401": "a key is needed",
    "404": "there is no such thing here",
    "409": "a live request has this id",
    "413": "the body is too large",
    "429": "too many wait: see Retry-After",
    "500": "the server failed",
    "503": "the engine failed, or the server is shutting down",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer"]},
            },
        }
    },
}


def describe_api(routes: list[tuple[str, str]]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of routes (method, path)."""
    models = [(model, "validation") for model in BODIES.values()]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for method, path in routes:
        path = path.replace(":path}", "}")
        paths.setdefault(path, {})[method.lower()] = _describe_route(path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jpaged", "version": importlib.metadata.version("jpaged")},
        "paths": paths,
        "components": {
            "schemas": {**definitions["$defs"], "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _describe_route(path: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {}}
    if path in STREAMS | {"/dashboard/events"}:
        content["text/event-stream"] = {}
    failure = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses = {"200": {"description": "an answer", "content": content}}
    responses |= {status: {"description": text, "content": failure} for status, text in FAILURES.items()}
    if path == "/metrics":
        responses["200"]["content"] = {"text/plain": {}}
    if path == "/dashboard":
        responses["200"]["content"] = {"text/html": {}}
    route: dict[str, Any] = {"responses": responses}
    if path in BODIES:
        schema = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
        route["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{" in path:
        name = path[path.index("{") + 1 : path.index("}")]
        route["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return route
