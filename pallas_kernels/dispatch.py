"""`paged_attention`: one public function, checked once, served by one of several backends."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels import oracle
from pallas_kernels.batch import PagedBatch
from pallas_kernels.checks import check_attention, fail
from pallas_kernels.xla import attention as xla_attention

# q [T, Hq, D], k_pages, v_pages [N, Hkv, B, D], batch, scale -> [T, Hq, D] in q's dtype
Backend = Callable[[jax.Array, jax.Array, jax.Array, PagedBatch, float], jax.Array]

BACKENDS: dict[str, Backend] = {
    "auto": xla_attention.attention,
    "xla": xla_attention.attention,
    "oracle": oracle.attention,
}


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    batch: PagedBatch,
    *,
    scale: float,
    backend: str = "auto",
) -> jax.Array:
    """Causal attention of each query row over its sequence's pages.

    A row at position p (row i of a chunk of n rows: `kv_length - n + i`) sees cache positions 0..p: its own K
    and V must already be written (`write_kv`). Slots past a sequence's length and blocks outside its table are
    never attended to, whatever they hold (NaN included).

    Args:
        q: [T, Hq, D], any float dtype.
        k_pages, v_pages: [N, Hkv, B, D], float32, bfloat16, or uint16 (bfloat16 bits); Hq is a multiple of Hkv
            and query head h reads KV head `h // (Hq // Hkv)`.
        batch: which rows belong to which sequence and where its pages are.
        scale: factor on the scores, usually `D ** -0.5`.
        backend: "auto" (the best for the platform), "xla" (portable), "oracle" (NumPy on the host, for tests).

    Returns:
        [T, Hq, D] in q's dtype; softmax and sums are float32. Padding rows and rows of empty sequences: zeros.

    Raises:
        ValueError: shapes or dtypes that do not fit, or an unknown backend.
    """
    if backend not in BACKENDS:
        fail("backend", repr(backend), "one of " + ", ".join(map(repr, BACKENDS)))
    check_attention(q, k_pages, v_pages, batch, scale)
    return BACKENDS[backend](q, k_pages, v_pages, batch, scale)
