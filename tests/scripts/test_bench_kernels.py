"""The kernel benchmark: its arithmetic, that every contender computes the same, that it says what it leaves out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import bench_kernels
import jax
import kernel_compiling
import kernel_points
import numpy as np
import pytest
from bench_attention import Work, decode_work, prefill_work
from kernel_compiling import list_tiles
from kernel_contenders import (
    Call,
    call_paged,
    start_contiguous,
    start_jax_paged,
    start_paged,
    start_tiles,
    start_torch,
)
from kernel_points import Arrays, Point, Shapes, relative_error
from kernel_tuning import climb, list_neighbours

from jpaged import targets
from jpaged.targets import Target
from pallas_kernels.triton.choices import DecodeTiles, KernelTiles, PrefillTiles, choose_decode, choose_prefill

DECODE = Point(decode_work("3x40"), 16)
PREFILL = Point(prefill_work("2x24"), 16)
CHUNK = Point(prefill_work("1x8@21"), 16)


@pytest.fixture(autouse=True)
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_points, "MOST_LAYERS", 2)


@pytest.mark.parametrize(
    ("start", "points"),
    [
        (start_paged, (DECODE, PREFILL, CHUNK)),
        (lambda arrays: start_contiguous(arrays, "xla"), (DECODE, PREFILL)),
        (lambda arrays: start_jax_paged(arrays, interpret=True), (Point(decode_work("3x64"), 16),)),
        (
            lambda arrays: start_tiles(arrays, KernelTiles(DecodeTiles(32), PrefillTiles(64, 32, 4)), interpret=True),
            (DECODE, CHUNK),
        ),
    ],
    ids=["paged", "contiguous", "jax", "tiles"],
)
def test_contenders_agree_with_the_oracle(start: Callable, points: tuple[Point, ...]) -> None:
    for point in points:
        arrays = Arrays(point, seed=int(np.random.SeedSequence().generate_state(1)[0]))
        rows = np.arange(point.rows)
        started = start(arrays)
        found = started.first()
        assert found.shape == (point.rows, 32, 128)
        assert relative_error(found[rows], arrays.expect(rows)) < 5e-3
        first, last = started.run()
        assert np.isfinite(np.asarray(last, np.float32)).all() and not np.array_equal(first, last)


def test_what_a_contender_cannot_do_is_refused() -> None:
    arrays = Arrays(CHUNK, 0)
    for start in (start_torch, start_jax_paged, lambda arrays: start_contiguous(arrays, "xla")):
        with pytest.raises(ValueError, match=r"no chunks|decode only"):
            start(arrays)


def test_a_wrong_row_is_found() -> None:
    expected = np.ones((2, 3), np.float32)
    assert relative_error(expected, expected) == 0.0
    assert relative_error(expected * 1.1, expected) == pytest.approx(0.1, rel=1e-3)
    assert math.isnan(relative_error(expected * np.nan, expected))


def test_a_point_knows_its_work() -> None:
    """Against counts written out: a decode row of 40 keys; 24 rows that see 1 to 24; 8 that see 22 to 29."""
    kv = 2 * 8 * 128 * 2
    assert DECODE.bytes == 3 * 40 * kv + 2 * 3 * 32 * 128 * 2
    assert DECODE.flops == 3 * 40 * 32 * 128 * 2 * 2
    assert PREFILL.flops == 2 * sum(range(1, 25)) * 32 * 128 * 2 * 2
    assert CHUNK.flops == sum(range(22, 30)) * 32 * 128 * 2 * 2
    assert CHUNK.kv_tokens == 29 and PREFILL.rows == 48
    assert Point(Work("large", 64, 4096), 16).layers == 1


def test_the_sample_is_cheap() -> None:
    arrays = Arrays(DECODE, 0)
    assert arrays.sample()[0] == 2 and sorted(arrays.sample()) == [0, 1, 2]
    assert len(arrays.sample(most_keys=80)) == 2 and len(arrays.sample(most_keys=1)) == 1
    assert len(Arrays(PREFILL, 0).sample(most_rows=5)) == 5


def test_no_point_is_begun_that_time_or_memory_do_not_suffice_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point takes 4 seconds, the next one 6, and then there are not 6 of 15 left."""
    now = iter([0.0, 4.0, 4.0, 4.0, 10.0, 10.0])
    monkeypatch.setattr(bench_kernels, "count_most_tokens", lambda: 100)
    points = [Point(decode_work(text), 16) for text in ("1x50", "3x40", "1x60", "1x70")]
    left_out: list[str] = []
    taken = list(bench_kernels.choose_within(points, 15.0, 0.0, left_out, lambda: next(now)))
    assert taken == [points[0], points[2]]
    assert left_out == [
        "decode 3x40 in blocks of 16: more than 100 tokens in the cache",
        "decode 1x70 in blocks of 16: 15 seconds are over",
    ]


def test_climbing_keeps_the_best_of_each_field() -> None:
    """A bowl whose least point is at 128 keys, 8 warps; what a device refuses is endlessly slow."""

    def cost(sizes: DecodeTiles) -> float:
        return math.inf if sizes.stages > 3 else abs(sizes.span - 128) + abs(sizes.warps - 8) - sizes.stages

    choices = {"span": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4)}
    best, costs = climb(DecodeTiles(64, stages=2), choices, cost)
    assert best == DecodeTiles(128, warps=8, stages=3)
    assert len(costs) == 6 and costs[best] == min(costs.values())


def test_tiles_follow_the_gpu() -> None:
    """Chosen for Hopper where there is no GPU; elsewhere products of 128 numbers leave registers for 32 keys."""
    arrays = Arrays(Point(prefill_work("1x64"), 16), 0)
    q, pages = arrays.q, arrays.layers[0]
    assert choose_prefill(q, pages) == choose_prefill(q, pages, 90) == PrefillTiles(128, 64, 8)
    assert choose_prefill(q, pages, 80) == choose_prefill(q, pages, 120) == PrefillTiles(128, 32, 8, 3)
    assert choose_decode(q, pages).span == 64


@pytest.mark.parametrize("point", [DECODE, CHUNK], ids=["decode", "chunk"])
def test_shapes_are_those_of_the_arrays(point: Point) -> None:
    arrays, shapes = Arrays(point, 0), Shapes(point, jax.default_backend())
    for name in ("q", "batch", "layers"):
        found = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), getattr(arrays, name))
        assert found == getattr(shapes, name)


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> str:
    """This machine's processor in the place of a chip that is not here."""
    monkeypatch.setitem(targets.TARGETS, "v5e", Target("cpu", "", 1, 1, 1 << 30, 1e9, 1e12))
    monkeypatch.setitem(targets.NEEDS, "cpu", ("jax", "none"))
    monkeypatch.setattr(targets, "list_devices", lambda target: jax.devices("cpu"))
    return "v5e"


def test_points_are_compiled_for_a_chip_that_is_not_here(
    chip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A point that does not compile is counted, and is what the status is about."""
    file = tmp_path / "found.json"
    command = ["scripts/bench_kernels.py", "--smoke", "--compile", chip, "--block-size", "16", "--json", str(file)]
    monkeypatch.setattr("sys.argv", command)
    assert bench_kernels.main() == 0
    found = json.loads(file.read_text())
    assert found["machine"]["target"] == chip
    assert [(row["work"], row["points"], row["compiled"]) for row in found["rows"]] == [
        ("decode", 1, 1),
        ("prefill", 2, 2),
    ]
    assert "3 of 3 programs as they should be" in capsys.readouterr().out

    def refuse(shapes: Shapes) -> Call:
        if shapes.point.kind == "decode":
            raise ValueError("not on this chip")
        return call_paged(shapes)

    monkeypatch.setattr(kernel_compiling, "call_paged", refuse)
    assert bench_kernels.main() == 1
    out = capsys.readouterr().out
    assert "failed ValueError: not on this chip" in out and "2 of 3 programs as they should be" in out
    monkeypatch.setattr("sys.argv", [*command[:3], "h100"])
    assert bench_kernels.main() == 2


def test_tiles_that_are_tried_are_compiled_too() -> None:
    """Those that are chosen first, then all that differ from them in one size."""
    names = [name for name, _ in list_tiles(Shapes(DECODE, "cuda"))]
    assert names[0] == "paged" and len(names) == len(set(names)) == 1 + 2 + 2 + 3 + 2 + 2
    assert names[1] == "span 32 programs 2048 least_keys 256 warps 4 stages 3"
    found = list_neighbours(PrefillTiles(64, 64, 4), {"height": (64, 128), "stages": (1, 2, 3)})
    assert found == [PrefillTiles(128, 64, 4), PrefillTiles(64, 64, 4, 1), PrefillTiles(64, 64, 4, 3)]


def test_a_point_that_fails_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    def fail(*_: object) -> dict:
        raise RuntimeError("out of memory")

    file = tmp_path / "found.json"
    command = ["scripts/bench_kernels.py", "--smoke", "--prefill", "--block-size", "16", "--json", str(file)]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(bench_kernels, "measure", fail)
    assert bench_kernels.main() == 1
    assert json.loads(file.read_text())["rows"] == [
        {"work": "decode 2x40", "block": 16, "failed": "RuntimeError: out of memory"}
    ]
    assert "1 of 1 points failed" in capsys.readouterr().err


@pytest.mark.parametrize("options", [(), ("--tune", "--prefill")], ids=["measure", "tune"])
def test_smoke(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["scripts/bench_kernels.py", "--smoke", "--json", str(file), *options])
    assert bench_kernels.main() == 0
    found = json.loads(file.read_text())
    assert found["machine"]["copy GB/s"] >= 0 and found["machine"]["jax"] == jax.__version__
    assert all(0 < row["paged error"] < 5e-3 for row in found["rows"])
    table = capsys.readouterr().out.strip().split("\n\n")[-1].splitlines()
    assert len(table) == 2 + len(found["rows"])
    if options:
        assert [row["tried"] for row in found["rows"]] == [2]  # spans of 32 and 64
    else:
        decode = [row for row in found["rows"] if row["work"].startswith("decode")]
        assert len(decode) == 2 and len(found["rows"]) == 6
        for row in decode:
            assert row["/ contiguous"] == pytest.approx(row["paged us"] / row["xla us"])
            assert row["GB/s"] == pytest.approx(Point(decode_work("2x40"), 16).bytes / row["paged us"] / 1e3)
