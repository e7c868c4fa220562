"""Runs of equal layers, which a decoder goes through in a loop instead of having each in its program.

A program with one layer in it compiles in two thirds of the time of one with thirty (the rest of a step is much of it).
The layers of a run lie in one array for each parameter, ``[layers, ...]``, and their pages in one pool; that costs
nothing only where products take "which layer" as an operand, as those with packed weights do: elsewhere XLA copies a
layer's weights out of the array before it multiplies with them. So only packed models have runs of more than one.
"""

from itertools import groupby

from .config import ModelConfig


def find_runs(config: ModelConfig, stacked: bool) -> tuple[int, ...]:
    """Layers of each run: neighbours with the same window if ``stacked``, else every layer by itself."""
    if not stacked:
        return (1,) * config.num_layers
    return tuple(len(list(equal)) for _, equal in groupby(list_windows(config)))


def list_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """The window of every layer; None: it sees all."""
    return config.windows or (None,) * config.num_layers
