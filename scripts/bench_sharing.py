"""What sharing saves: blocks of parallel sampling and beam search, and throughput of prompts with a common prefix.

And what it costs to bring a preempted sequence back: copied to the host and back, or computed again.

    python scripts/bench_sharing.py saving MODEL --lengths sharegpt_lengths.csv --requests 40
    python scripts/bench_sharing.py prefix --dtype bfloat16
    python scripts/bench_sharing.py beams --dtype bfloat16
    python scripts/bench_sharing.py swap --dtype bfloat16

saving  Share of blocks saved: (blocks without sharing - blocks used) / blocks without sharing, mean over steps, as in
        Fig. 15 of the PagedAttention paper, whose ranges stand beside. Lengths from a CSV file, or, without one, drawn
        like the paper's Alpaca (mean 19.3 tokens in, 58.5 out; geometric). Prompts of random tokens share nothing.
prefix  Output tokens a second of prompts that begin with the same 80 or 341 tokens (Fig. 16), with the prefix cache
        on and off, in turns; a random-weight model of SmolLM2-135M's shape.
beams   Milliseconds a token of beam width 4 and of 4 independent greedy requests, in turns; same model.
swap    By block size (Fig. 19): milliseconds to copy 256 tokens to the host (out) and back (in), and to compute them
        again; and output tokens a second of requests that preempt each other for want of memory, in turns; same model.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time

import jax
import numpy as np
from bench_tools import make_parser, print_table, save_json
from jpaged_models import load_model
from random_model import SMOLLM2_135M, random_model

from jpaged import BeamSearchParams, Engine, EngineConfig, SamplingParams
from jpaged.compilation_cache import enable_compilation_cache
from jpaged.schedule import Load, Save, Schedule
from jpaged.tiers import StoredBlock

PAPER = {"parallel": {"alpaca": "6.1 to 9.8", "lengths": "16.2 to 30.5"}}
PAPER["beam"] = {"alpaca": "37.6 to 55.2", "lengths": "44.3 to 66.3"}


def main() -> None:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    saving = commands.add_parser("saving")
    saving.add_argument("model", help="a small real model: how long beams stay together depends on it")
    saving.add_argument("--lengths", help="CSV file with the columns prompt_tokens, output_tokens")
    saving.add_argument("--requests", type=int, default=40)
    saving.add_argument("--max-len", type=int, default=512, help="longer requests are left out (default: 512)")
    saving.add_argument("--width", type=int, nargs="+", default=[2, 4, 6], help="outputs, and beams")
    for name in ("prefix", "beams"):
        command = commands.add_parser(name)
        command.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
        command.add_argument("--repeats", type=int, default=3)
        command.add_argument("--prompts", type=int, default=16, help="of a pass of `prefix` (default: 16)")
        command.add_argument("--prefix", type=int, nargs="+", default=[80, 341], help="tokens in common, of `prefix`")
    swap = commands.add_parser("swap")
    swap.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    swap.add_argument("--block-size", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    swap.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    measures = {"saving": measure_saving, "prefix": measure_prefix, "beams": measure_beams, "swap": measure_swap}
    header, rows = measures[args.command](args)
    print_table(header, rows)
    save_json(args.json, [dict(zip(header, row, strict=True)) for row in rows])


def measure_saving(args: argparse.Namespace) -> tuple[list[str], list[list]]:
    loaded = load_model(args.model, "float32")
    rng = np.random.default_rng(0)
    if args.lengths:
        with open(args.lengths, newline="") as file:
            lengths = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    else:
        lengths = list(zip(rng.geometric(1 / 19.3, 10_000), rng.geometric(1 / 58.5, 10_000), strict=True))
    lengths = [(p, o) for p, o in lengths if p and o and p + o <= args.max_len][: args.requests]
    kind = "lengths" if args.lengths else "alpaca"
    rows = []
    for method in ("parallel", "beam"):
        for width in args.width:
            engine = Engine(
                loaded,
                EngineConfig(num_blocks=6000, max_model_len=args.max_len, max_num_seqs=48, max_num_batched_tokens=512),
            )
            for i, (prompt, output) in enumerate(lengths):
                ids = rng.integers(3, loaded.config.vocab_size, prompt)
                if method == "beam":
                    beams = BeamSearchParams(beam_width=width, max_tokens=int(output), ignore_eos=True)
                    engine.add_request(str(i), ids, beams=beams)
                else:
                    params = SamplingParams(n=width, max_tokens=int(output), ignore_eos=True, seed=i)
                    engine.add_request(str(i), ids, params)
            while engine.has_unfinished():
                engine.step()
            saved = 100 * engine.stats().sharing_saving
            rows.append([method, width, len(lengths), f"{saved:.1f}", PAPER[method][kind]])
    return ["method", "width", "requests", "saved %", "paper %"], rows


def measure_prefix(args: argparse.Namespace) -> tuple[list[str], list[list]]:
    loaded = random_model(SMOLLM2_135M, args.dtype)
    rng = np.random.default_rng(0)
    rows = []
    tail, output = 40, 20
    for prefix in args.prefix:
        head = rng.integers(3, 49152, prefix)
        prompts = [np.concatenate([head, rng.integers(3, 49152, tail)]) for _ in range(args.prompts)]
        engines = {on: make_engine(loaded, enable_prefix_caching=on) for on in (True, False)}
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(args.repeats + 1):
            for on, engine in engines.items():
                engine.reset_prefix_cache()
                seconds = run(engine, [(prompt, {"params": params}) for prompt in prompts])
                if turn:
                    times[on].append(seconds)
        rates = {on: len(prompts) * output / statistics.median(each) for on, each in times.items()}
        paper = {80: 1.67, 341: 3.58}.get(prefix, "-")
        rows.append([prefix, tail, output, rates[False], rates[True], rates[True] / rates[False], paper])
    return ["prefix", "own prompt", "output", "tokens/s, off", "tokens/s, on", "ratio", "paper's ratio"], rows


def measure_beams(args: argparse.Namespace) -> tuple[list[str], list[list]]:
    loaded = random_model(SMOLLM2_135M, args.dtype)
    engine = make_engine(loaded)
    rng = np.random.default_rng(0)
    output = 64
    jobs = {
        "beam width 4": [{"beams": BeamSearchParams(beam_width=4, max_tokens=output, ignore_eos=True)}],
        "4 greedy": [{"params": SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)}] * 4,
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(args.repeats + 1):
        for name, requests in jobs.items():
            engine.reset_prefix_cache()
            seconds = run(engine, [(rng.integers(3, 49152, 64), each) for each in requests])
            if turn:
                times[name].append(seconds)
    medians = {name: statistics.median(each) / output * 1e3 for name, each in times.items()}
    greedy = medians["4 greedy"]
    return ["what", "ms/token", "ratio"], [[name, each, each / greedy] for name, each in medians.items()]


def measure_swap(args: argparse.Namespace) -> tuple[list[str], list[list]]:
    loaded = random_model(SMOLLM2_135M, args.dtype)
    enable_compilation_cache(None)
    rng = np.random.default_rng(0)
    tokens, output, rows = 256, 32, []
    for size in args.block_size:
        # Four sequences of eight fit when they are done, so that some have to make way.
        sizes = dict(block_size=size, num_blocks=1 + 4 * -(-320 // size), max_model_len=320, max_num_seqs=8)
        sizes |= dict(max_num_batched_tokens=256, free_padding=True, watermark=0.0)
        engines = {mode: Engine(loaded, EngineConfig(**sizes, preemption=mode)) for mode in ("swap", "recompute")}
        out, back = time_copies(engines["swap"], tokens // size, 5 * args.repeats)
        compute: list[float] = []
        times: dict[str, list[float]] = {mode: [] for mode in engines}
        one = {"params": SamplingParams(temperature=0, max_tokens=1)}
        many = {"params": SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)}
        prompts = [rng.integers(3, 49152, tokens - 64) for _ in range(8)]
        for turn in range(args.repeats + 1):
            for mode, engine in engines.items():
                engine.reset_prefix_cache()
                seconds = run(engine, [(prompt, many) for prompt in prompts])
                engine.reset_prefix_cache()
                alone = run(engine, [(rng.integers(3, 49152, tokens), one)])
                if turn:
                    times[mode].append(seconds)
                    compute.append(alone)
        again = statistics.median(compute) * 1e3
        rates = {mode: len(prompts) * output / statistics.median(each) for mode, each in times.items()}
        stats = [engine.stats().preemptions / (args.repeats + 1) for engine in engines.values()]
        swapped = rates["swap"] / rates["recompute"]
        rows.append(
            [size, out, back, again, again / (out + back), *rates.values(), swapped, "{:.1f}, {:.1f}".format(*stats)]
        )
    header = ["block size", "out ms", "in ms", "compute ms", "compute / copy", "tokens/s, swap", "tokens/s, recompute"]
    return [*header, "ratio", "preemptions a pass"], rows


def time_copies(engine: Engine, blocks: int, repeats: int) -> tuple[float, float]:
    """Median milliseconds to copy blocks of an idle engine to the host, until they are there, and back into others."""
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
    return statistics.median(out) * 1e3, statistics.median(back) * 1e3


def make_engine(loaded, **changes) -> Engine:
    sizes = dict(num_blocks=1200, max_model_len=512, max_num_seqs=32, max_num_batched_tokens=512)
    return Engine(loaded, EngineConfig(**{**sizes, **changes}))


def run(engine: Engine, requests: list[tuple[np.ndarray, dict]]) -> float:
    """Seconds until all are done."""
    start = time.perf_counter()
    for i, (prompt, options) in enumerate(requests):
        engine.add_request(str(i), prompt, **options)
    while engine.has_unfinished():
        engine.step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
