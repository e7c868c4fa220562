"""Plans a deployment without its hardware: the engine's own scheduler on a model of a device's speed.

    python scripts/simulate.py run --chip h200 --model llama-3.1-8b --rate 20 --seconds 600
    python scripts/simulate.py run --chip h200 --model llama-3.1-8b --trace azure_llm_2023_conv.csv --max-num-seqs 512
    python scripts/simulate.py run --cost cost.json --model smollm2-135m --requests 1000 --system orca-max
    python scripts/simulate.py fit MODEL --out cost.json
    python scripts/simulate.py check MODEL --cost cost.json

run     Serves requests: of a trace (Azure, Mooncake, or lengths), or with ShareGPT lengths at random times. Prints a
        report: latencies, throughput, how many run at once, where the KV memory goes.
fit     Runs requests on the real engine, here, and fits what a step takes to what is in it.
check   The same requests on the real engine and in the simulator: the schedule must be the same, step by step, and
        the total time is compared.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_tools import describe_machine, make_parser, print_table, save_json
from tqdm import tqdm

from jpaged.chips import CHIPS
from jpaged.simulation import (
    ContiguousSystem,
    FittedCost,
    Job,
    SimulatedEngine,
    fit_cost,
    make_config,
    poisson_jobs,
    roofline,
)
from jpaged.simulation.baselines import RESERVATIONS
from jpaged.simulation.costs import CostModel
from jpaged.simulation.hardware import MODELS, find
from jpaged.simulation.jobs import read_jobs, sharegpt_lengths, with_limit

SYSTEMS = ["jpaged", *(f"orca-{each}" for each in RESERVATIONS), "static"]


def main() -> None:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b")
    run.add_argument("--chip", choices=sorted(CHIPS), nargs="+", default=["h200"], help="one or several")
    run.add_argument(
        "--efficiency",
        type=float,
        default=1.0,
        help="share of bandwidth and matrix rate that is reached (default: 1)",
    )
    run.add_argument("--cost", type=Path, help="a fitted cost model instead of the chip's roofline")
    run.add_argument("--system", choices=SYSTEMS, default="jpaged")
    run.add_argument("--trace", type=Path)
    run.add_argument(
        "--speedup", type=float, nargs="+", default=[1.0], help="of the trace's clock, one or several (default: 1)"
    )
    run.add_argument("--requests", type=int, help="the first N of the trace; without a trace N requests, all at once")
    run.add_argument("--rate", type=float, default=1.0, help="requests a second without a trace (default: 1)")
    run.add_argument("--seconds", type=float, default=600.0, help="for so long (default: 600)")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--kv-tokens", type=int, help="tokens the KV pool holds (default: what 90 %% of the memory leave)")
    run.add_argument("--block-size", type=int, default=16)
    run.add_argument("--max-model-len", type=int, default=2048, help="longer requests are left out (default: 2048)")
    run.add_argument("--max-num-seqs", type=int, default=256)
    run.add_argument("--max-num-batched-tokens", type=int, default=4096)
    run.add_argument("--decode-steps", type=int, default=1)
    run.add_argument("--no-prefix-caching", action="store_true")
    fit = commands.add_parser("fit")
    fit.add_argument("--out", type=Path, required=True)
    check = commands.add_parser("check")
    check.add_argument("--cost", type=Path, required=True)
    for command in (fit, check):
        command.add_argument("model")
        command.add_argument("--dtype", default="bfloat16")
        command.add_argument("--requests", type=int, default=200)
        command.add_argument("--max-len", type=int, default=512, help="longer requests are left out (default: 512)")
        command.add_argument("--max-num-seqs", type=int, default=32)
        command.add_argument("--kv-tokens", type=int, default=8192)
    args = parser.parse_args()
    if args.command == "run":
        runs = [simulate(args, chip, speedup) for chip in args.chip for speedup in args.speedup]
        print_table(["what", *["value"] * len(runs)], [[name, *(each[name] for each in runs)] for name in runs[0]])
        save_json(args.json, runs)
        return
    rows, agrees = {"fit": fit_model, "check": compare}[args.command](args)
    print_table(["what", "value"], rows)
    save_json(args.json, [{"what": what, "value": value} for what, value in rows])
    sys.exit(0 if agrees else 1)


def simulate(args: argparse.Namespace, chip: str, speedup: float) -> dict[str, Any]:
    """A report by name, of one chip and one speed of the trace."""
    if not speedup > 0:
        raise ValueError(f"speedup must be above 0, got {speedup}")
    jobs = make_jobs(args, speedup)
    if not jobs:
        raise ValueError(f"no request has at most {args.max_model_len} tokens: raise --max-model-len")
    cost: CostModel
    cost = FittedCost.load(args.cost) if args.cost else roofline(chip, args.model, efficiency=args.efficiency)
    tokens = args.kv_tokens or kv_room(args, chip)
    start = time.perf_counter()
    if args.system != "jpaged":
        reservation = "max" if args.system == "static" else args.system.removeprefix("orca-")
        system = ContiguousSystem(
            reservation,
            tokens,
            cost,
            longest=args.max_model_len,
            static=args.system == "static",
            batch=args.max_num_seqs,
        )
        report = system.run(jobs)
    else:
        config = make_config(
            tokens,
            args.block_size,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            decode_steps=args.decode_steps,
            enable_prefix_caching=not args.no_prefix_caching,
        )
        with tqdm(total=len(jobs), unit="request", disable=not sys.stderr.isatty()) as bar:
            report = SimulatedEngine(config, cost).run(jobs, progress=bar.update)
    about = {"chip": "a fitted cost model" if args.cost else chip, "speedup": speedup, "KV tokens": tokens}
    return about | report.as_dict() | {"simulated in, s": time.perf_counter() - start}


def make_jobs(args: argparse.Namespace, speedup: float) -> list[Job]:
    if args.trace is not None:
        return with_limit(read_jobs(args.trace, args.requests, speedup), args.max_model_len)
    rng, lengths = np.random.default_rng(args.seed), sharegpt_lengths()
    if args.requests is not None:
        drawn = lengths[rng.integers(0, len(lengths), args.requests)].tolist()
        return with_limit([Job(0.0, prompt, output) for prompt, output in drawn], args.max_model_len)
    if not (0 < args.rate < math.inf and args.seconds > 0):
        raise ValueError(f"rate and seconds must be above 0, got {args.rate} and {args.seconds}")
    return with_limit(poisson_jobs(lengths, args.rate, args.seconds, rng), args.max_model_len)


def kv_room(args: argparse.Namespace, chip: str) -> int:
    """Tokens that the chip's memory holds besides the model, a tenth of it left alone."""
    model = find(MODELS, args.model, "model")
    room = int((0.9 * CHIPS[chip].memory_bytes - model.weight_bytes) // model.kv_bytes)
    if room < args.max_model_len:
        raise ValueError(f"{args.model} leaves room for {max(room, 0)} tokens of KV on one {chip}")
    return room


# ------------------------------------------------------------------ with a real engine


def make_engine(args: argparse.Namespace):
    from jpaged_models import load_model

    from jpaged import Engine
    from jpaged.compilation_cache import enable_compilation_cache

    enable_compilation_cache(None)
    config = make_config(args.kv_tokens, max_model_len=args.max_len, max_num_seqs=args.max_num_seqs)
    engine = Engine(load_model(args.model, args.dtype), config)
    engine.warm_up()
    return engine


def draw_jobs(args: argparse.Namespace, count: int, seed: int) -> list[Job]:
    lengths = sharegpt_lengths()
    lengths = lengths[lengths.sum(1) <= args.max_len]
    drawn = lengths[np.random.default_rng(seed).integers(0, len(lengths), count)].tolist()
    return [Job(0.0, prompt, output) for prompt, output in drawn]


def fit_model(args: argparse.Namespace) -> tuple[list[list], bool]:
    from jpaged.simulation.measure import run_engine, simulate_engine

    engine = make_engine(args)
    measured = []
    # Many at once, and few: a step's time must be known for both.
    for number, count in enumerate((2, 1, 4, 10, max(args.requests // 2, 1))):
        jobs = draw_jobs(args, count, seed=100 + number)
        engine.reset_prefix_cache()
        steps, seconds = run_engine(engine, jobs, seed=number)
        simulated, shapes, _ = simulate_engine(engine, jobs, roofline("a100", "opt-13b"))
        if steps != simulated:
            raise RuntimeError("the engine and the simulator planned different steps: run `check`")
        measured += [(shape, took) for shape, took in zip(shapes, seconds, strict=True) if shape.tokens][1:]
    about = {"model": Path(args.model).name, "dtype": args.dtype, "steps": len(measured), **describe_machine()}
    cost = fit_cost(measured, about)
    cost.save(args.out)
    errors = np.array([cost.seconds(shape) / took - 1 for shape, took in measured])
    total = sum(cost.seconds(shape) for shape, _ in measured) / sum(took for _, took in measured)
    rows = [[f"{kind} {name}, s", value] for kind in ("decode", "mixed") for name, value in getattr(cost, kind).items()]
    return [*rows, ["median error of a step", float(np.median(abs(errors)))], ["of all", total - 1]], True


def compare(args: argparse.Namespace) -> tuple[list[list], bool]:
    """A table, and whether engine and simulator planned the same steps."""
    from jpaged.simulation.measure import first_difference, run_engine, simulate_engine

    engine, cost = make_engine(args), FittedCost.load(args.cost)
    run_engine(engine, draw_jobs(args, 8, seed=1), seed=7)  # whatever happens only once
    engine.reset_prefix_cache()
    jobs = draw_jobs(args, args.requests, seed=0)
    steps, seconds = run_engine(engine, jobs)
    simulated, _, modelled = simulate_engine(engine, jobs, cost)
    difference = first_difference(steps, simulated)
    rows: list[list] = [
        ["requests", len(jobs)],
        ["steps, engine and simulator", f"{len(steps)} {len(simulated)}"],
        ["first step that differs", "none" if difference is None else difference],
        ["preemptions", engine.scheduler.num_preemptions],
        ["engine, s", sum(seconds)],
        ["simulator, s", sum(modelled)],
        ["error", sum(modelled) / sum(seconds) - 1],
    ]
    return rows, difference is None


if __name__ == "__main__":
    main()
