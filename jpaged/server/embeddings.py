"""/v1/embeddings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jpaged.embedding import Embedder
from jpaged.server.errors import ApiError
from jpaged.server.event_stream import until_disconnect
from jpaged.server.protocol_embeddings import EmbeddingBody
from jpaged.server.service import Service, read_body


async def create_embeddings(service: Service, request: Request) -> Response:
    body = await read_body(request, EmbeddingBody)
    service.check_model(body.model)
    embedder = service.embedder
    if embedder is None:
        raise ApiError("this server makes no embeddings: start it with --embeddings mean, or last", 404)
    if body.dimensions not in (None, embedder.size):
        raise ApiError(f"dimensions must be {embedder.size} or left out, got {body.dimensions}", param="dimensions")
    texts = [await _read(service, embedder, body, each) for each in body.inputs()]
    return JSONResponse(await until_disconnect(request.receive, _embed(service, embedder, body, texts)))


async def _read(service: Service, embedder: Embedder, body: EmbeddingBody, given: str | list[int]) -> list[int]:
    """The token ids of an input. Raises ApiError for one that is too long, or holds an unknown id."""
    ids = given
    if isinstance(ids, str):
        ids = await service.encode(ids, add_special_tokens=body.add_special_tokens)
    if keep := body.truncate_prompt_tokens:
        ids = ids[-(keep if keep > 0 else embedder.max_tokens) :]
    service.check_ids(ids, "input")
    if not 0 < len(ids) <= embedder.max_tokens:
        raise ApiError(
            f"an input has {len(ids)} tokens; allowed are 1 to {embedder.max_tokens}",
            param="input",
            code="context_length_exceeded",
        )
    return ids


async def _embed(service: Service, embedder: Embedder, body: EmbeddingBody, texts: list[list[int]]) -> dict[str, Any]:
    data = []
    for index, ids in enumerate(texts):  # one at a time: the engine's steps go on between them
        vector = await service.engine.call(lambda _, ids=ids: embedder.embed(ids))  # type: ignore[misc]
        shown: Any = vector.tolist()
        if body.encoding_format == "base64":
            shown = base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": shown})
    tokens = sum(map(len, texts))
    return {
        "object": "list",
        "data": data,
        "model": service.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
