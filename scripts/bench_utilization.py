"""KV utilization at full load, by block size: real request lengths through the scheduler and its block accounting.

    python scripts/bench_utilization.py --requests 2000 --block-size 8 16 32 64
    python scripts/bench_utilization.py --lengths LENGTHS.csv

LENGTHS.csv has the columns prompt_tokens and output_tokens; without one the package's ShareGPT lengths are taken. All
requests are there from the start and overfill the pool. They run on a simulated device, which counts blocks as the
real one does (tests/jpaged/test_simulation_real.py); how full they are does not depend on time or content. Utilization
is the share of the slots of allocated blocks that hold a token, over all steps until the queue is empty, each weighted
by its blocks; what the PagedAttention paper (Fig. 2) reports as 96.3 % for vLLM.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from bench_tools import make_parser, print_table, save_json

from jpaged.schedule import Schedule
from jpaged.simulation import Job, SimulatedEngine, make_config, read_jobs, roofline, sharegpt_lengths
from jpaged.simulation.device import Step
from jpaged.stats import BlockCounts


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", type=Path, help="CSV file with the columns prompt_tokens, output_tokens")
    parser.add_argument("--requests", type=int, default=2000, help="the first so many (default: 2000)")
    parser.add_argument("--block-size", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--slots", type=int, default=32768, help="tokens the KV pool holds (default: 32768)")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-len", type=int, default=2048, help="longer requests are cut (default: 2048)")
    args = parser.parse_args()
    rows = [replay(read_lengths(args), block_size, args) for block_size in args.block_size]
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    save_json(args.json, rows)


def read_lengths(args: argparse.Namespace) -> list[Job]:
    if args.lengths is None:
        jobs = [Job(0.0, prompt, output) for prompt, output in sharegpt_lengths()[: args.requests].tolist()]
    else:
        jobs = read_jobs(args.lengths, args.requests)
    cut = []
    for job in jobs:
        prompt = min(job.prompt, args.max_len - 1)
        cut.append(dataclasses.replace(job, prompt=prompt, output=min(job.output, args.max_len - prompt)))
    return cut


def replay(jobs: list[Job], block_size: int, args: argparse.Namespace) -> dict[str, Any]:
    config = make_config(
        args.slots,
        block_size,
        max_model_len=args.max_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )
    counts: list[BlockCounts] = []
    running: list[int] = []

    def watch(plan: Schedule, step: Step) -> None:
        # Until the queue is empty: what drains afterwards is not full load.
        if engine.scheduler.waiting:
            counts.append(step.counts)
            running.append(len(engine.scheduler.running))

    engine = SimulatedEngine(config, roofline("a100", "opt-13b"), watch=watch)
    report = engine.run(jobs)
    tokens, blocks = (sum(getattr(each, name) for each in counts) for name in ("tokens", "used"))
    peak = max(counts, key=lambda each: each.used)
    return {
        "block size": block_size,
        "requests": len(jobs),
        "utilization %": 100 * tokens / (blocks * block_size),
        "at the peak %": 100 * peak.tokens / (peak.used * block_size),
        "mean running": float(np.mean(running)),
        "preemptions": report.preemptions,
    }


if __name__ == "__main__":
    main()
