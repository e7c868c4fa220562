"""Who takes part in the kernel benchmark: our paged attention, attention over contiguous KV, JAX's own paged kernel.

Each is started on a point's arrays and gives two calls: one that is timed and goes through all layers, and one that
gives the first layer's output [T, Hq, D]. What one cannot do it refuses with a ValueError before any device work.
Those that are Pallas kernels can be compiled for a machine that is not here as well: `call_...`, kernel_compiling.py.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from kernel_points import HEAD_DIM, HEADS, SCALE, Arrays, Point, Shapes

from pallas_kernels import AttentionSpec, KVPages, PagedBatch, paged_attention
from pallas_kernels.storage import from_storage
from pallas_kernels.triton.attention import attention as triton_attention
from pallas_kernels.triton.choices import KernelTiles

MOST_SCORES = 4 << 30  # bytes of float32 scores that attention without a kernel may hold


class Started(NamedTuple):
    """A contender on a point's arrays."""

    run: Callable[[], Any]  # through all layers; what it returns is waited for
    first: Callable[[], np.ndarray]  # the first layer's output


Contender = Callable[[Arrays], Started]


class Call(NamedTuple):
    """What a contender compiles, `through_layers(attend)`, and the arguments: arrays, or only their shapes."""

    attend: Callable[..., jax.Array]
    q: Any
    layers: list[Any]
    extra: Any


def list_contenders() -> dict[str, Contender]:
    """Those that can be had here, by name; ours first."""
    found: dict[str, Contender] = {"paged": start_paged}
    if jax.default_backend() == "gpu":
        found["cudnn"] = functools.partial(start_contiguous, implementation="cudnn")
        if importlib.util.find_spec("jax.experimental.pallas.ops.gpu.paged_attention"):
            found["jax paged"] = start_jax_paged
        if importlib.util.find_spec("torch"):
            found["torch"] = start_torch
    found["xla"] = functools.partial(start_contiguous, implementation="xla")
    return found


CONTIGUOUS = ("cudnn", "torch", "xla")


def start_paged(arrays: Arrays) -> Started:
    """`pallas_kernels.paged_attention`, by the platform's kernels."""
    return _start(*call_paged(arrays))


def call_paged(arrays: Arrays | Shapes) -> Call:
    return Call(_paged, arrays.q, arrays.layers, arrays.batch)


def start_tiles(arrays: Arrays, tiles: KernelTiles, interpret: bool) -> Started:
    """The Triton kernels with tiles of these sizes."""
    return _start(*call_tiles(arrays, tiles, interpret))


def call_tiles(arrays: Arrays | Shapes, tiles: KernelTiles, interpret: bool) -> Call:
    def attend(q: jax.Array, pages: KVPages, batch: PagedBatch) -> jax.Array:
        return triton_attention(q, pages, batch, AttentionSpec(SCALE), None, interpret, tiles)[0]

    return Call(attend, arrays.q, arrays.layers, arrays.batch)


def start_contiguous(arrays: Arrays, implementation: str) -> Started:
    """`jax.nn.dot_product_attention`."""
    point = arrays.point
    _refuse_chunks(point)
    if implementation == "xla" and (held := 4 * HEADS * point.rows * point.work.tokens) > MOST_SCORES:
        raise ValueError(f"scores of {held >> 20} MiB, more than {MOST_SCORES >> 20}")
    attend = _contiguous(implementation, point.kind == "prefill")
    each = point.work.new or 1
    started = _start(attend, arrays.q.reshape(-1, each, HEADS, HEAD_DIM), arrays.contiguous, None)
    return started._replace(first=lambda: started.first().reshape(arrays.q.shape))


def start_jax_paged(arrays: Arrays, interpret: bool = False) -> Started:
    """`jax.experimental.pallas.ops.gpu.paged_attention`, decode only.

    It works on as many keys at a time as by default with blocks of 16: more do not fit in shared memory. It has no
    scale, so the queries of the call that is checked are scaled before.
    """
    call = call_jax_paged(arrays, interpret)
    started = _start(*call)
    scaled = _start(*call._replace(q=arrays.q * SCALE, layers=call.layers[:1]))
    return Started(started.run, scaled.first)


def call_jax_paged(arrays: Arrays | Shapes, interpret: bool = False) -> Call:
    from jax.experimental.pallas.ops.gpu import paged_attention as theirs

    point = arrays.point
    if point.kind == "prefill":
        raise ValueError("decode only")
    columns = arrays.batch.block_tables.shape[1]
    splits = next(n for n in (16, 8, 4, 2, 1) if columns % n == 0)
    at_once = max(1, 128 // point.block_size)
    while columns // splits % at_once:
        at_once //= 2
    turn = functools.partial(jax.eval_shape, _heads_first) if isinstance(arrays, Shapes) else _heads_first
    attend = _jax_paged(theirs.paged_attention, splits, at_once, interpret)
    return Call(attend, arrays.q, [turn(pages) for pages in arrays.layers], arrays.batch)


def start_torch(arrays: Arrays) -> Started:
    """`torch.nn.functional.scaled_dot_product_attention` on the same memory."""
    point = arrays.point
    _refuse_chunks(point)
    import torch

    if not torch.cuda.is_available():
        raise ValueError("this torch sees no GPU")
    each = point.work.new or 1
    q = torch.from_dlpack(arrays.q.reshape(-1, each, HEADS, HEAD_DIM)).transpose(1, 2)
    layers = [tuple(torch.from_dlpack(x).transpose(1, 2) for x in kv) for kv in arrays.contiguous]

    def attend(kv: tuple[Any, Any]) -> Any:
        causal = point.kind == "prefill"
        return torch.nn.functional.scaled_dot_product_attention(q, *kv, is_causal=causal, scale=SCALE, enable_gqa=True)

    def run() -> None:
        for kv in layers:
            attend(kv)
        torch.cuda.synchronize()

    def first() -> np.ndarray:
        return attend(layers[0]).transpose(1, 2).reshape(arrays.q.shape).float().cpu().numpy()

    return Started(run, first)


# Functions of a module, or kept: what is traced for one point is found again at the next of the same shapes.


def _paged(q: jax.Array, pages: KVPages, batch: PagedBatch) -> jax.Array:
    return paged_attention(q, pages, batch, scale=SCALE)


@functools.cache
def _contiguous(implementation: Any, causal: bool) -> Callable[..., jax.Array]:
    def attend(q: jax.Array, kv: tuple[jax.Array, jax.Array], _: None) -> jax.Array:
        return jax.nn.dot_product_attention(q, *kv, scale=SCALE, is_causal=causal, implementation=implementation)

    return attend


@functools.cache
def _jax_paged(kernel: Any, splits: int, at_once: int, interpret: bool) -> Callable[..., jax.Array]:
    def attend(q: jax.Array, pages: tuple[jax.Array, jax.Array], batch: PagedBatch) -> jax.Array:
        return kernel(
            q,
            *pages,
            batch.block_tables,
            batch.kv_lengths,
            k_splits=splits,
            pages_per_compute_block=at_once,
            interpret=interpret,
        )

    return attend


@functools.cache
def through_layers(attend: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """One program: each layer's output is the next one's query. Returns the first layer's output and the last one's."""

    def run(q: jax.Array, layers: list[Any], extra: Any) -> tuple[jax.Array, jax.Array]:
        first = out = attend(q, layers[0], extra)
        for layer in layers[1:]:
            out = attend(out, layer, extra)
        return first, out

    return jax.jit(run)


def _start(attend: Callable[..., jax.Array], q: jax.Array, layers: list[Any], extra: Any) -> Started:
    program = through_layers(attend)
    return Started(lambda: program(q, layers, extra), lambda: np.asarray(program(q, layers, extra)[0]))


@jax.jit
def _heads_first(pages: KVPages) -> tuple[jax.Array, jax.Array]:
    k, v = (from_storage(pool, jnp.dtype(jnp.bfloat16)).swapaxes(0, 1) for pool in pages[:2])
    return k, v


def _refuse_chunks(point: Point) -> None:
    if point.kind == "prefill" and point.work.offset:
        raise ValueError("no chunks after cached tokens")
