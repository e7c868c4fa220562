"""Work on the few rows of a batch that need it, with a cost that follows their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.indexing import scatter

State = TypeVar("State")


def over_tiles(mask: jax.Array, tile: int, body: Callable[[jax.Array, State], State], state: State) -> State:
    """Fold `body(rows i32[tile], state)` over the rows set in `mask` bool[R], in order, `tile` at a time.

    The last tile is filled up with R, one past the end, for `mode="drop"` and `mode="fill"` to leave out. The
    trip count is traced: no row set, no iteration, and no copy of `state` as at a branch.
    """
    num_rows = mask.shape[0]
    count = jnp.cumsum(mask, dtype=jnp.int32)
    rows = jnp.full(-(-num_rows // tile) * tile, num_rows, jnp.int32)
    place = jnp.where(mask, count - 1, rows.shape[0])
    rows = scatter(rows, place, jnp.arange(num_rows, dtype=jnp.int32))

    def step(i: jax.Array, state: State) -> State:
        return body(lax.dynamic_slice(rows, (i * tile,), (tile,)), state)

    return lax.fori_loop(0, lax.div(count[-1] + tile - 1, tile), step, state)
