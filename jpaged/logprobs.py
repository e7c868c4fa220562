"""Log-probabilities of tokens: packed on the device for the rows that want them, made into dicts on the host.

They are of the model's own logits, before anything a request asks for changes them. One record is C = 2 + 2 N words:

    [log-probability of the token, its rank, ids of the N most likely tokens, their log-probabilities]

Floats travel as their bits. The rank is 1 plus the number of tokens that are likelier. N is the engine's
`max_logprobs`; a request that wants fewer takes the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jpaged_models import Tokenizer

from jpaged.outputs import Logprob
from jpaged.tiles import over_tiles
from pallas_kernels.indexing import gather, scatter

TILE = 8  # rows
PROMPT_TILE = 16  # tokens of prompts whose logits are computed at once


def record_size(max_logprobs: int, vocab_size: int) -> int:
    """Words of one record."""
    return 2 + 2 * min(max_logprobs, vocab_size)


def pack_records(logits: jax.Array, tokens: jax.Array, size: int) -> jax.Array:
    """i32[n, size]: records of tokens i32[n] under logits f32[n, V]."""
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    own = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="clip")
    rank = 1 + jnp.sum(logits > own, axis=1, keepdims=True, dtype=jnp.int32)
    # The barriers keep XLA:CPU from turning top_k into a sort of the vocabulary (one for each: see `_candidates`).
    values, ids = map(lax.optimization_barrier, lax.top_k(logits, (size - 2) // 2))

    def bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x - total, jnp.int32)

    return jnp.concatenate([bits(own), rank, ids, bits(values)], axis=1)


def record_tokens(records: jax.Array, step: jax.Array, wanted: jax.Array, logits: jax.Array, tokens: jax.Array):
    """Fill records i32[K, R, C] at `step` for rows set in wanted bool[R]; logits f32[R, V], tokens i32[R]."""

    def fill(rows: jax.Array, records: jax.Array) -> jax.Array:
        own = gather(logits, rows)
        packed = pack_records(own, gather(tokens, rows), records.shape[2])
        return scatter(records, (step, rows), packed)

    # At a branch, for the layout of the logits: a loop wants them by rows, and XLA:CPU's product gives them by columns.
    return lax.cond(
        jnp.any(wanted), lambda records: over_tiles(wanted, TILE, fill, records), lambda records: records, records
    )


def record_prompt(
    head: Callable[[jax.Array], jax.Array], hidden: jax.Array, following: jax.Array, size: int
) -> jax.Array:
    """i32[T, size]: at each token the record of the one that follows it, following i32[T], where that is not -1.

    head: hidden states [n, H] -> logits f32[n, V], run on as many of hidden [T, H] as are wanted.
    """

    def fill(rows: jax.Array, records: jax.Array) -> jax.Array:
        logits = head(gather(hidden, rows))
        packed = pack_records(logits, gather(following, rows), size)
        return scatter(records, rows, packed)

    return over_tiles(following >= 0, PROMPT_TILE, fill, jnp.zeros((hidden.shape[0], size), jnp.int32))


def unpack_record(record: np.ndarray, token: int, most: int, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """{id: Logprob} of `token` and the `most` likeliest; -1: all of the record."""
    count = (len(record) - 2) // 2
    most = count if most < 0 else most
    ids = record[2 : 2 + most].tolist()
    own, *values = record[[0, *range(2 + count, 2 + count + most)]].view(np.float32).tolist()

    def text(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)

    found = {token: Logprob(own, int(record[1]), text(token))}
    for place, (each, value) in enumerate(zip(ids, values, strict=True)):
        if each != token:
            found[each] = Logprob(value, place + 1, text(each))
    return found


def unpack_records(
    records: Sequence[np.ndarray], tokens: Sequence[int], most: int, tokenizer: Tokenizer | None
) -> list[dict[int, Logprob]]:
    """One dict for each of the tokens that have a record."""
    return [unpack_record(*each, most, tokenizer) for each in zip(records, tokens, strict=False)]


def sum_own(records: Sequence[np.ndarray]) -> float:
    """The sum of the tokens' own log-probabilities."""
    return sum(float(record[:1].view(np.float32)[0]) for record in records)
