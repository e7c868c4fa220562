"""`jpaged serve MODEL`: an HTTP server with OpenAI's API. Options are named as in vLLM where they mean the same."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

from jpaged.cli_options import ENGINE, add_engine_arguments, pick
from jpaged.embedding import POOLINGS

EXTRA = 'pip install "jpaged[server]"'
SETTINGS = (
    "max_request_bytes",
    "max_queue_len",
    "stream_interval",
    "write_timeout",
    "shutdown_timeout",
    "trust_request_chat_template",
    "allow_credentials",
    "embeddings",
)
LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")


def add_serve(commands: argparse._SubParsersAction) -> None:
    serve = commands.add_parser(
        "serve",
        help="answer HTTP requests as OpenAI's API does",
        description="Load a model and answer HTTP requests as OpenAI's API does, until SIGINT or SIGTERM.",
        argument_default=argparse.SUPPRESS,
    )
    serve.set_defaults(run=run_serve)
    add_serve_arguments(serve)


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder or hub id, or a .gguf file")
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: all (default: 127.0.0.1, this machine)")
    add("--port", type=int, default=8000, help="0: any free one (default: 8000)")
    add("--served-model-name", nargs="+", metavar="NAME", help="names clients may use (default: MODEL)")
    add("--api-key", nargs="+", metavar="KEY", help="clients must send one of these (default: anybody may)")
    add("--max-queue-len", type=int, metavar="N", help="outputs that may wait; more get status 429 (default: 1024)")
    add("--stream-interval", type=int, metavar="N", help="tokens sent at once; more cost less to send (default: 1)")
    add("--max-request-bytes", type=int, metavar="N", help="largest body (default: 16 MiB)")
    add(
        "--write-timeout", type=float, metavar="S", help="give up a client that takes nothing for so long (default: 60)"
    )
    add("--shutdown-timeout", type=float, metavar="S", help="time for requests under way at the end (default: 20)")
    add("--allowed-origins", type=json.loads, metavar="JSON", help='web pages that may ask, as ["*"] (default: none)')
    add("--allowed-methods", type=json.loads, metavar="JSON", help='their methods (default: ["*"])')
    add("--allowed-headers", type=json.loads, metavar="JSON", help='their headers (default: ["*"])')
    add("--allow-credentials", action="store_true", help="let them send credentials")
    add("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate ...")
    add("--ssl-keyfile", metavar="FILE", help="... and this key")
    add("--uvicorn-log-level", choices=["critical", "error", "warning", "info", "debug"], default="info")
    add("--disable-uvicorn-access-log", action="store_true", help="no line for each request")
    add("--embeddings", choices=POOLINGS, help="serve /v1/embeddings, pooled so (default: it is not served)")
    add = parser.add_argument_group("chat").add_argument
    add("--chat-template", metavar="FILE", help="a Jinja file, or the template itself (default: the checkpoint's)")
    add("--trust-request-chat-template", action="store_true", help="let clients bring a template")
    add(
        "--tool-call-parser",
        metavar="NAME",
        help="how the model writes tool calls: hermes, llama3_json, mistral (default: as its chat template shows)",
    )
    add_engine_arguments(parser.add_argument_group("engine"))


def run_serve(options: argparse.Namespace) -> None:
    given = vars(options)
    gc.disable()  # until the server has started: what loading and tracing make stays, looking it through takes a second
    # Imported here: the server's packages are an extra, and no other command should wait for them.
    try:
        from jpaged.server.serving import Listener, open_socket, serve
        from jpaged.server.settings import ServerSettings
    except ImportError as error:
        raise ValueError(f"the server needs packages that are an extra: {EXTRA} ({error})") from error
    from jpaged.llm import LLM

    lists: dict[str, Any] = {name: read_list(name, given[name]) for name in LISTS if name in given}
    settings = ServerSettings(
        served_model_names=tuple(given.get("served_model_name", [str(options.model)])),
        api_keys=frozenset(given.get("api_key", [])),
        tool_call_parser=given.get("tool_call_parser"),
        chat_template=read_template(given.get("chat_template")),
        **pick(given, SETTINGS),
        **lists,
    )
    bound = open_socket(options.host, options.port)
    with bound:
        host, port = bound.getsockname()[:2]
        print(f"Loading {options.model} ...", file=sys.stderr, flush=True)
        llm = LLM(options.model, progress=sys.stderr.isatty(), **pick(given, ENGINE))
        scheme = "https" if "ssl_certfile" in given else "http"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

        def tell() -> None:
            gc.enable()
            print(f"Serving {settings.served_model_names[0]} at {address} (API at {address}/v1)", flush=True)

        listener = Listener(
            bound,
            access_log="disable_uvicorn_access_log" not in given,
            log_level=options.uvicorn_log_level,
            ssl_certfile=given.get("ssl_certfile"),
            ssl_keyfile=given.get("ssl_keyfile"),
        )
        serve(llm, settings, listener, on_ready=tell)


def read_template(given: str | None) -> str | None:
    """A template's source, from a file unless it has Jinja's braces in it (as vLLM reads the option)."""
    if given is None or any(mark in given for mark in ("{{", "{%", "{#")):
        return given
    return Path(given).read_text(encoding="utf-8")


def read_list(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"--{name.replace('_', '-')} must be a JSON list of texts, got {json.dumps(value)}")
    return tuple(value)
