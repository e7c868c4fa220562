"""The fields that completions and chat completions share: OpenAI's, and vLLM's beyond them."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from jpaged.beam_search import BeamSearchParams
from jpaged.sampling_params import SEED_MAX, RequestOutputKind, SamplingParams
from jpaged.structured_params import StructuredOutputsParams

log = logging.getLogger(__name__)

# Fields of clients that keep accounts or conversations, which mean nothing here.
IGNORED = frozenset({"metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})

# What beam search does not look at, with the values that ask for nothing. A form of the output is checked for itself.
NOT_WITH_BEAMS: dict[str, tuple] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "stop": (None, "", []),
    "stop_token_ids": (None, []),
    "min_tokens": (0,),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "prompt_logprobs": (None,),
    "vllm_xargs": (None, {}),
}


class Body(BaseModel):
    """A JSON body: types are not converted, and what is not known is ignored with a line in the log, as vLLM does."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @pydantic.model_validator(mode="after")
    def _tell_of_unknown_fields(self) -> Body:
        unknown = set(self.model_extra or {}) - IGNORED
        if unknown:
            log.warning(
                "fields of a request were ignored, for they are not known: %s", ", ".join(sorted(unknown))[:500]
            )
        return self


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(BaseModel):
    """OpenAI's wrapping of a JSON schema."""

    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @pydantic.model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.json_schema is None):
            raise ValueError('type "json_schema" needs json_schema.schema')
        return self


class SamplingFields(Body):
    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-SEED_MAX - 1, le=SEED_MAX)] | None = None
    logit_bias: dict[str, float] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int = 0
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    vllm_xargs: dict[str, float] | None = None

    @pydantic.model_validator(mode="after")
    def _check_stream_options(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may only be given with stream=true")
        return self

    @pydantic.model_validator(mode="after")
    def _check_beams(self) -> SamplingFields:
        if not self.use_beam_search:
            if self.best_of is not None and self.best_of != (self.n or 1):
                raise ValueError(f"best_of must be n={self.n or 1} or left out, got {self.best_of}")
            return self
        if self.stream:
            raise ValueError("use_beam_search cannot be streamed: which beam is the best is known at the end")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"best_of must be at least n={self.n or 1}, got {self.best_of}")
        if given := [name for name, unset in NOT_WITH_BEAMS.items() if getattr(self, name) not in unset]:
            raise ValueError(f"use_beam_search cannot be combined with {', '.join(given)}")
        return self

    def structure(self) -> StructuredOutputsParams | None:
        """The form that the output must have. Raises ValueError if two are given."""
        asked = self.response_format
        wants_form = asked is not None and asked.type != "text"
        if self.structured_outputs is not None:
            if wants_form:
                raise ValueError("response_format and structured_outputs ask for a form each: give one of them")
            given = {name: value for name, value in self.structured_outputs.items() if value is not None}
            return StructuredOutputsParams.from_mapping(given)
        if asked is None or not wants_form:
            return None
        if asked.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        assert asked.json_schema is not None
        return StructuredOutputsParams(json=json.dumps(asked.json_schema.json_schema))

    def search_params(self, sampling: SamplingParams, room: int) -> SamplingParams | BeamSearchParams:
        """What the engine is asked: `sampling`, or a search with `best_of` or `n` beams; `room`: tokens left.

        How a token is drawn means nothing for beams, as in vLLM. Raises ValueError for what is not allowed.
        """
        if not self.use_beam_search:
            return sampling
        if sampling.structured_outputs is not None:
            raise ValueError("use_beam_search cannot be combined with a form that the output must have")
        if sampling.logprobs:
            raise ValueError(
                f"use_beam_search knows the log-probabilities of the tokens taken, and no others: {sampling.logprobs} "
                "were asked for, 0 are allowed"
            )
        return BeamSearchParams(
            beam_width=self.best_of or self.n or 1,
            max_tokens=room if sampling.max_tokens is None else sampling.max_tokens,
            ignore_eos=sampling.ignore_eos,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
        )

    def sampling_params(self, defaults: SamplingParams, **changes: Any) -> SamplingParams:
        """`defaults` with what the body gives, and `changes`. Raises ValueError for what is not allowed."""
        names = ("frequency_penalty", "presence_penalty", "repetition_penalty", "temperature", "top_p", "top_k")
        names += ("min_p", "seed", "n", "stop", "stop_token_ids", "bad_words", "allowed_token_ids")  # type: ignore[assignment]
        names += ("prompt_logprobs", "truncate_prompt_tokens")  # type: ignore[assignment]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if given.get("stop") == "":
            given["stop"] = ()
        if self.use_beam_search:  # the number of beams, and not of samples
            given["n"] = 1
        return dataclasses.replace(
            defaults,
            **{
                **given,
                "logit_bias": {_token_of(key): value for key, value in (self.logit_bias or {}).items()},
                "extra_args": self.vllm_xargs or {},
                "include_stop_str_in_output": self.include_stop_str_in_output,
                "ignore_eos": self.ignore_eos,
                "min_tokens": self.min_tokens,
                "skip_special_tokens": self.skip_special_tokens,
                "spaces_between_special_tokens": self.spaces_between_special_tokens,
                "structured_outputs": self.structure(),
                "priority": self.priority,
                "output_kind": RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
                **changes,
            },
        )


def _token_of(key: str) -> int:
    if not key.isdecimal():
        raise ValueError(f"logit_bias must have token ids for keys, got {key!r}")
    return int(key)
