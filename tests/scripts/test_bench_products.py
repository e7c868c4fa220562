"""What bench_products.py counts, and the shapes it takes."""

from __future__ import annotations

import argparse

import pytest
from bench_products import Shape, make_weights, measure, read_shape

from pallas_kernels.cpu.library import instruction_sets


def test_shapes() -> None:
    assert read_shape("960x576") == Shape(960, 576)
    assert read_shape("96x20g") == Shape(96, 20, gated=True) and read_shape("96x20g").features == 48
    for text in ("960", "960x", "97x20g", "axb"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not OUTPUTSxINPUTS"):
            read_shape(text)


@pytest.mark.skipif(not instruction_sets(), reason="the native CPU kernels are not built: no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_row_of_the_table(dtype: str) -> None:
    shapes = [Shape(96, 32), Shape(64, 32, gated=True)]
    [found] = measure(shapes, dtype, layers=2, rows=[3], repeats=1)
    assert found["ms"] >= 0 and found["GFLOP/s"] > 0
    size = sum(make_weights(shape, dtype, 2).nbytes for shape in shapes)
    per_weight = {"float32": 4, "bfloat16": 2, "int8": 1}[dtype]
    assert size >= 2 * (96 + 64) * 32 * per_weight
    assert (size == 2 * (96 + 64) * 32 * per_weight) == (dtype != "int8")  # with scales and sums beside them
