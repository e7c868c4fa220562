"""Paged attention beside plain XLA attention over contiguous KV of the same sizes, in turns.

    python scripts/bench_attention.py
    python scripts/bench_attention.py --dtype int8 fp8 --decode 32x1024 --window 256
    python scripts/bench_attention.py --heads 8x4x128 --dtype bfloat16 --decode 8x1024 64x512u --prefill 1x512@1024

Times are per layer: one jitted call goes through --layers layers, each with pools of its own, so that no cache keeps
a layer's KV from one call to the next, as in a model. Contiguous KV is [sequences, kv_heads, tokens, head_dim], as
long as the longest sequence; its bfloat16 version multiplies bfloat16 and asks for float32. For int8 and fp8 pages the
queries and the contiguous KV are float32. Block tables are shuffled. "u" after a decode case: lengths uniform between
1 and the given one; the contiguous version then pays for the longest, the paged one for the tokens present.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_tools import describe_machine, make_parser, print_table, save_json, take_turns

from pallas_kernels import KV_DTYPES, PagedBatch, init_pages, paged_attention, write_kv


@dataclass(frozen=True)
class Work:
    """`sequences` with `offset + new` tokens each, of which `new` are this step's rows (0: a decode batch)."""

    name: str
    sequences: int
    offset: int
    new: int = 0
    uneven: bool = False

    @property
    def tokens(self) -> int:
        return self.offset + self.new


def decode_work(text: str) -> Work:
    """'32x256' or '32x256u': sequences x tokens."""
    match = re.fullmatch(r"(\d+)x(\d+)(u?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not SEQUENCESxTOKENS, like 32x256 or 32x256u")
    return Work(f"decode {text}", int(match[1]), int(match[2]), uneven=bool(match[3]))


def prefill_work(text: str) -> Work:
    """'8x64' or '1x512@1024': sequences x new tokens @ tokens already cached."""
    match = re.fullmatch(r"(\d+)x(\d+)(?:@(\d+))?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not SEQUENCESxTOKENS[@CACHED], like 8x64 or 1x512@1024")
    return Work(f"prefill {text}", int(match[1]), int(match[3] or 0), int(match[2]))


def head_shape(text: str) -> tuple[int, int, int]:
    """'3x3x64': KV heads x query heads per KV head x head size."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not KV_HEADSxGROUPxHEAD_DIM, like 3x3x64")
    return int(match[1]), int(match[2]), int(match[3])


def contiguous_attention(
    q: jax.Array, kv: tuple[jax.Array, jax.Array], lengths: jax.Array, work: Work, window: int | None
) -> jax.Array:
    """q [T, Hq, D], k and v [R, Hkv, L, D], lengths i32[R] -> [T, Hq, D]; products in the dtype of k and v."""
    k, v = kv
    sequences, kv_heads, longest, head_dim = k.shape
    each = q.shape[0] // sequences
    grouped = q.reshape(sequences, each, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4).astype(k.dtype)
    scores = jnp.einsum("rhgqd,rhld->rhgql", grouped, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    position = lengths[:, None] - each + jnp.arange(each)
    position = position[:, None, None, :, None]
    visible = jnp.arange(longest) <= position
    if window is not None:
        visible &= jnp.arange(longest) > position - window
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
    out = jnp.einsum("rhgql,rhld->rhgqd", weights, v, preferred_element_type=jnp.float32)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def through_layers(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """One jitted call: each layer's output is the next one's query."""

    def run(q: jax.Array, layers: list[Any], extra: Any) -> jax.Array:
        for kv in layers:
            q = attend(q, kv, extra)
        return q

    return jax.jit(run)


def runs(
    work: Work,
    heads: tuple[int, int, int],
    block: int,
    kv_dtype: str,
    layers: int,
    window: int | None = None,
    backend: str = "auto",
) -> dict[str, Callable[[], Any]]:
    """The two calls to compare, on the same values."""
    dtype = jnp.dtype("float32" if kv_dtype in ("int8", "fp8") else kv_dtype)
    kv_heads, group, head_dim = heads
    rng = np.random.default_rng(0)
    columns = -(-work.tokens // block)
    lengths = np.full(work.sequences, work.tokens, np.int32)
    if work.uneven:
        lengths = rng.integers(1, work.tokens + 1, work.sequences).astype(np.int32)
    tables = 1 + rng.permutation(work.sequences * columns).astype(np.int32).reshape(work.sequences, columns)
    each = work.new or 1
    rows = work.sequences * each
    batch = PagedBatch(tables, lengths, np.zeros(rows, np.int32))
    if work.new:
        starts = np.arange(work.sequences + 1, dtype=np.int32) * each
        batch = batch._replace(query_starts=starts, num_decode=np.int32(0))
    q = jnp.asarray(rng.standard_normal((rows, kv_heads * group, head_dim)), dtype)
    blocks = tables.size + 1
    fill = jax.jit(write_kv, donate_argnums=0)
    every_slot = np.arange(blocks * block, dtype=np.int32)

    paged, contiguous = [], []
    for _ in range(layers):
        kv = rng.standard_normal((2, blocks, kv_heads, block, head_dim), np.float32)
        tokens = kv.swapaxes(2, 3).reshape(2, -1, kv_heads, head_dim)
        paged.append(fill(init_pages(blocks, kv_heads, block, head_dim, kv_dtype), *tokens, every_slot))
        rowwise = kv[:, tables].swapaxes(2, 3).reshape(2, work.sequences, kv_heads, -1, head_dim)
        contiguous.append(tuple(jnp.asarray(x, dtype) for x in rowwise))
    attend = through_layers(partial(paged_attention, scale=head_dim**-0.5, window=window, backend=backend))
    beside = through_layers(partial(contiguous_attention, work=work, window=window))
    device_batch = jax.tree.map(jnp.asarray, batch)
    return {
        "paged": lambda: attend(q, paged, device_batch),
        "contiguous": lambda: beside(q, contiguous, device_batch.kv_lengths),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--heads", nargs="+", type=head_shape, default=[(3, 3, 64)], help="KV_HEADSxGROUPxHEAD_DIM (default: 3x3x64)"
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", nargs="+", choices=KV_DTYPES, default=["float32", "bfloat16"], help="of the pages")
    parser.add_argument("--window", type=int, metavar="N", help="most tokens a row sees (default: all)")
    parser.add_argument("--backend", default="auto", help="of paged_attention (default: auto)")
    parser.add_argument(
        "--decode",
        nargs="*",
        type=decode_work,
        default=[decode_work(text) for text in ("8x256", "8x2048", "32x256", "32x1024u", "256x128")],
        help="decode cases, SEQUENCESxTOKENS with u for uneven lengths",
    )
    parser.add_argument(
        "--prefill",
        nargs="*",
        type=prefill_work,
        default=[prefill_work(text) for text in ("1x512", "8x64", "1x512@1024")],
        help="prefill cases, SEQUENCESxNEW_TOKENS[@CACHED]",
    )
    parser.add_argument("--layers", type=int, default=4, help="layers a call goes through (default: 4)")
    parser.add_argument("--repeats", type=int, default=21, help="calls of each, in turns; medians are shown")
    args = parser.parse_args()

    rows = []
    for heads in args.heads:
        for work in [*args.decode, *args.prefill]:
            for dtype in args.dtype:
                calls = runs(work, heads, args.block_size, dtype, args.layers, args.window, args.backend)
                times = {name: 1e3 * t / args.layers for name, t in take_turns(calls, args.repeats).items()}
                shape = "x".join(map(str, heads))
                ratio = times["paged"] / times["contiguous"]
                rows.append((work.name, shape, dtype, times["paged"], times["contiguous"], ratio))
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['cores']} cores, JAX {machine['jax']}; block size {args.block_size}")
    header = ("work", "heads", "dtype", "paged ms/layer", "contiguous ms/layer", "ratio")
    print_table(header, rows)
    save_json(args.json, [dict(zip(header, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
