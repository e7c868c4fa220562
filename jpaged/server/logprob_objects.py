"""Log-probabilities as OpenAI's two APIs show them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.outputs import Logprob

FLOOR = -9999.0  # in place of minus infinity, which JSON has no word for


def completion_logprobs(
    token_ids: Sequence[int], found: Sequence[Mapping[int, Logprob]], most: int, *, offset: int, as_ids: bool
) -> dict[str, Any]:
    """Those of /v1/completions; `offset` is where in the text the first token begins.

    A token whose log-probability is not a number, as a prompt's first one, is shown with null.
    """
    shown: dict[str, list] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, each in zip(token_ids, found, strict=True):
        text = token_text(token, each, as_ids)
        shown["tokens"].append(text)
        shown["text_offset"].append(offset)
        known = not math.isnan(each[token].logprob)
        shown["token_logprobs"].append(number(each[token].logprob) if known else None)
        shown["top_logprobs"].append(_top(each, most, as_ids) if known else None)
        offset += len(text)
    return shown


def chat_logprobs(
    token_ids: Sequence[int], found: Sequence[Mapping[int, Logprob]], most: int, *, as_ids: bool
) -> dict[str, Any]:
    """Those of /v1/chat/completions."""
    content = []
    for token, each in zip(token_ids, found, strict=True):
        ranked = sorted(each.items(), key=lambda item: item[1].rank or 0)[:most]
        top = [_chat_entry(other, each, as_ids) for other, _ in ranked]
        content.append({**_chat_entry(token, each, as_ids), "top_logprobs": top})
    return {"content": content}


def prompt_logprobs(found: Sequence[Mapping[int, Logprob] | None] | None) -> list | None:
    """vLLM's `prompt_logprobs`: per prompt token {token id: entry}, None for the first."""
    if found is None:
        return None
    return [None if each is None else {str(token): _plain(entry) for token, entry in each.items()} for each in found]


def token_text(token: int, found: Mapping[int, Logprob], as_ids: bool) -> str:
    text = found[token].decoded_token
    return f"token_id:{token}" if as_ids or text is None else text


def number(value: float) -> float:
    return max(value, FLOOR)


def _top(found: Mapping[int, Logprob], most: int, as_ids: bool) -> dict[str, float]:
    """The `most` likeliest and the token itself; of several tokens of one text the likeliest."""
    top: dict[str, float] = {}
    for token, entry in sorted(found.items(), key=lambda item: item[1].rank or 0)[: most + 1]:
        top.setdefault(token_text(token, found, as_ids), number(entry.logprob))
    return top


def _chat_entry(token: int, found: Mapping[int, Logprob], as_ids: bool) -> dict[str, Any]:
    text = token_text(token, found, as_ids)
    return {"token": text, "logprob": number(found[token].logprob), "bytes": list(text.encode())}


def _plain(entry: Logprob) -> dict[str, Any]:
    return {"logprob": number(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
