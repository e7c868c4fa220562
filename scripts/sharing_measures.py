"""What sharing and swapping gain, measured with the real engine: for bench_sharing.py and reproduce_paper.py.

Each function makes its engines, lets both sides take turns, and returns a row for each case: column -> number. The
model may have random weights (random_model.py): how long things take does not depend on them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jpaged_models import LoadedModel

from jpaged import LLM, BeamSearchParams, Engine, SamplingParams
from jpaged.bench.timing import median_of_turns
from jpaged.schedule import Load, Save, Schedule
from jpaged.tiers import StoredBlock

Requests = list[tuple[np.ndarray, dict[str, Any]]]  # prompt, options of Engine.add_request
OWN_TOKENS, OUTPUT_TOKENS = 40, 20  # of requests with a common prefix
SWAP_TOKENS = 256  # copied out and back, and computed again
SWAP_PROMPT, SWAP_OUTPUT, SWAP_REQUESTS = 240, 32, 8  # requests that have to make way for each other ...
SWAP_POOL = 2048  # ... since this many tokens are less than they need in the end, whatever the block size


def measure_prefix(
    loaded: LoadedModel, prefixes: Sequence[int], prompts: int = 16, repeats: int = 3
) -> list[dict[str, Any]]:
    """Output tokens a second of prompts that begin with the same tokens, with the prefix cache on and off."""
    rng = np.random.default_rng(0)
    vocab = loaded.config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    rows = []
    for prefix in prefixes:
        head = rng.integers(3, vocab, prefix)
        asked: Requests = [
            (np.concatenate([head, rng.integers(3, vocab, OWN_TOKENS)]), {"params": params}) for _ in range(prompts)
        ]
        engines = {on: make_engine(loaded, enable_prefix_caching=on, max_num_seqs=prompts) for on in (False, True)}
        times = take_rounds({on: partial(run, engine, asked) for on, engine in engines.items()}, repeats)
        off, on = (prompts * OUTPUT_TOKENS / times[each] for each in (False, True))
        row = {"prefix": prefix, "own prompt": OWN_TOKENS, "output": OUTPUT_TOKENS}
        rows.append(row | {"tokens/s, off": off, "tokens/s, on": on, "ratio": on / off})
    return rows


def measure_beams(loaded: LoadedModel, width: int = 4, repeats: int = 3) -> list[dict[str, Any]]:
    """Time and blocks of a beam search beside as many independent greedy requests with prompts of their own.

    Blocks are those in use, mean over the decode steps.
    """
    rng = np.random.default_rng(0)
    sizes = dict(max_model_len=128, max_num_seqs=2 * width, max_num_batched_tokens=256)
    engine = make_engine(loaded, **sizes)
    prompt, output = 64, 64
    greedy = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    beams = BeamSearchParams(beam_width=width, max_tokens=output, ignore_eos=True)
    cases = {f"beam width {width}": [{"beams": beams}], f"{width} greedy": [{"params": greedy}] * width}
    blocks: dict[str, float] = {}

    def serve(name: str) -> float:
        used: list[int] = []
        asked = [(rng.integers(3, loaded.config.vocab_size, prompt), each) for each in cases[name]]
        seconds = run(engine, asked, lambda: used.append(engine.stats().blocks.used))
        blocks[name] = statistics.mean(each for each in used if each)
        return seconds

    times = take_rounds({name: partial(serve, name) for name in cases}, repeats)
    one, other = cases
    return [
        {
            "what": name,
            "ms/token": times[name] / output * 1e3,
            "ratio": times[name] / times[other],
            "blocks": blocks[name],
            "blocks ratio": blocks[name] / blocks[other],
        }
        for name in (one, other)
    ]


def measure_swap(
    loaded: LoadedModel, sizes: Sequence[int], repeats: int = 3, progress: Callable[[str], object] = print
) -> list[dict[str, Any]]:
    """By block size: milliseconds to copy tokens out and back and to compute them again, on an idle engine; and output
    tokens a second of requests that preempt each other, when their blocks are swapped and when they are recomputed."""
    rng = np.random.default_rng(0)
    vocab = loaded.config.vocab_size
    once = {"params": SamplingParams(temperature=0, max_tokens=1)}
    many = {"params": SamplingParams(temperature=0, max_tokens=SWAP_OUTPUT, ignore_eos=True)}
    rows = []
    for size in sizes:
        config = dict(block_size=size, num_blocks=1 + SWAP_POOL // size, max_model_len=512, max_num_seqs=8)
        config |= dict(max_num_batched_tokens=256, watermark=0.0)
        engines = {mode: make_engine(loaded, **config, preemption=mode) for mode in ("swap", "recompute")}
        out, back = time_copies(engines["swap"], SWAP_TOKENS // size, 5 * repeats)
        asked = [(rng.integers(3, vocab, SWAP_PROMPT), many) for _ in range(SWAP_REQUESTS)]
        times = take_rounds({mode: partial(run, engine, asked) for mode, engine in engines.items()}, repeats)
        alone = [(rng.integers(3, vocab, SWAP_TOKENS), once)]
        again = take_rounds({"compute": partial(run, engines["swap"], alone)}, repeats)["compute"]
        rates = {mode: SWAP_REQUESTS * SWAP_OUTPUT / seconds for mode, seconds in times.items()}
        preempted = {mode: engine.stats().preemptions / (repeats + 1) for mode, engine in engines.items()}
        rows.append(
            {
                "block size": size,
                "out ms": out * 1e3,
                "in ms": back * 1e3,
                "compute ms": again * 1e3,
                "compute / copy": again / (out + back),
                "tokens/s, swap": rates["swap"],
                "tokens/s, recompute": rates["recompute"],
                "ratio": rates["swap"] / rates["recompute"],
                "preemptions, swap": preempted["swap"],
                "preemptions, recompute": preempted["recompute"],
            }
        )
        progress(f"swap, block size {size}: {rows[-1]['ratio']:.2f}")
    return rows


def time_copies(engine: Engine, blocks: int, repeats: int) -> tuple[float, float]:
    """Median seconds to copy blocks of an idle engine to the host, until they are there, and back into others."""
    runner = engine.runner
    out, back = [], []
    for turn in range(repeats + 1):
        stored = [StoredBlock(str(i).encode()) for i in range(blocks)]
        start = time.perf_counter()
        runner.save([Save(0, 0, 0, block) for block in stored])
        runner.wait_for_saves()
        middle = time.perf_counter()
        runner.load([Load(1 + i, block) for i, block in enumerate(stored)])
        jax.block_until_ready(runner.state.cache)
        end = time.perf_counter()
        runner.read(runner.dispatch(Schedule(drop=[(0, 0, 1 + i) for i in range(blocks)])))
        if turn:
            out.append(middle - start)
            back.append(end - middle)
    return statistics.median(out), statistics.median(back)


def make_engine(loaded: LoadedModel, **changes: Any) -> Engine:
    """The engine that LLM makes, weights packed where the native kernels are; programs are compiled when needed."""
    sizes = dict(num_blocks=1200, max_model_len=512, max_num_seqs=32, max_num_batched_tokens=512)
    return LLM(loaded, warm_up=False, progress=False, **{**sizes, **changes}).engine


def run(engine: Engine, requests: Requests, after_step: Callable[[], object] = lambda: None) -> float:
    """Seconds until all are done, from an empty prefix cache."""
    engine.reset_prefix_cache()
    start = time.perf_counter()
    for i, (prompt, options) in enumerate(requests):
        engine.add_request(str(i), prompt, **options)
    while engine.has_unfinished():
        engine.step()
        after_step()
    return time.perf_counter() - start


def take_rounds(runs: Mapping[Any, Callable[[], float]], repeats: int) -> dict[Any, float]:
    """Median of the seconds that each says it took, in turns, after a round that does not count."""
    for each in runs.values():
        each()
    return median_of_turns(runs, repeats)
