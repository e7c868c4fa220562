"""Which sizes of the Triton kernels' tiles are the best for a point: one size after the other, the best one kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from bench_tools import take_turns
from kernel_contenders import start_tiles
from kernel_points import Arrays, Point, relative_error

from jpaged.bench.timing import seconds
from pallas_kernels.triton.choices import KernelTiles, choose_decode, choose_prefill

CHOICES = {
    "decode": {
        "span": (32, 64, 128),
        "warps": (2, 4, 8),
        "stages": (2, 3, 4, 5),
        "programs": (1024, 2048, 4096),
        "least_keys": (128, 256, 512),
    },
    "prefill": {"height": (64, 128), "span": (32, 64, 128), "warps": (4, 8), "stages": (1, 2, 3)},
}
FEW = {"decode": {"span": (32, 64)}, "prefill": {"height": (64, 128)}}
Sizes = TypeVar("Sizes", bound=tuple)


def climb(
    start: Sizes, choices: Mapping[str, Sequence[int]], cost: Callable[[Sizes], float]
) -> tuple[Sizes, dict[Sizes, float]]:
    """The best sizes found by varying one field of a NamedTuple after the other, and every cost that was asked for."""
    costs = {start: cost(start)}
    best = start
    for name, values in choices.items():
        for value in values:
            tried = best._replace(**{name: value})  # type: ignore[attr-defined]
            if tried not in costs:
                costs[tried] = cost(tried)
        best = min(costs, key=lambda sizes: costs[sizes])
    return best, costs


def list_neighbours(start: Sizes, choices: Mapping[str, Sequence[int]]) -> list[Sizes]:
    """All sizes that differ from these in one field."""
    tried = (start._replace(**{name: value}) for name, values in choices.items() for value in values)  # type: ignore[attr-defined]
    return [sizes for sizes in tried if sizes != start]


def tune(point: Point, seed: int, repeats: int, few: bool) -> dict[str, Any]:
    """A row: the best sizes for a point, beside those that are chosen now. Sizes that a GPU refuses, or whose result is
    wrong, count as endlessly slow. Away from a GPU the kernels are interpreted, whose times say nothing."""
    arrays, interpret = Arrays(point, seed), jax.default_backend() != "gpu"
    rows = arrays.sample()
    expected = arrays.expect(rows)
    found: dict[Any, tuple[Any, float]] = {}

    def cost(sizes: Any) -> float:
        started = start_tiles(arrays, KernelTiles(**{point.kind: sizes}), interpret)
        try:
            error = relative_error(started.first()[rows], expected)
        except Exception as refusal:  # of a compiler or a driver: too much shared memory, most of all
            print(f"  {sizes}: {str(refusal).strip().splitlines()[0][:150]}", flush=True)
            return float("inf")
        if not error <= 5e-3:
            print(f"  {sizes}: relative error {error:.1e}", flush=True)
            return float("inf")
        found[sizes] = started.run, error
        calls = max(1, min(100, int(0.005 / seconds(started.run))))
        return take_turns({"run": started.run}, repeats, calls)["run"]

    choose = choose_decode if point.kind == "decode" else choose_prefill
    now = choose(arrays.q, arrays.layers[0])
    best, costs = climb(now, (FEW if few else CHOICES)[point.kind], cost)
    if best not in found:
        raise RuntimeError(f"{point.work.name}: no sizes work, see above")
    times = {sizes: costs[sizes] for sizes in (now, best)}
    if len(times) == 2 and now in found:  # once more, in turns
        times = take_turns({sizes: found[sizes][0] for sizes in (now, best)}, repeats, 3)
    return {
        "work": point.work.name,
        "block": point.block_size,
        "now": show_sizes(now),
        "now us": 1e6 * times[now] / point.layers,
        "best": show_sizes(best),
        "best us": 1e6 * times[best] / point.layers,
        "best / now": times[best] / times[now],
        "tried": len(costs),
        "paged error": found[best][1],
    }


def describe_sizes() -> tuple[str, ...]:
    """The columns of `tune`'s rows that are shown."""
    return ("work", "block", "now", "now us", "best", "best us", "best / now", "tried")


def show_sizes(sizes: Any) -> str:
    return " ".join(f"{name} {value}" for name, value in sizes._asdict().items())
