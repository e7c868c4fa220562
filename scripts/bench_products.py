"""Products by the native CPU kernels, by the number of rows: time, arithmetic and the weights' bytes a second.

    python scripts/bench_products.py
    python scripts/bench_products.py --dtype bfloat16 int8 --shapes 960x576 3072x576g --rows 1 32 512 --json FILE

A shape is outputs x inputs of a weight, and "g" a gated one (half as many results); by default the four of a layer of
SmolLM2-135M, whose times are added. One call goes through --layers weights one after the other, so that they come from
memory as in a model and not from a cache. To compare two versions, run both in turns.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_tools import make_parser, print_table, save_json, take_turns
from jax import lax

from pallas_kernels.cpu.linear import linear, pack_weight, quantize_weight

DTYPES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True)
class Shape:
    """A weight [outputs, inputs]; of a gated one half of the outputs are gates."""

    outputs: int
    inputs: int
    gated: bool = False

    @property
    def features(self) -> int:
        return self.outputs // 2 if self.gated else self.outputs

    def __str__(self) -> str:
        return f"{self.outputs}x{self.inputs}{'g' if self.gated else ''}"


LAYER = (Shape(960, 576), Shape(576, 576), Shape(3072, 576, gated=True), Shape(576, 1536))


def read_shape(text: str) -> Shape:
    """'960x576' or '3072x576g'."""
    match = re.fullmatch(r"(\d+)x(\d+)(g?)", text)
    if not match or (match[3] and int(match[1]) % 2):
        raise argparse.ArgumentTypeError(f"{text!r} is not OUTPUTSxINPUTS, like 960x576, or gated like 3072x576g")
    return Shape(int(match[1]), int(match[2]), bool(match[3]))


def make_weights(shape: Shape, dtype: str, layers: int) -> jax.Array:
    """[layers, panels, steps, P, v] of random numbers, the same in every layer."""
    values = np.random.default_rng(0).standard_normal((shape.outputs, shape.inputs), np.float32)
    if dtype == "int8":
        packed = quantize_weight(values, gated=shape.gated)
    else:
        packed = pack_weight(values.astype(jnp.dtype(dtype)), gated=shape.gated)
    return jnp.asarray(np.broadcast_to(packed, (layers, *packed.shape)))


def prepare(shape: Shape, dtype: str, weights: jax.Array, rows: int) -> Callable[[], jax.Array]:
    """One call: rows of x, bfloat16 for int8 weights, times each layer's weight."""
    of_x = "bfloat16" if dtype == "int8" else dtype
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, shape.inputs)), of_x)

    def multiply(x: jax.Array, weights: jax.Array) -> jax.Array:
        def one(layer: jax.Array, y: jax.Array) -> jax.Array:
            return linear(x, weights, shape.features, gated=shape.gated, layer=layer)

        return lax.fori_loop(0, len(weights), one, jnp.zeros((rows, shape.features), of_x))

    run = jax.jit(multiply)
    return lambda: run(x, weights)


def measure(
    shapes: Sequence[Shape], dtype: str, layers: int, rows: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """The table's rows of one dtype: all shapes together, each timed by itself."""
    seconds, size = dict.fromkeys(rows, 0.0), 0
    for shape in shapes:
        weights = make_weights(shape, dtype, layers)
        size += weights.nbytes
        times = take_turns({str(n): prepare(shape, dtype, weights, n) for n in rows}, repeats)
        for n in rows:
            seconds[n] += times[str(n)]
    per_row = 2 * layers * sum(shape.outputs * shape.inputs for shape in shapes)  # operations
    return [
        {
            "weights": dtype,
            "rows": n,
            "ms": round(1e3 * seconds[n], 1),
            "GFLOP/s": round(1e-9 * n * per_row / seconds[n], 1),
            "GB/s": round(1e-9 * size / seconds[n], 1),
        }
        for n in rows
    ]


def main() -> None:
    parser = make_parser(__doc__)
    shapes = " ".join(map(str, LAYER))
    parser.add_argument("--shapes", type=read_shape, nargs="+", default=LAYER, help=f"default: {shapes}")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"], help="of the weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512], help="default: 1 8 32 512")
    parser.add_argument("--layers", type=int, default=30, help="weights of each shape (default: 30)")
    parser.add_argument("--repeats", type=int, default=9, help="turns of one call each (default: 9)")
    args = parser.parse_args()
    table = [row for dtype in args.dtype for row in measure(args.shapes, dtype, args.layers, args.rows, args.repeats)]
    print_table(list(table[0]), [list(row.values()) for row in table])
    save_json(args.json, table)


if __name__ == "__main__":
    main()
