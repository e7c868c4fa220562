"""What a server is told at start, besides the model and the engine."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.server.tool_parsers import PARSERS

MB = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """
    served_model_names   names by which clients ask for the model; the first is the one answers carry
    api_keys             keys of which a client must have one; empty: nobody is asked
    max_request_bytes    largest body
    max_queue_len        outputs that may wait beyond those that run
    stream_interval      tokens of an output between two pieces of a stream; the first and the last are sent at once
    write_timeout        seconds in which a client must take something of a stream, or it is given up
    shutdown_timeout     seconds that requests under way have to end when the server is told to stop
    tool_call_parser     a name of tool_parsers.PARSERS; None: what the chat template shows, if it shows any
    embeddings           how /v1/embeddings pools, one of embedding.POOLINGS; None: there is no such route
    chat_template        Jinja source in place of the checkpoint's
    trust_request_chat_template  whether clients may bring a template
    allowed_origins, allowed_methods, allowed_headers, allow_credentials    CORS; no origin: no CORS
    """

    served_model_names: tuple[str, ...]
    api_keys: frozenset[str] = frozenset()
    max_request_bytes: int = 16 * MB
    max_queue_len: int = 1024
    stream_interval: int = 1
    write_timeout: float = 60.0
    shutdown_timeout: float = 20.0
    tool_call_parser: str | None = None
    embeddings: str | None = None
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ValueError(f"served_model_names must hold at least one name, got {self.served_model_names!r}")
        if not all(self.api_keys):
            raise ValueError("api_keys must not hold an empty key")
        for name in ("max_request_bytes", "stream_interval", "write_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)!r}")
        if self.tool_call_parser is not None and self.tool_call_parser not in PARSERS:
            raise ValueError(f"tool_call_parser must be one of {', '.join(PARSERS)}, got {self.tool_call_parser!r}")
        for name in ("max_queue_len", "shutdown_timeout"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}")
