"""Controls of the logits: each and every pair against NumPy, draws by chi-squared, and the tables' edges."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_reference import controlled_logits, probabilities

from jpaged import EngineConfig, SamplingParams
from jpaged.control_rows import check_controls, find_features, init_controls, make_row, pack_bits
from jpaged.controls import Controls, apply_controls, count_tokens, draw, unpack_bits, write_controls
from jpaged.features import Feature
from jpaged.request import Request
from jpaged.sampling import SamplingState, filtered_weights, seed_words

VOCAB = 203
PROMPT, OUTPUT = [5, 9, 9, 40, 3], [7, 8, 9, 7, 60, 61]
EOS, BAD_WORDS = frozenset({2, 11}), [(13,), (60, 61, 14), (61, 15), (8, 61, 16), (17, 18)]
CONFIG = EngineConfig(num_blocks=100, max_model_len=64, max_num_seqs=16, max_logit_bias=70, max_bad_word_tokens=4)

CHANGES: list[dict] = [
    {"allowed_token_ids": (*range(0, VOCAB, 3), 7, 14, 15, 16, 11)},
    {"bad_words": ("one",)},
    {"min_tokens": 7},
    {"min_tokens": 6},  # reached
    {"logit_bias": {t: float(t % 7) - 3 for t in range(1, 68)}},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 1.3},
    {"frequency_penalty": -0.7, "presence_penalty": 0.2},
    {"presence_penalty": 2.0},
    {"temperature": 0.4},
    {"temperature": 0.0},
    {"min_p": 0.05},
    {"top_k": 12},
    {"top_p": 0.7},
]
PAIRS = [first | second for first, second in itertools.combinations_with_replacement(CHANGES, 2)]


def make_request(params: SamplingParams, slot: int = 0, output: list[int] = OUTPUT) -> Request:
    words = BAD_WORDS if params.bad_words else []
    request = Request("r", PROMPT, params, 64, params.seed or 0, EOS, bad_word_ids=words, slot=slot)
    request.output_token_ids = list(output)
    request.features = find_features(request)
    return request


def make_batch(requests: list[Request], config: EngineConfig = CONFIG) -> tuple[Controls, SamplingState, jax.Array]:
    """(controls of as many slots as requests, their sampling state, their features)."""
    rows = [make_row(request, VOCAB, config) for request in requests]
    controls = Controls(*(jnp.asarray(np.stack(each)) for each in zip(*rows, strict=True)))
    params = [request.params for request in requests]
    sampling = SamplingState(
        temperature=jnp.array([p.temperature for p in params], jnp.float32),
        top_k=jnp.array([max(p.top_k, 0) for p in params], jnp.int32),
        top_p=jnp.array([p.top_p for p in params], jnp.float32),
        min_p=jnp.array([p.min_p for p in params], jnp.float32),
        seed=jnp.asarray(np.stack([seed_words(p.seed or 0) for p in params])),
    )
    return controls, sampling, jnp.array([request.features for request in requests], jnp.int32)


def reference(logits: np.ndarray, request: Request) -> np.ndarray:
    p, output = request.params, request.output_token_ids
    return controlled_logits(logits, p, PROMPT, output, stop_ids=sorted(EOS), bad_words=request.bad_word_ids)


def test_each_control_and_every_pair_agrees_with_numpy() -> None:
    rng = np.random.default_rng(0)
    requests = [make_request(SamplingParams(max_tokens=64, **change)) for change in PAIRS]
    logits = rng.normal(0, 3, (len(requests), VOCAB)).astype(np.float32)
    controls, sampling, features = make_batch(requests)
    slots, position = jnp.arange(len(requests)), jnp.full(len(requests), len(PROMPT) + len(OUTPUT))
    got = np.asarray(jax.jit(apply_controls)(logits, controls, slots, features, position))
    weights = np.asarray(jax.jit(filtered_weights)(got, sampling))
    drawn = np.asarray(jax.jit(draw, static_argnums=6)(logits, sampling, features, position, controls, slots, None))
    for row, request in enumerate(requests):
        name = f"{PAIRS[row]}"
        expected = reference(logits[row], request)
        assert np.array_equal(np.isneginf(got[row]), np.isneginf(expected)), name
        finite = np.isfinite(expected)
        np.testing.assert_allclose(got[row][finite], expected[finite], rtol=1e-5, atol=1e-6, err_msg=name)
        wanted = probabilities(expected, request.params)
        if request.params.greedy:
            assert drawn[row] == np.argmax(wanted), name
            continue
        np.testing.assert_allclose(weights[row] / weights[row].sum(), wanted, atol=1e-6, err_msg=name)
        assert np.array_equal(weights[row] > 0, wanted > 0) and wanted[drawn[row]] > 0, name


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 30},
        {"top_p": 0.8},
        {"min_p": 0.02},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.8, "presence_penalty": 0.5},
        {"logit_bias": {7: 2.0, 8: -1.5, 100: 1.0}, "min_tokens": 9},
        {"bad_words": ("one",), "allowed_token_ids": tuple(range(120)), "top_k": 50, "top_p": 0.95},
    ],
    ids=str,
)
def test_draws_with_controls_follow_the_distribution(change: dict) -> None:
    """100,352 draws: 64 seeds at 1568 positions. The bound is of p = 0.001."""
    rows, steps = 64, 1568
    logits = np.random.default_rng(4).normal(0, 1.5, VOCAB).astype(np.float32)
    requests = [make_request(SamplingParams(max_tokens=64, seed=seed + 900, **change)) for seed in range(rows)]
    controls, sampling, features = make_batch(requests)
    batch, slots = jnp.broadcast_to(jnp.asarray(logits), (rows, VOCAB)), jnp.arange(rows)
    # Positions only name random numbers here; min_tokens is made to hold at all of them.
    controls = controls._replace(bias_until=jnp.where(controls.bias_until > 0, 2**31 - 1, 0))
    positions = jnp.arange(steps)

    @jax.jit
    def run(controls: Controls) -> jax.Array:
        def at(position: jax.Array) -> jax.Array:
            return draw(batch, sampling, features, jnp.full(rows, position), controls, slots, None)

        return jax.lax.map(at, positions)

    counts = np.bincount(np.asarray(run(controls)).reshape(-1), minlength=VOCAB)
    p = probabilities(reference(logits, requests[0]), requests[0].params)
    assert not counts[p == 0].any()
    expected = p[p > 0] * counts.sum()
    chi, degrees = ((counts[p > 0] - expected) ** 2 / expected).sum(), (p > 0).sum() - 1
    # Wilson and Hilferty's cube root: (chi / degrees)^(1/3) is normal; 3.09 is its quantile for p = 0.001
    z = ((chi / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))
    assert z < 3.09


def test_rows_without_controls_do_not_read_the_tables() -> None:
    """Tables of NaN and nonsense behind rows without features: the same tokens as without tables."""
    rng = np.random.default_rng(1)
    requests = [make_request(SamplingParams(max_tokens=64, temperature=0.0)) for _ in range(16)]
    penalized = make_request(SamplingParams(max_tokens=64, temperature=0.0, repetition_penalty=2.0))
    requests[3] = penalized  # behind and before rows without
    logits = rng.normal(0, 3, (16, VOCAB)).astype(np.float32)
    controls, sampling, features = make_batch(requests)
    poison = controls._replace(
        penalties=controls.penalties.at[jnp.arange(16) != 3].set(jnp.nan), mask=controls.mask * 0
    )
    drawn = jax.jit(draw, static_argnums=6)(logits, sampling, features, jnp.full(16, 11), poison, jnp.arange(16), None)
    expected = np.argmax(logits, axis=1)
    expected[3] = np.argmax(reference(logits[3], penalized))
    assert np.asarray(drawn).tolist() == expected.tolist()


def test_a_row_draws_the_same_wherever_it_sits() -> None:
    rng = np.random.default_rng(2)
    requests = [make_request(SamplingParams(max_tokens=64, seed=i, **PAIRS[i * 5])) for i in range(len(PAIRS) // 5)]
    count = len(requests)
    logits = rng.normal(0, 3, (count, VOCAB)).astype(np.float32)
    position = jnp.asarray(rng.integers(5, 40, count))
    run = jax.jit(draw, static_argnums=6)
    controls, sampling, features = make_batch(requests)
    tokens = np.asarray(run(logits, sampling, features, position, controls, jnp.arange(count), None))
    order = rng.permutation(count)
    moved = jax.tree.map(lambda x: x[order], (logits, sampling, features, position))
    # Rows name their slots: those stay where they are.
    assert np.asarray(run(*moved, controls, jnp.asarray(order), None)).tolist() == tokens[order].tolist()


@pytest.mark.parametrize("count", [0, 3, 8, 13, 24])
def test_rows_behind_the_live_ones_may_hold_anything(count: int) -> None:
    """A few rows at a time, among NaN: the tokens of all rows drawn at once."""
    rng = np.random.default_rng(count)
    requests = [make_request(SamplingParams(max_tokens=64, seed=i, **PAIRS[i * 5])) for i in range(24)]
    controls, sampling, features = make_batch(requests)
    logits = rng.normal(0, 3, (24, VOCAB)).astype(np.float32)
    position = jnp.asarray(rng.integers(5, 40, 24))
    run = jax.jit(draw, static_argnums=6)
    want = run(logits, sampling, features, position, controls, jnp.arange(24), None)
    logits[count:] = np.nan
    got = run(logits, sampling, features, position, controls, jnp.arange(24), None, jnp.int32(count))
    assert got[:count].tolist() == want[:count].tolist()


def test_padding_rows_are_left_alone() -> None:
    request = make_request(SamplingParams(max_tokens=64, temperature=0.0, allowed_token_ids=(5,)))
    controls, sampling, features = make_batch([request])
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), (sampling, features))
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, 9] = 1
    drawn = draw(jnp.asarray(logits), *twice, jnp.array([1, 1]), controls, jnp.array([1, 0]), None)
    assert drawn.tolist() == [9, 5]


def test_counts_follow_the_output() -> None:
    """Tokens recorded on the device make the row that the host makes of the longer output."""
    changes = [
        {"repetition_penalty": 2.0, "bad_words": ("one",)},
        {"frequency_penalty": 1.0},
        {"bad_words": ("one",)},
        {},
    ]
    requests = [make_request(SamplingParams(max_tokens=64, **change), output=[]) for change in changes]
    controls, _, features = make_batch(requests)
    before = controls
    slots = jnp.arange(4)
    for tokens in ([7, 7, 8, 9], [3, 7, 60, 9], [3, 9, 61, 9], [202, 0, 14, 9]):
        controls = jax.jit(count_tokens)(controls, slots, features, jnp.asarray(tokens))
        for request, token in zip(requests, tokens, strict=True):
            request.output_token_ids.append(token)
    none = jax.jit(count_tokens)(controls, jnp.full(4, 4), features, jnp.zeros(4, jnp.int32))
    expected, _, _ = make_batch(requests)
    jax.tree.map(np.testing.assert_array_equal, controls, none)
    for name in ("counts", "recent"):
        for row, request in enumerate(requests):
            used = request.features & (Feature.PENALTIES if name == "counts" else Feature.BAD_WORDS)
            wanted = getattr(expected if used else before, name)[row]
            np.testing.assert_array_equal(getattr(controls, name)[row], wanted, err_msg=f"{name} {row}")


def test_only_the_slot_is_written() -> None:
    controls = jax.tree.map(jnp.asarray, init_controls(VOCAB, CONFIG))
    row = make_row(make_request(SamplingParams(max_tokens=64, **CHANGES[0], **CHANGES[5])), VOCAB, CONFIG)
    written = jax.jit(write_controls)(controls, jnp.int32(3), row)
    for old, new, fresh in zip(controls, written, row, strict=True):
        np.testing.assert_array_equal(new[3], fresh)
        np.testing.assert_array_equal(np.delete(new, 3, 0), np.delete(old, 3, 0))


def test_long_sequences_are_counted_in_32_bits() -> None:
    """More than int16 can hold twice: 20,000 times the same token."""
    config = dataclasses.replace(CONFIG, max_model_len=30_000, num_blocks=2000)
    request = make_request(SamplingParams(max_tokens=None, frequency_penalty=1.0), output=[7] * 20_000)
    assert make_row(request, VOCAB, config).counts[7] == 40_000
    assert make_row(request, VOCAB, CONFIG).counts.dtype == np.int16  # where no sequence is that long


def test_bits_there_and_back() -> None:
    allowed = np.random.default_rng(3).random((5, VOCAB)) < 0.5
    words = np.stack([pack_bits(row) for row in allowed])
    assert words.shape == (5, 7) and words.dtype == np.int32
    np.testing.assert_array_equal(unpack_bits(jnp.asarray(words), VOCAB), allowed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids: 203 is outside the model's vocabulary: ids are 0 to 202"),
        ({"allowed_token_ids": (1, 300)}, "allowed_token_ids: 300 is outside"),
        ({"logit_bias": {999: 1.0}}, "logit_bias: 999 is outside"),
        ({"logit_bias": dict.fromkeys(range(71), 1.0)}, "are 71 entries; at most max_logit_bias=70"),
        ({"logit_bias": dict.fromkeys(range(69), 1.0), "min_tokens": 1}, "are 71 entries"),
        ({"logprobs": 21}, "logprobs: 21 tokens asked for; at most 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: 203 tokens asked for; at most 20"),
        ({"extra_args": {"x": 1}}, "takes none, got .'x'."),
    ],
)
def test_what_the_tables_cannot_hold_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_controls(make_request(SamplingParams(max_tokens=64, **change)), VOCAB, CONFIG)


@pytest.mark.parametrize("words", [[(1, 2)] * 65, [(1, 2, 3, 4, 5)]])
def test_bad_words_that_do_not_fit_are_refused(words: list) -> None:
    request = make_request(SamplingParams())
    request.bad_word_ids = words
    with pytest.raises(ValueError, match=r"bad_words are .* allowed are max_bad_words=64 of max_bad_word_tokens=4"):
        check_controls(request, VOCAB, CONFIG)
