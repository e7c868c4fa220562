"""Gathers and scatters against NumPy, with indices out of range on both sides."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.indexing import gather, scatter, scatter_add

ROWS, COLUMNS = 5, 3
X = np.arange(ROWS * COLUMNS, dtype=np.int32).reshape(ROWS, COLUMNS)
indices = st.lists(st.integers(-2 * ROWS, 2 * ROWS), min_size=4, max_size=4).map(np.array)


@settings(deadline=None)
@given(indices)
def test_rows(rows: np.ndarray) -> None:
    inside = (rows >= 0) & (rows < ROWS)
    found = np.asarray(gather(jnp.asarray(X), jnp.asarray(rows), fill=-7))
    np.testing.assert_array_equal(found, np.where(inside[:, None], X[np.clip(rows, 0, ROWS - 1)], -7))
    clipped = np.asarray(gather(jnp.asarray(X), jnp.asarray(rows), mode="clip"))
    np.testing.assert_array_equal(clipped, X[np.clip(rows, 0, ROWS - 1)])

    expected = X.copy()
    expected[rows[inside]] = 100
    np.testing.assert_array_equal(np.asarray(scatter(jnp.asarray(X), jnp.asarray(rows), 100)), expected)
    expected = X.copy()
    np.add.at(expected, rows[inside], 2)
    np.testing.assert_array_equal(np.asarray(scatter_add(jnp.asarray(X), jnp.asarray(rows), 2)), expected)


@settings(deadline=None)
@given(indices, indices)
def test_places(rows: np.ndarray, columns: np.ndarray) -> None:
    inside = (rows >= 0) & (rows < ROWS) & (columns >= 0) & (columns < COLUMNS)
    at = (jnp.asarray(rows), jnp.asarray(columns))
    expected = [X[row, column] if there else 0 for row, column, there in zip(rows, columns, inside, strict=True)]
    np.testing.assert_array_equal(np.asarray(gather(jnp.asarray(X), at)), expected)
    changed = X.copy()
    changed[rows[inside], columns[inside]] = 100
    np.testing.assert_array_equal(np.asarray(scatter(jnp.asarray(X), at, 100)), changed)


@pytest.mark.parametrize("take", [gather, lambda x, i: scatter(x, i, 1), lambda x, i: scatter_add(x, i, 1)])
def test_no_index_is_wrapped(take) -> None:
    """The work for negative indices is left out of the program."""
    text = str(jax.make_jaxpr(take)(jnp.zeros(ROWS, jnp.int32), jnp.zeros(2, jnp.int32)))
    assert " lt " not in text and "select_n" not in text and ("gather" in text or "scatter" in text)
