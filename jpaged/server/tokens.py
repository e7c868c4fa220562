"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jpaged.server.chat import render_chat
from jpaged.server.protocol_tokens import DetokenizeBody, TokenizeBody
from jpaged.server.service import Service, read_body


async def tokenize(service: Service, request: Request) -> Response:
    body = await read_body(request, TokenizeBody)
    service.check_model(body.model)
    special = body.add_special_tokens
    if body.prompt is not None:
        ids = await service.encode(body.prompt, add_special_tokens=special is not False)
    else:
        ids = await service.encode(await render_chat(service, body), add_special_tokens=bool(special))
    strings = [service.tokenizer.backend.id_to_token(token) for token in ids] if body.return_token_strs else None
    return JSONResponse(
        {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": strings}
    )


async def detokenize(service: Service, request: Request) -> Response:
    body = await read_body(request, DetokenizeBody)
    service.check_model(body.model)
    service.check_ids(body.tokens, "tokens")
    tokenizer = service.tokenizer
    text = await service.work(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return JSONResponse({"prompt": text})
