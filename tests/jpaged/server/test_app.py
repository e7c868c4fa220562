"""The application without a model or a socket: keys, origins, sizes, dead engines, clients that do not read."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace

import httpx
import pytest
from starlette.responses import JSONResponse
from tiny import tiny_config, tiny_model

from jpaged import Engine, SamplingParams
from jpaged.async_engine import AsyncEngine
from jpaged.prefix_index import NamedBlock
from jpaged.server.app import make_app
from jpaged.server.block_times import BlockTimes
from jpaged.server.errors import ApiError, Disconnected, as_api_error
from jpaged.server.event_stream import EventStream, until_disconnect
from jpaged.server.metrics import Metrics
from jpaged.server.middleware import BodyLimit
from jpaged.server.service import Service
from jpaged.server.settings import ServerSettings


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Nothing is run on it."""
    return Engine(tiny_model(), tiny_config())


def ask(engine: Engine, settings: dict, *requests: tuple, error: str | None = None) -> list[httpx.Response]:
    """Answers to (method, path, options) of an application whose engine's thread is not started."""

    async def main() -> list[httpx.Response]:
        made = AsyncEngine(engine)
        made.error = error
        service = Service(made, ServerSettings(("m",), **settings), Metrics(engine, "m"), SamplingParams())
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.request(method, path, **options) for method, path, options in requests]

    return asyncio.run(main())


def test_keys(engine):
    def get(path: str, given: str | None = None) -> tuple:
        return "GET", path, {"headers": {"Authorization": given} if given else {}}

    answers = ask(
        engine,
        {"api_keys": frozenset({"one", "two"})},
        get("/v1/models"),
        get("/v1/models", "Bearer three"),
        get("/v1/models", "Basic one"),
        get("/v1/models", "Bearer two"),
        get("/v1/models", "bearer one"),
        get("/health"),
        get("/metrics"),
        get("/version"),
        ("POST", "/reset_prefix_cache", {}),
    )
    assert [answer.status_code for answer in answers] == [401, 401, 401, 200, 200, 200, 200, 200, 401]
    assert answers[0].headers["www-authenticate"] == "Bearer"
    assert answers[0].json()["error"]["code"] == "invalid_api_key" and "x-request-id" in answers[0].headers


def test_origins(engine):
    origin = {"headers": {"Origin": "https://page.example"}}
    preflight = {"headers": {**origin["headers"], "Access-Control-Request-Method": "POST"}}
    settings = {"allowed_origins": ("https://page.example",), "api_keys": frozenset({"k"})}
    asked, before = ask(engine, settings, ("GET", "/health", origin), ("OPTIONS", "/v1/completions", preflight))
    for answer in (asked, before):
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
    (closed,) = ask(engine, {}, ("GET", "/health", origin))
    assert "access-control-allow-origin" not in closed.headers


def test_embeddings_are_asked_for_at_start(engine):
    (answer,) = ask(engine, {}, ("POST", "/v1/embeddings", {"json": {"input": [5]}}))
    assert answer.status_code == 404 and "--embeddings mean, or last" in answer.json()["error"]["message"]


def test_a_dead_engine(engine):
    completion = ("POST", "/v1/completions", {"json": {"prompt": [5]}})
    health, answer, models = ask(
        engine, {}, ("GET", "/health", {}), completion, ("GET", "/v1/models", {}), error="the engine failed: X"
    )
    for each in (health, answer):
        assert each.status_code == 503 and each.json()["error"]["message"] == "the engine failed: X"
        assert each.json()["error"]["type"] == "service_unavailable_error"
    assert models.status_code == 200


def test_without_a_tokenizer(engine):
    text, chat = ask(
        engine,
        {},
        ("POST", "/v1/completions", {"json": {"prompt": "hello"}}),
        ("POST", "/v1/chat/completions", {"json": {"messages": [{"role": "user", "content": "hi"}]}}),
    )
    for each in (text, chat):
        assert each.status_code == 400 and "came without a tokenizer" in each.json()["error"]["message"]


def test_auto_tool_choice_without_a_known_format(engine):
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    (answer,) = ask(engine, {}, ("POST", "/v1/chat/completions", {"json": body}))
    assert answer.status_code == 400 and "--tool-call-parser (hermes, llama3_json, mistral)" in answer.text


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"api_keys": frozenset({""})}, "api_keys must not hold an empty key"),
        ({"max_request_bytes": 0}, "max_request_bytes must be above 0, got 0"),
        ({"shutdown_timeout": -1}, "shutdown_timeout must be at least 0, got -1"),
        ({"tool_call_parser": "x"}, "tool_call_parser must be one of hermes, llama3_json, mistral, got 'x'"),
        ({"served_model_names": ()}, "served_model_names must hold at least one name"),
    ],
)
def test_bad_settings(settings, says):
    with pytest.raises(ValueError, match=says):
        ServerSettings(**{"served_model_names": ("m",), **settings})


def test_what_is_nobodys_fault_is_told_without_details(caplog):
    error = as_api_error(KeyError("secret"))
    assert error.status == 500 and "secret" not in str(error) and "secret" in caplog.text
    assert as_api_error(ApiError("x", 418)).status == 418


def test_a_body_is_not_kept_beyond_the_limit():
    kept = []

    async def app(scope, receive, send):
        kept.append((await receive())["body"])
        await JSONResponse({})(scope, receive, send)

    async def body(count: int):
        for _ in range(count):
            yield b"x" * 100

    async def main():
        transport = httpx.ASGITransport(BodyLimit(app, limit=250))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            small = await client.post("/", content=body(2))
            large = await client.post("/", content=body(50))
            told = await client.post("/", content=b"x" * 251)
        return [small.status_code, large.status_code, told.status_code]

    assert asyncio.run(main()) == [200, 413, 413] and kept == [b"x" * 200]


@pytest.mark.parametrize("taken", [1, 4])  # messages: the head, then events
def test_a_client_that_takes_nothing_is_given_up(taken):
    closed = []

    async def events():
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            closed.append(True)

    async def main():
        sent = []

        async def receive():
            await asyncio.Event().wait()

        async def send(message):
            sent.append(message)
            if len(sent) > taken:
                await asyncio.Event().wait()  # nothing is read any more

        await EventStream(b"data: first\n\n", events(), write_timeout=0.05)({"type": "http"}, receive, send)
        return sent

    sent = asyncio.run(asyncio.wait_for(main(), 30))
    assert closed == [True] * (taken > 1), "a generator that has begun is closed"
    assert len(sent) == taken + 1


def test_errors_after_the_first_event_are_events():
    async def events():
        yield b"data: 1\n\n"
        raise ApiError("it went wrong", 503)

    async def main():
        sent = []

        async def receive():
            await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        await EventStream(b"data: 0\n\n", events(), write_timeout=5)({"type": "http"}, receive, send)
        return b"".join(message.get("body", b"") for message in sent), sent[-1]["more_body"]

    body, more = asyncio.run(main())
    assert b'"message":"it went wrong"' in body and body.endswith(b"data: [DONE]\n\n") and not more


def test_work_ends_with_its_client():
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def receive():
        return {"type": "http.disconnect"}

    with pytest.raises(Disconnected):
        asyncio.run(until_disconnect(receive, work()))
    assert ended == [True]


def test_block_times():
    """Cached at 10, used again at 14, idle from 20, evicted at 25."""
    told: dict[str, list[float]] = {"life": [], "idle": [], "reuse": []}
    clock = SimpleNamespace(now=10.0)
    block = NamedBlock(3, b"k", None)
    inner: list = []

    class Policy:
        add = staticmethod(inner.append)
        remove = staticmethod(inner.remove)

        @staticmethod
        def pick():
            return inner[0]

    seen = {f"on_{name}": SimpleNamespace(observe=values.append) for name, values in told.items()}
    times = BlockTimes(Policy(), **seen, clock=lambda: clock.now)
    times.add(block)
    clock.now = 14.0
    times.remove(block)
    clock.now = 20.0
    times.add(block)
    clock.now = 25.0
    assert times.pick() is block
    times.remove(block)
    assert told == {"life": [15.0], "idle": [5.0], "reuse": [4.0]} and not inner


def test_the_grafana_dashboard_asks_for_metrics_that_there_are(engine, root):
    (answer,) = ask(engine, {}, ("GET", "/metrics", {}))
    known = set(re.findall(r"^# TYPE (\S+) (?:gauge|counter|histogram)", answer.text, flags=re.M))
    dashboard = json.loads((root / "docs/grafana/jpaged.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(r"jpaged:\w+", expression)}
    assert len(asked) > 20
    assert {
        name for name in asked if name not in known and re.sub(r"_(bucket|sum|count)$", "", name) not in known
    } == set()


def test_the_openapi_document(engine):
    (answer,) = ask(engine, {}, ("GET", "/openapi.json", {}))
    document = answer.json()
    paths = document["paths"]
    assert {path for path in paths if path.startswith("/v1/")} == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/models",
        "/v1/models/{model}",
    }
    assert set(paths["/v1/models/{model}"]) == {"get"} and set(paths["/v1/completions"]) == {"post"}
    references = set(re.findall(r'"#/components/schemas/(\w+)"', answer.text))
    assert references <= set(document["components"]["schemas"]) and {"CompletionBody", "ChatBody"} <= references
    chat = document["components"]["schemas"]["ChatBody"]
    assert "messages" in chat["required"] and {"top_k", "tools", "cache_salt"} <= set(chat["properties"])
