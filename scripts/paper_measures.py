"""What reproduce_paper.py measures here with the real kernels and engine, for Fig. 16, 18 and 19.

The attention of Fig. 18 is that of bench_attention.py, the engine's runs are those of bench_sharing.py; their model has
SmolLM2-135M's shape and random weights, so that nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

from bench_attention import Work, runs
from bench_tools import take_turns
from random_model import SMOLLM2_135M, random_model
from sharing_measures import measure_prefix, measure_swap

from jpaged.simulation.paper.block_size import BLOCK_SIZES
from jpaged.simulation.paper.sharing import PAPER16
from pallas_kernels.cpu.library import instruction_sets

HEADS = (3, 3, 64)  # KV heads, query heads of each, head size: SmolLM2's
LAYERS = 8
BATCHES, CONTEXTS = (8, 32), (64, 128, 256)
SWAP_SIZES = (8, 32, 256)


def fast_dtype() -> str:
    """What this machine's native kernels multiply fastest: without products of bfloat16 it has to be widened first."""
    return "bfloat16" if "avx512bf16" in instruction_sets() else "float32"


def kernel_overheads() -> list[dict[str, Any]]:
    """Fig. 18a: microseconds a layer of decode attention with blocks of 16, with each sequence's KV in one block, and
    by XLA over contiguous KV, in turns. Positive "overhead %": blocks of 16 are slower than one block."""
    rows = []
    for batch in BATCHES:
        for context in CONTEXTS:
            work = Work("decode", batch, context)
            paged = runs(work, HEADS, 16, "float32", LAYERS)
            calls = {"paged": paged["paged"], "contiguous": paged["contiguous"]}
            calls["one block"] = runs(work, HEADS, context, "float32", LAYERS)["paged"]
            times = {name: 1e6 * t / LAYERS for name, t in take_turns(calls, repeats=21, calls=5).items()}
            row = {"batch": batch, "context": context, **{f"{name} us": each for name, each in times.items()}}
            rows.append(row | {"overhead %": 100 * (times["paged"] / times["one block"] - 1)})
    return rows


def kernel_by_block_size() -> list[dict[str, Any]]:
    """Microseconds a layer of decode attention, 32 sequences of 256 tokens, by block size; and over the fastest."""
    work = Work("decode", 32, 256)
    calls = {size: runs(work, HEADS, size, "float32", LAYERS)["paged"] for size in BLOCK_SIZES}
    times = {size: 1e6 * t / LAYERS for size, t in take_turns(calls, repeats=21, calls=5).items()}
    best = min(times.values())
    return [{"block size": size, "us": each, "slowdown": each / best} for size, each in times.items()]


def prefix_rows() -> list[dict[str, Any]]:
    """Fig. 16: throughput with a common prefix, shared and not."""
    return measure_prefix(random_model(SMOLLM2_135M, fast_dtype()), list(PAPER16), repeats=3)


def swap_rows() -> list[dict[str, Any]]:
    """Fig. 19: swap beside recompute, by block size."""
    return measure_swap(random_model(SMOLLM2_135M, fast_dtype()), SWAP_SIZES, repeats=2)
