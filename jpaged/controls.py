"""Controls on the device: what changes a row's logits before temperature and the filters.

In this order, as in vLLM: allowed tokens, bad words, bias and min_tokens, the engine's own processor, penalties.
A slot's row is written when a request that uses one is admitted; `Feature` bits say which parts of it hold.

Rows that use any are worked on a few at a time, see `sample`: the logits of the batch are never written
(log-probabilities are of the raw ones), and a batch that uses none pays nothing.

    S slots, V vocabulary, W = ceil(V / 32), L entries of bias, B bad words, P tokens before a bad word's last one,
    A arguments of the processor, n rows of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.features import CONTROLLED, Feature
from jpaged.sampling import SamplingState, sample
from pallas_kernels.indexing import gather, scatter, scatter_add

BIAS_CHUNK = 32  # entries of bias applied at once
DRAWN_AT_ONCE = 8  # rows, where padding is to cost nothing

# (logits f32[n, V], args f32[n, A], position i32[n]) -> f32[n, V]; position: of the token to be drawn
Processor = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Controls(NamedTuple):
    """One row a slot, of JAX arrays on the device and NumPy ones on the host.

    Padding: bias_ids and bad_last V, bad_before -1 (any token), recent -2 (no token).
    """

    mask: Any  # i32[S, W]  bit v % 32 of word v // 32: token v is allowed
    bias_ids: Any  # i32[S, L]
    bias_values: Any  # f32[S, L]  -inf: not allowed
    bias_until: Any  # i32[S, L]  the entry holds for positions below this
    bad_last: Any  # i32[S, B]  not allowed after ...
    bad_before: Any  # i32[S, B, P]  ... these, right-aligned
    recent: Any  # i32[S, P]  the last tokens of the output
    counts: Any  # i16 or i32 [S, V]  2 * (times in the output) + (is in the prompt)
    penalties: Any  # f32[S, 3]  repetition, frequency, presence
    args: Any  # f32[S, A]


def write_controls(controls: Controls, slot: jax.Array, row: Controls) -> Controls:
    """Write one slot's row (the arrays of `row` have no slot axis)."""
    return jax.tree.map(lambda all_rows, new: scatter(all_rows, slot, new), controls, row)


def write_masks(controls: Controls, slots: jax.Array, masks: jax.Array) -> Controls:
    """Write masks i32[n, W] of slots i32[n]; S, one past the last, is left out."""
    return controls._replace(mask=scatter(controls.mask, slots, masks))


def draw(
    logits: jax.Array,
    sampling: SamplingState,
    features: jax.Array,
    position: jax.Array,
    controls: Controls,
    slots: jax.Array,
    processor: Processor | None,
    live: jax.Array | None = None,
) -> jax.Array:
    """One token for each row: `sample` with the controls of the rows that have any.

    logits f32[R, V]; sampling, features, position [R]; slots i32[R], S for padding -> i32[R]

    live: i32[]; rows from here on are padding, whose logits may be anything and whose tokens are unspecified. Rows are
    then drawn a few at a time, as many as there are. None: all rows count, and are drawn at once.
    """
    if live is not None:
        num_rows = logits.shape[0]
        tile = math.gcd(num_rows, DRAWN_AT_ONCE)

        def step(i: jax.Array, tokens: jax.Array) -> jax.Array:
            def part(x: jax.Array) -> jax.Array:
                return lax.dynamic_slice_in_dim(x, i * tile, tile)

            own = jax.tree.map(part, sampling)
            drawn = draw(part(logits), own, part(features), part(position), controls, part(slots), processor)
            return lax.dynamic_update_slice_in_dim(tokens, drawn, i * tile, 0)

        return lax.fori_loop(0, lax.div(live + tile - 1, tile), step, jnp.zeros(num_rows, jnp.int32))

    controlled = ((features & CONTROLLED) != 0) & (slots < controls.mask.shape[0])

    def change(rows: jax.Array, own: jax.Array) -> jax.Array:
        slot = gather(slots, rows, fill=controls.mask.shape[0])
        feature, place = (gather(x, rows) for x in (features, position))
        return apply_controls(own, controls, slot, feature, place, processor)

    return sample(logits, sampling, position, controlled, change)


def apply_controls(
    logits: jax.Array,
    controls: Controls,
    slots: jax.Array,
    features: jax.Array,
    position: jax.Array,
    processor: Processor | None = None,
) -> jax.Array:
    """The logits f32[n, V] of rows in `slots` i32[n] with everything `features` i32[n] names applied."""

    def uses(feature: Feature) -> jax.Array:
        return (features & feature) != 0  # [n]

    def when(feature: Feature, change: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
        used = uses(feature)
        return lax.cond(jnp.any(used), lambda x: jnp.where(used[:, None], change(x), x), lambda x: x, logits)

    def rows(table: jax.Array) -> jax.Array:
        return gather(table, slots)

    logits = when(Feature.MASK, lambda x: jnp.where(unpack_bits(rows(controls.mask), x.shape[1]), x, -jnp.inf), logits)
    logits = when(Feature.BAD_WORDS, lambda x: _forbid(x, *map(rows, controls[4:7])), logits)
    logits = when(Feature.BIAS, lambda x: _add_bias(x, position, *map(rows, controls[1:4])), logits)
    if processor is not None:
        logits = when(Feature.PROCESSOR, lambda x: processor(x, rows(controls.args), position), logits)
    return when(Feature.PENALTIES, lambda x: _penalize(x, rows(controls.counts), rows(controls.penalties)), logits)


def count_tokens(controls: Controls, slots: jax.Array, features: jax.Array, tokens: jax.Array) -> Controls:
    """Record drawn tokens i32[R] for rows in `slots` i32[R] (S: none drawn) that use penalties or bad words."""
    none = controls.mask.shape[0]
    counted = jnp.where((features & Feature.PENALTIES) != 0, slots, none)
    watched = jnp.where((features & Feature.BAD_WORDS) != 0, slots, none)
    recent = gather(controls.recent, watched)
    recent = jnp.concatenate([recent[:, 1:], tokens[:, None]], axis=1)
    two = jnp.asarray(2, controls.counts.dtype)
    return controls._replace(
        counts=scatter_add(controls.counts, (counted, tokens), two),
        recent=scatter(controls.recent, watched, recent),
    )


def unpack_bits(words: jax.Array, count: int) -> jax.Array:
    """bool[n, count] from i32[n, ceil(count / 32)], lowest bit first."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :count] > 0


def _forbid(logits: jax.Array, last: jax.Array, before: jax.Array, recent: jax.Array) -> jax.Array:
    matched = jnp.all((before == -1) | (before == recent[:, None, :]), axis=2)  # [n, B]
    token = jnp.where(matched, last, logits.shape[1])
    return scatter(logits, (jnp.arange(logits.shape[0])[:, None], token), -jnp.inf)


def _add_bias(logits: jax.Array, position: jax.Array, ids: jax.Array, values: jax.Array, until: jax.Array) -> jax.Array:
    row = jnp.arange(logits.shape[0])[:, None]
    ids = jnp.where(position[:, None] < until, ids, logits.shape[1])
    chunk = min(BIAS_CHUNK, ids.shape[1])
    used = jnp.max(jnp.sum(until > 0, axis=1))  # entries come first, padding has until = 0

    def add(i: jax.Array, logits: jax.Array) -> jax.Array:
        at = jnp.minimum(i * chunk, ids.shape[1] - chunk)
        # The last chunk may overlap the one before it: what that one added is not added again.
        fresh = at + jnp.arange(chunk) >= i * chunk
        some = jnp.where(fresh, lax.dynamic_slice_in_dim(ids, at, chunk, 1), logits.shape[1])
        return scatter_add(logits, (row, some), lax.dynamic_slice_in_dim(values, at, chunk, 1))

    return lax.fori_loop(0, lax.div(used + chunk - 1, chunk), add, logits)


def _penalize(logits: jax.Array, counts: jax.Array, penalties: jax.Array) -> jax.Array:
    counts = counts.astype(jnp.int32)
    repetition, frequency, presence = (penalties[:, i : i + 1] for i in range(3))
    in_output = counts >> 1
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts > 0, repeated, logits)
    return logits - frequency * in_output.astype(jnp.float32) - presence * (in_output > 0)
