"""The public functions that several backends serve: arguments are checked once, here, and then one backend is called.

"auto" is decided by the platform that is being lowered for: Triton kernels for NVIDIA GPUs, Mosaic kernels for TPUs,
the native kernels for CPUs where they were built, XLA's operations elsewhere. A backend that cannot serve raises;
nothing falls back in silence.

Pages may be wider than heads (`init_pages` makes them so on TPUs): numbers are padded here, and no backend knows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import oracle
from pallas_kernels import pages as xla_pages
from pallas_kernels.batch import PagedBatch
from pallas_kernels.checks import check_attention, check_copy, check_rotary, check_write, fail
from pallas_kernels.cpu import attention as cpu_attention
from pallas_kernels.cpu.library import instruction_sets
from pallas_kernels.pages import KVPages
from pallas_kernels.refusal import refuse
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.tpu import attention as tpu_attention
from pallas_kernels.tpu import pages as tpu_pages
from pallas_kernels.triton import attention as triton_attention
from pallas_kernels.triton import pages as triton_pages
from pallas_kernels.xla import attention as xla_attention


class Backend(NamedTuple):
    """What a backend does. Called with checked arguments, traced or not; what it lacks it refuses with a ValueError.

    Attributes:
        attention: (q [T, Hq, D], pages, batch, spec, sinks f32[Hq] or None) -> (out [T, Hq, D] in q's dtype,
            lse f32[T, Hq], or None unless spec.return_lse).
        write_kv, copy_blocks, rotate_and_write: as the public functions, without `backend`. Where the last is None,
            XLA rotates, in one pass with what made q and k, before write_kv.
    """

    attention: Callable[..., tuple[jax.Array, jax.Array | None]]
    write_kv: Callable[..., KVPages] = xla_pages.write_kv
    copy_blocks: Callable[..., KVPages] = xla_pages.copy_blocks
    rotate_and_write: Callable[..., tuple[KVPages, jax.Array]] | None = None


def _kernels(attention: Callable[..., Any], pages: ModuleType, interpret: bool) -> Backend:
    """A backend of Pallas kernels; `interpret`: on XLA's operations."""
    functions = (attention, pages.write_kv, pages.copy_blocks)
    return Backend(*(partial(function, interpret=interpret) for function in functions))


BACKENDS: dict[str, Backend] = {
    "cpu": Backend(cpu_attention.attention, cpu_attention.write_kv, rotate_and_write=cpu_attention.rotate_and_write),
    "xla": Backend(xla_attention.attention),
    "triton": _kernels(triton_attention.attention, triton_pages, interpret=False),
    "tpu": _kernels(tpu_attention.attention, tpu_pages, interpret=False),
    # For tests, on any device and slowly: NumPy on the host, and the kernels' own steps as XLA's operations.
    "oracle": Backend(oracle.attention),
    "triton_interpreted": _kernels(triton_attention.attention, triton_pages, interpret=True),
    "tpu_interpreted": _kernels(tpu_attention.attention, tpu_pages, interpret=True),
}
FOR_TESTS = ("oracle", "triton_interpreted", "tpu_interpreted")


def _best_backends() -> dict[str, str]:
    """By platform, as JAX names them when it lowers; all others have "xla"."""
    return {"cuda": "triton", "tpu": "tpu", **({"cpu": "cpu"} if instruction_sets() else {})}


def available_backends() -> tuple[str, ...]:
    """Backends that run on the default platform's device, the best first ("auto" is that one). None for tests only."""
    backends = _best_backends()  # loads the library, which wants to be there before XLA starts its threads
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    best = backends.get(platform)
    return (best, "xla") if best else ("xla",)


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
        backend: "auto" (the best for the platform that is lowered for), one of `available_backends()`, or one of
            those for tests: "oracle" (NumPy on the host), "triton_interpreted" and "tpu_interpreted" (on any device).

    Returns:
        out [T, Hq, D] in q's dtype; softmax and sums are float32. Padding rows and rows of empty sequences: zeros.
        With `return_lse` (out, lse f32[T, Hq]): the log of the sum of exp(score), sink included; -inf for padding
        rows and rows of empty sequences.

    Raises:
        ValueError: shapes, dtypes or options that do not fit, an unknown backend, or one that lacks an option.
    """
    check_backend(backend)
    spec = AttentionSpec(scale, window, soft_cap, return_lse)
    check_attention(q, pages, batch, sinks)

    def attend(b: Backend, q: jax.Array, pages: KVPages, batch: PagedBatch, sinks: jax.Array | None) -> Any:
        return b.attention(q, pages, batch, spec, sinks)

    out, lse = _call(backend, attend, _widen(q, pages), pages, batch, sinks)
    out = out[..., : q.shape[2]]
    if lse is None:
        return out
    return out, lse


def write_kv(pages: KVPages, k: jax.Array, v: jax.Array, write_slots: jax.Array, *, backend: str = "auto") -> KVPages:
    """Stores each row's K and V at its slot; in place when the caller donates the pages.

    Args:
        pages: of any dtype; values are rounded to it, or quantised (see `storage`).
        k, v: [T, Hkv, D] of any float dtype.
        write_slots: i32[T], `block * B + offset`. Real rows' slots are distinct; padding rows share block 0,
            where the surviving value is unspecified. A slot outside the pool is dropped.
        backend: as for `paged_attention`; "oracle" writes as "xla" does.

    Returns:
        The pages, same shapes and dtypes.
    """
    check_backend(backend)
    check_write(pages, k, v, write_slots)
    k, v = _widen(k, pages), _widen(v, pages)
    return _call(backend, lambda b, *arrays: b.write_kv(*arrays), pages, k, v, write_slots)


def rotate_and_write(
    pages: KVPages,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    write_slots: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    *,
    backend: str = "auto",
) -> tuple[KVPages, jax.Array]:
    """Rotates q and k (RoPE) and stores k and v, as `write_kv` does, in one pass over them.

    Args:
        pages, v, write_slots, backend: as for `write_kv`.
        q, k: [T, Hq, D] and [T, Hkv, D] of one float dtype, D even; dimension i turns with i + D/2.
        rotary: cos and sin, f32[T, D/2] each.

    Returns:
        (pages, q rotated); q's padding rows, those that go to block 0, are unspecified.
    """
    check_backend(backend)
    check_write(pages, k, v, write_slots)
    check_rotary(q, k, rotary)
    narrow = k.shape[2] != pages.k.shape[3]  # what turns are pairs of a head's own numbers

    def store(
        b: Backend, pages: KVPages, q: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array, rotary: Any
    ) -> tuple[KVPages, jax.Array]:
        if b.rotate_and_write is not None and not narrow:
            return b.rotate_and_write(pages, q, k, v, slots, rotary)
        k, v = _widen(xla_pages.rotate(k, rotary), pages), _widen(v, pages)
        return b.write_kv(pages, k, v, slots), xla_pages.rotate(q, rotary)

    return _call(backend, store, pages, q, k, v, write_slots, rotary)


def copy_blocks(pages: KVPages, src: jax.Array, dst: jax.Array, *, backend: str = "auto") -> KVPages:
    """Copies block `src[i]` over block `dst[i]`, scales included, for each i (copy-on-write); in place if donated.

    Args:
        pages: of any dtype.
        src, dst: i32[C]. All sources are read before any destination is written. `(0, 0)` is a no-op, the
            padding of a shorter list. Destinations other than 0 are distinct.
        backend: as for `paged_attention`; "oracle" copies as "xla" does.
    """
    check_backend(backend)
    check_copy(pages, src, dst)
    return _call(backend, lambda b, *arrays: b.copy_blocks(*arrays), pages, src, dst)


def _widen(x: jax.Array, pages: KVPages) -> jax.Array:
    """x [..., D] with zeros up to the pages' last axis."""
    wider = pages.k.shape[3] - x.shape[-1]
    return jnp.pad(x, (*((0, 0) for _ in x.shape[1:]), (0, wider))) if wider else x


def check_backend(backend: str) -> None:
    """Raises `ValueError` unless `backend` is "auto" or a backend's name."""
    if backend != "auto" and backend not in BACKENDS:
        fail("backend", repr(backend), "one of " + ", ".join(map(repr, ("auto", *BACKENDS))))


def _call(name: str, run: Callable[..., Any], *arrays: Any) -> Any:
    """`run(backend, *arrays)` by the backend of that name; for "auto" by the best of the platform it is lowered for."""
    if name != "auto":
        return run(BACKENDS[name], *arrays)

    def branch(backend: Backend) -> Callable[..., Any]:
        def call(*arrays: Any) -> Any:
            try:
                return run(backend, *arrays)
            except ValueError as error:  # of a kernel that lacks something: only for those who need this kernel
                return refuse(str(error), jax.eval_shape(partial(run, BACKENDS["xla"]), *arrays))

        return call

    branches = {platform: branch(BACKENDS[best]) for platform, best in _best_backends().items()}
    return lax.platform_dependent(*arrays, default=partial(run, BACKENDS["xla"]), **branches)


def describe_backend() -> str:
    """The backend that "auto" is here, and the platform, for people to read."""
    best = available_backends()[0]
    if best == "cpu":
        return f"cpu (native kernels, {instruction_sets()[0]})"
    return f"{best} ({jax.default_backend()})"
