"""Sampling on the device, inside the step: logits and per-row parameters in, one token id per row out.

What a row asks for is data, so there is one program; rows are independent, so a row draws the same token
whatever else is in the batch and wherever it sits. Order of the filters, as in vLLM: temperature, min_p,
top_k, top_p (on what top_k left). Ties at a threshold are kept.

Everything is expressed in *weights*, w = exp((logit - highest logit) / temperature): between 0 and 1, the
most likely token has 1, so min_p is a threshold on w as it stands; and floats >= 0 order like their bits.

No sort and nothing random per token: for [32, 49152] logits on two CPU cores XLA's argmax takes 3.6 ms, a
top_k of 256 5, Gumbel noise 9 (hashed) to 13 (threefry), an elementwise pass 0.2 to 0.5. Hence
  - greedy: the maximum, then the lowest id that has it (two passes);
  - draw: lay the vocabulary out as a matrix, draw a column by the columns' sums, then a token inside it. As
    exact as one draw, and it needs V / 64 + 64 random numbers instead of V;
  - top_k and top_p: bisect the bits of the threshold, over the few columns that can hold it (`_candidates`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.tiles import over_tiles
from pallas_kernels.indexing import gather, scatter

_DEPTH = 64  # the vocabulary as a matrix [_DEPTH, V / _DEPTH] when it is reduced by columns
_CANDIDATE_COLUMNS = 128  # columns searched for a threshold before the whole vocabulary is
_SEARCH_ROWS = 4  # rows whose whole vocabulary is searched at once, where the columns do not do
_CHANGED_ROWS = 8  # rows whose logits are changed at once
_ONE_BITS = 0x3F800000  # bits of 1.0, the highest weight


# (rows i32[n], logits f32[n, V] of those rows) -> f32[n, V]; rows past the end are filled up and dropped
Change = Callable[[jax.Array, jax.Array], jax.Array]


class SamplingState(NamedTuple):
    """Sampling parameters of each row. A row with temperature 0 is greedy and ignores the others."""

    temperature: jax.Array  # f32[R]
    top_k: jax.Array  # i32[R], 0 = off
    top_p: jax.Array  # f32[R], 1 = off
    min_p: jax.Array  # f32[R], 0 = off
    seed: jax.Array  # u32[R, 2], see `seed_words`


def init_sampling(rows: int) -> SamplingState:
    """Greedy rows."""
    return SamplingState(
        temperature=jnp.zeros(rows, jnp.float32),
        top_k=jnp.zeros(rows, jnp.int32),
        top_p=jnp.ones(rows, jnp.float32),
        min_p=jnp.zeros(rows, jnp.float32),
        seed=jnp.zeros((rows, 2), jnp.uint32),
    )


def seed_words(seed: int) -> np.ndarray:
    """A 64-bit seed, signed or not, as the u32[2] that `SamplingState.seed` holds (high word first)."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def sample(
    logits: jax.Array,
    params: SamplingState,
    position: jax.Array,
    changed: jax.Array | None = None,
    change: Change | None = None,
) -> jax.Array:
    """One token for each row: i32[R] from `logits` f32[R, V].

    `position` i32[R], the place of the token in its sequence, is mixed with the row's seed: (seed, position)
    names the random numbers. Tokens of logit -inf are never drawn; a row of nothing else, or with a NaN,
    gives token 0. Greedy rows take the lowest id of the most likely tokens.

    Rows set in `changed` bool[R] are drawn from `change(rows, their logits)`, a few rows at a time; `logits` stay as
    they are, and there is one sampler for all rows.
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32[R, V], got {logits.dtype}{list(logits.shape)}")
    num_rows, vocab = logits.shape
    for name, value in (*params._asdict().items(), ("position", position)):
        if value.shape[:1] != (num_rows,):
            raise ValueError(f"{name} must have one entry for each of {num_rows} rows, got {list(value.shape)}")

    peak = jnp.max(logits, axis=1)
    greedy = _lowest_peak(logits, peak)
    random = params.temperature > 0
    top_k = jnp.where(random & (params.top_k < vocab), params.top_k, 0)
    top_p = jnp.where(random, params.top_p, 1.0)
    min_p = jnp.where(random, params.min_p, 0.0)
    params = params._replace(top_k=top_k, top_p=top_p, min_p=min_p)
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)

    def draw() -> jax.Array:
        weights, best = _weights_if_random(logits, peak, params.temperature), greedy
        if changed is not None and change is not None:
            weights, best = _change_rows(logits, params.temperature, changed, change, weights, best)

        def draw_random() -> jax.Array:
            kept = lax.cond(jnp.any(filtered), _filter, lambda weights, _: weights, weights, params)
            return jnp.where(random, _draw(kept, params.seed, position), best)

        return lax.cond(jnp.any(random), draw_random, lambda: best)

    wanted = random if changed is None else random | changed
    return lax.cond(jnp.any(wanted), draw, lambda: greedy)


def filtered_weights(logits: jax.Array, params: SamplingState) -> jax.Array:
    """Weights f32[R, V] that random rows are drawn by: w of the tokens the filters keep, 0 of the others.

    Probabilities are these over their sum. Rows with temperature 0 are treated as if it were 1.
    """
    return _filter(_weights(logits, jnp.max(logits, axis=1), params.temperature), params)


def _lowest_peak(logits: jax.Array, peak: jax.Array) -> jax.Array:
    """The lowest id i32[R] whose logit is the `peak` f32[R] of its row; 0 if none is (NaN equals nothing)."""
    vocab = logits.shape[1]
    ids = jnp.arange(vocab, dtype=jnp.int32)
    lowest = jnp.min(jnp.where(logits == peak[:, None], ids, vocab), axis=1)
    return jnp.where(lowest < vocab, lowest, 0)


def _change_rows(
    logits: jax.Array,
    temperature: jax.Array,
    changed: jax.Array,
    change: Change,
    weights: jax.Array,
    greedy: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`weights` f32[R, V] and `greedy` i32[R] with the rows in `changed` bool[R] made from their changed logits."""

    def replace(rows: jax.Array, done: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        weights, greedy = done
        own = change(rows, gather(logits, rows))
        peak = jnp.max(own, axis=1)
        heat = gather(temperature, rows)
        return (
            scatter(weights, rows, _weights_if_random(own, peak, heat)),
            scatter(greedy, rows, _lowest_peak(own, peak)),
        )

    return over_tiles(changed, _CHANGED_ROWS, replace, (weights, greedy))


def _weights(logits: jax.Array, peak: jax.Array, temperature: jax.Array) -> jax.Array:
    """exp((logit - peak) / temperature), 1 at the peak even if it is inf, 0 everywhere if it is -inf."""
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)[:, None]
    temperature = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    temperature = jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)
    return jnp.exp(jnp.where(logits == peak, 0.0, (logits - peak) / temperature))


def _weights_if_random(logits: jax.Array, peak: jax.Array, temperature: jax.Array) -> jax.Array:
    """`_weights`, or zeros where no row is random."""
    return lax.cond(jnp.any(temperature > 0), _weights, lambda x, *_: jnp.zeros_like(x), logits, peak, temperature)


def _filter(weights: jax.Array, params: SamplingState) -> jax.Array:
    # The barrier: a threshold is the weight of some token, to be compared with that very number, not with one
    # that a different fusion computed again.
    weights = lax.optimization_barrier(weights)
    threshold = _threshold(weights, params)
    return jnp.where(weights >= threshold[:, None], weights, 0.0)


# --- thresholds ---


def _threshold(weights: jax.Array, params: SamplingState) -> jax.Array:
    """The least weight f32[R] that min_p, top_k and top_p keep in `weights` f32[R, V]."""
    num_rows, vocab = weights.shape
    lowest = _bits(params.min_p)
    top_k, top_p = jnp.where(params.top_k < vocab, params.top_k, 0), params.top_p

    def search() -> jax.Array:
        mass = jnp.sum(jnp.where(weights >= params.min_p[:, None], weights, 0.0), axis=1)
        found, threshold = jnp.zeros(num_rows, bool), lowest
        if -(-vocab // _DEPTH) > 2 * _CANDIDATE_COLUMNS:
            values, floor = _candidates(weights)
            threshold, found = _search(values, _bits(floor) + 1, lowest, mass, top_k, top_p)

        def everywhere(rows: jax.Array, threshold: jax.Array) -> jax.Array:
            values, low, total, k, p = (gather(x, rows) for x in (weights, lowest, mass, top_k, top_p))
            bits, _ = _search(values, jnp.zeros_like(low), low, total, k, p)
            return scatter(threshold, rows, bits)

        return over_tiles(~found, _SEARCH_ROWS, everywhere, threshold)

    return _floats(lax.cond(jnp.any((top_k > 0) | (top_p < 1)), search, lambda: lowest))


def _candidates(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(values f32[R, C], floor f32[R]): `values` holds every weight above `floor`, and some others.

    They are the _CANDIDATE_COLUMNS columns with the highest maxima of the vocabulary laid out as a matrix.
    """
    matrix = _as_matrix(weights)
    # The barriers keep XLA:CPU from turning top_k into a sort, which it does when it sees the results sliced. One for
    # each: a barrier of both is more than it can take in a program for several devices.
    maxima, columns = map(lax.optimization_barrier, lax.top_k(jnp.max(matrix, axis=1), _CANDIDATE_COLUMNS))
    values = jnp.take_along_axis(matrix, columns[:, None, :], axis=2, mode="promise_in_bounds")
    return values.reshape(weights.shape[0], -1), maxima[:, -1]


def _search(
    values: jax.Array,
    floor: jax.Array,
    lowest: jax.Array,
    mass: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(bits of the threshold i32[R], found bool[R]) among `values` f32[R, C].

    `values` holds all weights of bits >= `floor` i32[R], and others. `lowest` i32[R] are the bits of the
    min_p threshold, `mass` f32[R] is the total of the weights it keeps. found is False where the threshold
    lies below the floor. Rows with top_k 0 and top_p 1 get `lowest`.
    """

    def count(bits: jax.Array) -> jax.Array:
        return jnp.sum(values >= _floats(bits)[:, None], axis=1, dtype=jnp.int32)

    def mass_of(bits: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(values >= _floats(bits)[:, None], values, 0.0), axis=1)

    complete = floor <= lowest  # every weight that min_p keeps is there
    low = jnp.maximum(floor, lowest)
    limited = (top_k > 0) & (count(low) >= top_k)  # else there are no k tokens to keep, or they are not here
    by_k = _bisect(low, limited, count, top_k)
    mass = jnp.where(limited, mass_of(by_k), mass)

    cut = top_p < 1
    target = top_p * mass
    reached = mass_of(by_k) >= target
    by_p = _bisect(by_k, cut & reached, mass_of, target)
    found = ((top_k == 0) | limited | complete) & (~cut | reached | complete)
    return jnp.where(cut, by_p, jnp.where(limited, by_k, lowest)), found


def _bisect(
    low: jax.Array, active: jax.Array, measure: Callable[[jax.Array], jax.Array], target: jax.Array
) -> jax.Array:
    """The highest bits i32[R] with `measure(bits) >= target` [R], true for `low`; rows not active: `low`.

    `measure` falls as its argument grows. Where it hits the target the search ends: higher bits keep the same
    tokens or too few. 30 calls at most, none where no row is active.
    """

    def narrow(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        value = measure(middle)
        is_open = high - low > 1
        accepted = is_open & (value >= target)
        high = jnp.where(is_open & ~accepted, middle, high)
        low = jnp.where(accepted, middle, low)
        return low, jnp.where(accepted & (value == target), low + 1, high)

    high = jnp.where(active, _ONE_BITS + 1, low + 1)  # nothing weighs more than 1
    return lax.while_loop(lambda bounds: jnp.any(bounds[1] - bounds[0] > 1), narrow, (low, high))[0]


def _bits(weights: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(weights, jnp.int32)


def _floats(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


# --- drawing ---


def _draw(weights: jax.Array, seed: jax.Array, position: jax.Array) -> jax.Array:
    """A token i32[R] by weight from `weights` f32[R, V]: first a column of the matrix, then a token in it."""
    matrix = _as_matrix(weights)
    width = matrix.shape[2]
    noise = _exponentials(seed, position, width + _DEPTH)
    column = _race(jnp.sum(matrix, axis=1), noise[:, :width])
    inside = jnp.take_along_axis(matrix, column[:, None, None], axis=2, mode="promise_in_bounds")[:, :, 0]
    return _race(inside, noise[:, width:]) * width + column


def _race(weights: jax.Array, noise: jax.Array) -> jax.Array:
    """An index i32[R] by weight from `weights` f32[R, n] and exponential `noise` f32[R, n]; 0 if all are 0.

    The first arrival among Poisson processes of these rates, which is the Gumbel-max trick without logarithms
    of the weights. A weight of 0 never arrives.
    """
    return jnp.argmax(weights / noise, axis=1).astype(jnp.int32)


def _exponentials(seed: jax.Array, position: jax.Array, count: int) -> jax.Array:
    """Exponential random numbers f32[R, count], finite and above 0, from `seed` u32[R, 2] and `position` i32[R]."""

    def bits(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.bits(key, (count,), jnp.uint32)

    # All 32 bits: small numbers, by which unlikely tokens win, keep their full precision.
    uniform = (jax.vmap(bits)(seed, position).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24))


def _as_matrix(weights: jax.Array) -> jax.Array:
    """[R, V] -> [R, _DEPTH, ceil(V / _DEPTH)], filled up with weights of 0."""
    num_rows, vocab = weights.shape
    width = -(-vocab // _DEPTH)
    return jnp.pad(weights, ((0, 0), (0, _DEPTH * width - vocab))).reshape(num_rows, _DEPTH, width)
