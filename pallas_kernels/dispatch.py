"""`paged_attention`: one public function, checked once, served by one of several backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import jax

from pallas_kernels import oracle
from pallas_kernels.batch import PagedBatch
from pallas_kernels.checks import check_attention, fail
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.xla import attention as xla_attention

# q [T, Hq, D], pages, batch, spec, sinks f32[Hq] or None -> (out [T, Hq, D] in q's dtype,
# lse f32[T, Hq], or None unless spec.return_lse). Called with checked arguments, traced or not. A backend that
# lacks something raises a ValueError that says what.
Backend = Callable[
    [jax.Array, KVPages, PagedBatch, AttentionSpec, jax.Array | None], tuple[jax.Array, jax.Array | None]
]

BACKENDS: dict[str, Backend] = {
    "xla": xla_attention.attention,
    "oracle": oracle.attention,
}


def available_backends() -> tuple[str, ...]:
    """Backends that run on the default platform's device, the best first ("auto" is that one). No oracle."""
    return ("xla",)


@overload
def paged_attention(
    q: jax.Array,
    pages: KVPages,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> jax.Array: ...


@overload
def paged_attention(
    q: jax.Array,
    pages: KVPages,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]: ...


def paged_attention(
    q: jax.Array,
    pages: KVPages,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal attention of each query row over its sequence's pages.

    A row at position p (row i of a chunk of n rows: `kv_length - n + i`) sees cache positions 0..p, or the last
    `window` of them, itself included: its own K and V must already be written (`write_kv`). Slots past a sequence's
    length or before all its rows' windows, and blocks outside its table, are never attended to, whatever they hold
    (NaN included).

    Args:
        q: [T, Hq, D], float32, bfloat16 or float16.
        pages: Hq is a multiple of their Hkv, and query head h reads KV head `h // (Hq // Hkv)`.
        batch: which rows belong to which sequence and where its pages are.
        scale: factor on the scores, usually `D ** -0.5`.
        window: most positions a row sees; the work grows with it, not with the sequence. None: no limit.
        soft_cap: scores become `soft_cap * tanh(scale * q . k / soft_cap)`. None: they stay.
        sinks: f32[Hq], one more logit a query head in the softmax's denominator, without a value.
        return_lse: return the log of the softmax's denominator too.
        backend: "auto" (the best for the platform), "oracle" (NumPy on the host, for tests), or one of
            `available_backends()`.

    Returns:
        out [T, Hq, D] in q's dtype; softmax and sums are float32. Padding rows and rows of empty sequences: zeros.
        With `return_lse` (out, lse f32[T, Hq]): the log of the sum of exp(score), sink included; -inf for padding
        rows and rows of empty sequences.

    Raises:
        ValueError: shapes, dtypes or options that do not fit, an unknown backend, or one that lacks an option.
    """
    if backend != "auto" and backend not in BACKENDS:
        fail("backend", repr(backend), "one of " + ", ".join(map(repr, ("auto", *BACKENDS))))
    spec = AttentionSpec(scale, window, soft_cap, return_lse)
    check_attention(q, pages, batch, sinks)
    name = available_backends()[0] if backend == "auto" else backend
    out, lse = BACKENDS[name](q, pages, batch, spec, sinks)
    if lse is None:
        return out
    return out, lse


def describe_backend() -> str:
    """The backend that "auto" is here, and the platform, for people to read: "xla (cpu)"."""
    return f"{available_backends()[0]} ({jax.default_backend()})"
