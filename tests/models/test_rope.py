"""Rotary embeddings: properties, and the closed forms of the scalings."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jpaged_models.errors import ConfigError
from jpaged_models.rope import RopeConfig, inverse_frequencies, rotary_table

from pallas_kernels import rotate

D = 16
LLAMA3 = RopeConfig(
    theta=500000.0,
    kind="llama3",
    factor=8.0,
    original_max_positions=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)


def random(*shape: int) -> np.ndarray:
    return np.random.RandomState(0).standard_normal(shape).astype(np.float32)


def test_scores_depend_on_the_distance_only() -> None:
    q, k = random(1, 1, D), random(1, 1, D)

    def score(at: int, back: int) -> float:
        turned = [rotate(x, rotary_table(RopeConfig(), D, jnp.asarray([p]))) for x, p in ((q, at), (k, at - back))]
        return float(jnp.vdot(*turned))

    assert score(5, 3) == pytest.approx(score(105, 3), rel=1e-4)
    assert score(5, 3) != pytest.approx(score(5, 4), rel=1e-2)


def test_position_zero_and_lengths_are_kept() -> None:
    x = random(3, 2, D)
    table = rotary_table(RopeConfig(), D, jnp.asarray([0, 7, 1000]))
    y = np.asarray(rotate(x, table))
    np.testing.assert_array_equal(y[0], x[0])
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


def test_rotation_against_complex_numbers() -> None:
    """Dimension i and i + D/2 are the real and imaginary part of one number."""
    x, positions = random(4, 2, D).astype(np.float64), np.array([0, 1, 50, 511])
    frequencies = 10000.0 ** (-np.arange(0, D, 2) / D)
    turned = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * np.exp(1j * positions[:, None, None] * frequencies)
    got = rotate(x.astype(np.float32), rotary_table(RopeConfig(), D, jnp.asarray(positions)))
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=1e-3)


def test_llama3_keeps_fast_waves_and_stretches_slow_ones() -> None:
    plain, scaled = (inverse_frequencies(dataclasses.replace(LLAMA3, kind=k), 128) for k in ("default", "llama3"))
    wavelength = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)
    assert np.all(np.diff(scaled) < 0)


def test_yarn_keeps_fast_waves_and_stretches_slow_ones() -> None:
    rope = RopeConfig(theta=10000.0, kind="yarn", factor=4.0, original_max_positions=4096)
    plain, scaled = (inverse_frequencies(dataclasses.replace(rope, kind=k), 128) for k in ("default", "yarn"))
    turns = 4096 * plain / (2 * np.pi)
    np.testing.assert_allclose(scaled[turns > 40], plain[turns > 40], rtol=1e-6)
    np.testing.assert_allclose(scaled[turns < 0.8], plain[turns < 0.8] / 4, rtol=1e-6)


def test_dynamic_is_a_function_of_the_position_alone() -> None:
    """Same rotation for a position whatever else is in the batch; plain within the trained context."""
    rope = RopeConfig(kind="dynamic", factor=2.0, original_max_positions=32)
    together = rotary_table(rope, D, jnp.asarray([3, 31, 40, 100]))
    for i, position in enumerate([3, 31, 40, 100]):
        for a, b in zip(together, rotary_table(rope, D, jnp.asarray([position])), strict=True):
            np.testing.assert_array_equal(a[i], b[0])
    plain = rotary_table(RopeConfig(), D, jnp.asarray([3, 31]))
    np.testing.assert_allclose(together[0][:2], plain[0], atol=1e-6)
    # closed form of the NTK base for length 101
    base = 10000.0 * (2 * 101 / 32 - 1) ** (D / (D - 2))
    np.testing.assert_allclose(together[0][3], np.cos(100 * base ** (-np.arange(0, D, 2) / D)), atol=1e-4)


def test_factors_divide() -> None:
    rope = RopeConfig(kind="factors", factors=tuple(float(i + 1) for i in range(D // 2)))
    np.testing.assert_allclose(
        inverse_frequencies(rope, D) * np.arange(1, D // 2 + 1),
        inverse_frequencies(RopeConfig(), D),
        rtol=1e-6,
    )


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="'spiral' is not supported; allowed: default"):
        inverse_frequencies(RopeConfig(kind="spiral"), D)
