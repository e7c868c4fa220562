"""The kernel benchmark's Pallas kernels compiled for a machine that is not here: at which points they compile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from kernel_contenders import Call, call_jax_paged, call_paged, call_tiles, through_layers
from kernel_points import Point, Shapes
from kernel_tuning import CHOICES, list_neighbours, show_sizes

from jpaged.targets import Target, inspect, lower_for
from pallas_kernels.triton.choices import KernelTiles, choose_decode, choose_prefill

OURS = "paged"


def compile_points(points: Iterable[Point], target: Target, tune: bool) -> Iterator[dict[str, Any]]:
    """A row for each point and kernel, or for each point and each size of our tiles that --tune begins with.

    Of a point's layers, which differ in nothing, one is compiled. "failed" is why a program does not compile.
    """
    for point in points:
        shapes = Shapes(point, target.platform)
        for name, make in list_tiles(shapes) if tune else list_kernels(shapes, target):
            row = {"work": point.work.name, "block": point.block_size, "kernel": name}
            started = time.perf_counter()
            try:
                call = make()
                lowered = lower_for(target, through_layers(call.attend), call.q, call.layers[:1], call.extra)
                report = inspect(lowered, lowered.compile(), ())
            except Exception as error:  # a compiler's refusals have no class in common
                yield {**row, "failed": f"{type(error).__name__}: {str(error).strip()[:300]}"}
                continue
            took = round(time.perf_counter() - started, 2)
            yield {**row, "calls": report.kernels, "temporaries MiB": report.temporary_bytes / 2**20, "seconds": took}


def list_kernels(shapes: Shapes, target: Target) -> Iterator[tuple[str, Callable[[], Call]]]:
    yield OURS, partial(call_paged, shapes)
    if target.platform == "cuda" and shapes.point.kind == "decode":
        yield "jax paged", partial(call_jax_paged, shapes)


def list_tiles(shapes: Shapes) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Those chosen, which must compile, and each size in turn changed to each of its choices."""
    kind, arguments = shapes.point.kind, (shapes.q, shapes.layers[0])
    now: Any = choose_decode(*arguments) if kind == "decode" else choose_prefill(*arguments)
    for sizes in (now, *list_neighbours(now, CHOICES[kind])):
        name = OURS if sizes == now else show_sizes(sizes)
        yield name, partial(call_tiles, shapes, KernelTiles(**{kind: sizes}), interpret=False)


def summarize(rows: Sequence[dict[str, Any]], tune: bool) -> list[dict[str, Any]]:
    """A row for each kernel, kind of work and block size: at how many points it compiles, and the most of all of them.

    tune: each kind of work and size of tiles has a row instead.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        kind = row["work"].split()[0]
        groups.setdefault((row["kernel"], kind, None if tune else row["block"]), []).append(row)
    table = []
    for (kernel, kind, block), group in groups.items():
        made = [row for row in group if "failed" not in row]
        table.append(
            {
                "kernel": kernel,
                "work": kind,
                **({} if tune else {"block": block}),
                "points": len(group),
                "compiled": len(made),
                "calls": min((row["calls"] for row in made), default=None),
                "temporaries MiB": max((round(row["temporaries MiB"], 1) for row in made), default=None),
                "seconds": round(sum(row["seconds"] for row in made), 1),
            }
        )
    return table
