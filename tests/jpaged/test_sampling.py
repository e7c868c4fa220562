"""Device sampling: filters against a sorting reference, distributions by chi-squared, independence of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.sampling import SamplingState, filtered_weights, sample, seed_words

WIDE = 20_000  # wide enough for the search among candidate columns; narrower vocabularies are searched whole

run = jax.jit(sample)
run_steps = jax.jit(lambda logits, params, steps: jax.lax.map(lambda at: sample(logits, params, at), steps))
run_weights = jax.jit(filtered_weights)


def state(
    rows: int,
    temperature: object = 1.0,
    top_k: object = 0,
    top_p: object = 1.0,
    min_p: object = 0.0,
    seeds: object = None,
) -> SamplingState:
    def full(value: object, dtype: type) -> jax.Array:
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (rows,)))

    words = np.stack([seed_words(int(seed)) for seed in (range(rows) if seeds is None else seeds)])
    return SamplingState(
        full(temperature, np.float32),
        full(top_k, np.int32),
        full(top_p, np.float32),
        full(min_p, np.float32),
        jnp.asarray(words),
    )


def zipf(rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    """Logits with the shape of a language model's: from peaked to nearly flat."""
    rng = np.random.default_rng(seed)
    slope = np.linspace(0.6, 3.0, rows)[:, None]
    logits = -slope * np.log(np.arange(vocab) + 2.0) + rng.normal(size=(rows, vocab)) * 0.5
    return rng.permuted(logits, axis=1).astype(np.float32)


def reference(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities [V] after temperature, min_p, top_k and top_p, by sorting, in float64."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    p[p < min_p * p.max()] = 0
    if 0 < top_k < p.size:
        p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
    last = p[order][before < top_p].min()  # the token that reaches top_p, and those as likely as it
    p[p < last] = 0
    return p / p.sum()


@pytest.mark.parametrize("vocab", [260, WIDE])
def test_filters_agree_with_sorting(vocab: int) -> None:
    """Every combination, some that keep a few tokens and some thousands, side by side in one batch."""
    cases = [
        (t, k, p, m)
        for t in (0.3, 1.0, 1.7)
        for k in (0, 1, 120, 200, 5000)
        for p in (1.0, 0.95, 0.5, 1e-6)
        for m in (0.0, 0.03)
    ]
    logits = zipf(len(cases), vocab)
    weights = np.asarray(run_weights(logits, state(len(cases), *(np.array(c) for c in zip(*cases, strict=True)))))
    for row, (t, k, p, m) in enumerate(cases):
        expected = reference(logits[row], t, k, p, m)
        got = weights[row] / weights[row].sum(dtype=np.float64)
        np.testing.assert_allclose(got, expected, atol=1e-6, err_msg=f"row {row}: {(t, k, p, m)}")
        assert ((got > 0) == (expected > 0)).mean() > 1 - 2 / vocab


def test_ties_at_a_threshold_are_kept() -> None:
    logits = np.array([[3, 1, 2, 2, 2, 0]], np.float32)
    for params in (state(1, top_k=2), state(1, top_p=0.6)):
        assert (np.asarray(run_weights(logits, params))[0] > 0).tolist() == [
            True,
            False,
            True,
            True,
            True,
            False,
        ]
    equal = np.zeros((1, 6), np.float32)
    for params in (state(1), state(1, top_k=1), state(1, top_p=0.1), state(1, min_p=1.0), state(1, top_k=99)):
        assert np.asarray(run_weights(equal, params)).tolist() == [[1.0] * 6]


def test_greedy_is_argmax_and_takes_the_lowest_of_equals() -> None:
    logits = zipf(6, 1000)
    logits[2, [40, 900]] = 50
    logits[3] = 0
    params = state(6, temperature=0, top_k=5, top_p=0.1, min_p=0.9)
    tokens = np.asarray(run(logits, params, jnp.arange(6)))
    assert tokens.dtype == np.int32
    assert tokens.tolist() == np.argmax(logits, axis=1).tolist()
    assert (tokens[2], tokens[3]) == (40, 0)


def test_greedy_and_random_rows_in_one_batch() -> None:
    logits = zipf(8, 1000)
    temperature = np.array([0, 1] * 4, np.float32)
    tokens = np.asarray(run(logits, state(8, temperature), jnp.zeros(8, jnp.int32)))
    random = np.asarray(run(logits, state(8), jnp.zeros(8, jnp.int32)))
    assert tokens[::2].tolist() == np.argmax(logits[::2], axis=1).tolist()
    assert tokens[1::2].tolist() == random[1::2].tolist()


def test_a_tiny_temperature_is_the_limit_not_a_division_by_zero() -> None:
    logits = zipf(4, 1000)
    logits[3, :5] = 50  # equals stay equals at any temperature
    for temperature in (1e-30, 1e-38, np.finfo(np.float32).tiny):
        for params in (state(4, temperature), state(4, temperature, top_k=3, top_p=0.9, min_p=0.1)):
            tokens = np.asarray(run(logits, params, jnp.arange(4)))
            assert tokens[:3].tolist() == np.argmax(logits[:3], axis=1).tolist()
            assert tokens[3] < 5


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0}, {"top_k": 300, "top_p": 0.9}],
)
def test_masked_tokens_are_never_drawn_and_empty_rows_are_harmless(params: dict) -> None:
    rows, vocab = 16, 200
    logits = np.full((rows, vocab), -np.inf, np.float32)
    allowed = np.array([7, 150, 199])
    logits[:, allowed] = 0.5
    logits[3] = -np.inf  # nothing allowed
    logits[5] = np.nan
    logits[6, 20] = np.inf
    clean = np.delete(np.arange(rows), [3, 5, 6])
    for position in range(4):
        tokens = np.asarray(run(logits, state(rows, **params), jnp.full(rows, position)))
        assert np.isin(tokens[clean], allowed).all()
        assert (tokens[3], tokens[5], tokens[6]) == (0, 0, 20)


def draws(logits: np.ndarray, count: int, **params: object) -> np.ndarray:
    """`count` tokens for one row of logits: many positions of 64 seeds."""
    rows = 64
    positions = np.broadcast_to(np.arange(count // rows, dtype=np.int32)[:, None], (count // rows, rows))
    batch = np.broadcast_to(logits, (rows, logits.size))
    return np.asarray(run_steps(batch, state(rows, seeds=range(100, 100 + rows), **params), positions)).reshape(-1)


def chi_squared_z(counts: np.ndarray, p: np.ndarray) -> float:
    """How many standard deviations chi-squared is above its mean; tokens of p = 0 must have no counts."""
    assert not counts[p == 0].any()
    expected = p[p > 0] * counts.sum()
    chi = ((counts[p > 0] - expected) ** 2 / expected).sum()
    degrees = (p > 0).sum() - 1
    return float((chi - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 2.5},
        {"top_k": 40},
        {"top_p": 0.8},
        {"min_p": 0.02},
        {"temperature": 1.5, "min_p": 0.01, "top_k": 60, "top_p": 0.9},
    ],
)
def test_draws_follow_the_distribution(params: dict) -> None:
    logits = (zipf(3, 200)[1] * 0.5).astype(np.float32)
    expected = reference(logits, **({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params))
    counts = np.bincount(draws(logits, 64_000, **params), minlength=200)
    assert abs(chi_squared_z(counts, expected)) < 4


def test_unlikely_tokens_are_drawn_as_often_as_they_should_be() -> None:
    """Half of the mass is spread over 50,000 tokens of 1e-5 each: no rounding may lose them."""
    logits = np.full(50_001, np.log(1e-5), np.float32)
    logits[12_345] = np.log(0.5)
    tokens = draws(logits, 64 * 64)
    likely = (tokens == 12_345).mean()
    assert abs(likely - 0.5) < 4 * 0.5 / np.sqrt(tokens.size)
    others = tokens[tokens != 12_345]
    assert len(np.unique(others)) > 0.95 * others.size
    halves = (others < 25_000).mean()
    assert abs(halves - 0.5) < 4 * 0.5 / np.sqrt(others.size)


def test_seeds_and_positions_are_independent() -> None:
    """One bit from each (seed, position), over neighbours in both: no correlation."""
    rows, steps = 64, 256
    logits = np.zeros((rows, 2), np.float32)
    positions = np.broadcast_to(np.arange(steps, dtype=np.int32)[:, None], (steps, rows))
    bits = np.asarray(run_steps(logits, state(rows), positions)) * 2.0 - 1
    bound = 4 / np.sqrt(bits.size)
    assert abs(bits.mean()) < bound
    assert abs((bits[1:] * bits[:-1]).mean()) < bound
    assert abs((bits[:, 1:] * bits[:, :-1]).mean()) < bound


@pytest.mark.parametrize("vocab", [261, WIDE + 1])
def test_a_row_draws_the_same_in_any_batch(vocab: int) -> None:
    """Alone, in 8, in 32, at another place, beside rows that need the long search or none: bit for bit."""
    rng = np.random.default_rng(3)
    rows = 32
    logits = zipf(rows, vocab, seed=5)
    params = state(
        rows,
        temperature=rng.choice([0.7, 1.0, 1.3], rows),
        top_k=rng.choice([0, 40, 3000], rows),
        top_p=rng.choice([1.0, 0.9, 0.99], rows),
        min_p=rng.choice([0.0, 0.01], rows),
        seeds=rng.integers(-(2**63), 2**63 - 1, rows),
    )
    position = rng.integers(0, 1000, rows).astype(np.int32)
    tokens = np.asarray(run(logits, params, position))
    weights = np.asarray(run_weights(logits, params))

    def take(order: np.ndarray) -> None:
        part = jax.tree.map(lambda x: x[order], params)
        assert np.asarray(run(logits[order], part, position[order])).tolist() == tokens[order].tolist()
        np.testing.assert_array_equal(np.asarray(run_weights(logits[order], part)), weights[order])

    take(rng.permutation(rows))
    for size in (1, 13) if vocab == WIDE + 1 else (8,):
        take(rng.permutation(rows)[:size])


def test_another_seed_or_position_gives_other_tokens() -> None:
    logits = np.zeros((64, 5000), np.float32)
    base = np.asarray(run(logits, state(64), jnp.zeros(64, jnp.int32)))
    later = np.asarray(run(logits, state(64), jnp.ones(64, jnp.int32)))
    high = np.asarray(run(logits, state(64, seeds=[s + 2**32 for s in range(64)]), jnp.zeros(64, jnp.int32)))
    for other in (later, high, np.roll(base, 1)):
        assert (base == other).sum() <= 2
    assert len(np.unique(base)) >= 60


@pytest.mark.parametrize(
    ("seed", "words"), [(0, (0, 0)), (5, (0, 5)), (2**32 + 1, (1, 1)), (-1, (2**32 - 1, 2**32 - 1))]
)
def test_seed_words(seed: int, words: tuple[int, int]) -> None:
    assert seed_words(seed).dtype == np.uint32 and tuple(seed_words(seed).tolist()) == words


def test_wrong_shapes_are_refused() -> None:
    params = state(2)
    with pytest.raises(ValueError, match="logits must be float32"):
        sample(jnp.zeros((2, 5), jnp.bfloat16), params, jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="position must have one entry for each of 2 rows"):
        sample(jnp.zeros((2, 5)), params, jnp.zeros(3, jnp.int32))
