"""A server from its socket to its end: bind, load the model, answer, and stop within the time it is given."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from jpaged.async_engine import AsyncEngine
from jpaged.embedding import Embedder
from jpaged.llm import LLM
from jpaged.server.app import make_app
from jpaged.server.metrics import Metrics
from jpaged.server.service import Service
from jpaged.server.settings import ServerSettings

LAST_WORDS = 5.0  # seconds for telling the clients of requests that were ended


def make_service(llm: LLM, settings: ServerSettings) -> Service:
    metrics = Metrics(llm.engine, settings.served_model_names[0])
    engine = AsyncEngine(
        llm.engine,
        max_queue_len=settings.max_queue_len,
        stream_interval=settings.stream_interval,
        observer=metrics,
    )
    embedder = None
    if settings.embeddings is not None:
        embedder = Embedder(llm.engine, settings.embeddings)
        embedder.warm_up()
    return Service(engine, settings, metrics, llm.default_sampling_params(), embedder)


@dataclass(frozen=True)
class Listener:
    """Where and how to listen."""

    bound: socket.socket
    access_log: bool = True
    log_level: str = "info"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None


def open_socket(host: str, port: int) -> socket.socket:
    """A bound socket; done first, so that an address in use is found before a model is loaded. Port 0: any free one."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be in [0, 65535], got {port}")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen at {host} port {port}: {error.strerror or error}") from error
    return bound


def serve(
    llm: LLM, settings: ServerSettings, listener: Listener, *, on_ready: Callable[[], None] | None = None
) -> None:
    """Answer until SIGINT or SIGTERM; a second SIGINT ends the server at once."""
    service = make_service(llm, settings)
    config = uvicorn.Config(
        make_app(service),
        access_log=listener.access_log,
        log_level=listener.log_level,
        ssl_certfile=listener.ssl_certfile,
        ssl_keyfile=listener.ssl_keyfile,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=int(settings.shutdown_timeout + LAST_WORDS),
    )
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(Server(config, service, on_ready).serve(sockets=[listener.bound]))


class Server(uvicorn.Server):
    """uvicorn's server, which when told to stop lets the engine end its requests while it waits for its clients."""

    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[], None] | None = None) -> None:
        super().__init__(config)
        self.service = service
        self.on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # What loading and compiling made stays: a full collection that looks through it all stops every stream.
        gc.collect()
        gc.freeze()
        self.service.engine.start()
        await super().startup(sockets)
        if self.started and self.on_ready is not None:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.stopping.set()
        ending = asyncio.ensure_future(self.service.engine.shutdown(self.service.settings.shutdown_timeout))
        await super().shutdown(sockets)
        # Whoever waits no longer (a second signal) cuts the wait of the engine short too.
        await asyncio.wait((ending,), timeout=0.0 if self.force_exit else None)
        self.service.workers.shutdown(wait=False, cancel_futures=True)
