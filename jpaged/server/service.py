"""What every route works with: the engine, the tokenizer, and what the server was told at start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import pydantic
from jpaged_models import Tokenizer
from starlette.requests import Request

from jpaged.async_engine import AsyncEngine
from jpaged.embedding import Embedder
from jpaged.sampling_params import SamplingParams
from jpaged.server.errors import ApiError
from jpaged.server.feed import Feed
from jpaged.server.metrics import Metrics
from jpaged.server.settings import ServerSettings
from jpaged.server.tool_parsers import detect_parser
from jpaged.stats import EngineStats

T = TypeVar("T")
Body = TypeVar("Body", bound=pydantic.BaseModel)


@dataclass
class Service:
    engine: AsyncEngine
    settings: ServerSettings
    metrics: Metrics
    defaults: SamplingParams  # what the checkpoint recommends
    embedder: Embedder | None = None  # None: no embeddings
    created: int = field(default_factory=lambda: int(time.time()))
    stopping: asyncio.Event = field(default_factory=asyncio.Event)  # set when the server is told to stop
    feed: Feed = field(default_factory=Feed)  # of the dashboard
    # Tokenizing and templates are kept off the event loop: a long prompt must not hold up everybody's streams.
    workers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="tokenize"))

    @property
    def model(self) -> str:
        return self.settings.served_model_names[0]

    @property
    def max_model_len(self) -> int:
        return self.engine.engine.config.max_model_len

    @property
    def tool_call_parser(self) -> str | None:
        """The name of the model's format of tool calls, None if it is not known."""
        tokenizer = self.engine.engine.tokenizer
        template = self.settings.chat_template or (tokenizer and tokenizer.chat_template)
        return self.settings.tool_call_parser or detect_parser(template or None)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError for a model without one."""
        tokenizer = self.engine.engine.tokenizer
        if tokenizer is None:
            raise ApiError("this model came without a tokenizer: prompt it with token ids")
        return tokenizer

    def check_model(self, name: str | None) -> None:
        """Raises ApiError unless this is a name of the model, or none."""
        if name and name not in self.settings.served_model_names:
            known = ", ".join(map(repr, self.settings.served_model_names))
            raise ApiError(f"there is no model {name!r} here, only {known}", 404, param="model", code="model_not_found")

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError for an id that the model does not know."""
        vocab = self.engine.engine.model.vocab_size
        if bad := [token for token in ids if not 0 <= token < vocab]:
            raise ApiError(
                f"token id {bad[0]} is outside the model's vocabulary: ids are 0 to {vocab - 1}", param=param
            )

    async def work(self, function: Callable[[], T]) -> T:
        """Run a function in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, function)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokenizer = self.tokenizer
        return await self.work(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def fit_prompt(self, ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
        """The prompt cut as `truncate_prompt_tokens` asks. Raises ApiError if the answer might not fit after it."""
        keep = params.truncate_prompt_tokens
        if keep is not None:
            ids = ids[-(keep if keep > 0 else self.max_model_len - 1) :]
        limit, asked = self.max_model_len, params.max_tokens
        if len(ids) >= limit or (asked is not None and len(ids) + asked > limit):
            wanted = "" if asked is None else f" and asks for up to {asked} more"
            raise ApiError(
                f"this model's context is {limit} tokens, but the prompt has {len(ids)}{wanted}: shorten the prompt or "
                "lower max_tokens",
                param="prompt" if asked is None or len(ids) >= limit else "max_tokens",
                code="context_length_exceeded",
            )
        return ids

    async def stats(self) -> EngineStats:
        return await self.engine.call(lambda engine: engine.stats())


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The request's JSON body. Raises ValidationError for one that is not as it should be."""
    return kind.model_validate_json(await request.body())
