"""KV utilization at full load: real request lengths replayed through the engine, by block size.

    python scripts/bench_utilization.py LENGTHS.csv --requests 2000 --block-size 8 16 32 64

LENGTHS.csv has the columns prompt_tokens and output_tokens. All requests are submitted at once to an engine whose pool
they overfill, with a one-layer model (how full blocks are does not depend on the model). Utilization is the share of
the slots of allocated blocks that hold a token, over all steps, each weighted by its blocks; what the PagedAttention
paper (Fig. 2) reports as 96.3 % for vLLM.
"""

from __future__ import annotations

import argparse
import csv
import time

import numpy as np
from bench_tools import make_parser, print_table, save_json
from random_model import random_model
from tqdm import tqdm

from jpaged import Engine, EngineConfig, SamplingParams

MODEL = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("lengths", help="CSV file with the columns prompt_tokens, output_tokens")
    parser.add_argument("--requests", type=int, default=2000, help="the first so many of the file (default: 2000)")
    parser.add_argument("--block-size", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--slots", type=int, default=32768, help="tokens the KV pool holds (default: 32768)")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-len", type=int, default=2048, help="longer requests are cut (default: 2048)")
    args = parser.parse_args()
    with open(args.lengths, newline="") as file:
        lengths = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    loaded = random_model(MODEL, "float32")
    rows = [replay(loaded, lengths[: args.requests], block_size, args) for block_size in args.block_size]
    header = ["block size", "requests", "utilization %", "at the peak %", "mean running", "preemptions", "seconds"]
    print_table(header, rows)
    save_json(args.json, [dict(zip(header, row, strict=True)) for row in rows])


def replay(loaded, lengths: list[tuple[int, int]], block_size: int, args: argparse.Namespace) -> list:
    config = EngineConfig(
        num_blocks=args.slots // block_size + 1,
        max_model_len=args.max_len,
        block_size=block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,  # the prompts are all alike
    )
    engine = Engine(loaded, config)
    engine.warm_up()
    start = time.perf_counter()
    for i, (prompt, output) in enumerate(lengths):
        prompt = min(max(prompt, 1), args.max_len - 1)
        params = SamplingParams(temperature=0, max_tokens=max(output, 1), ignore_eos=True)
        engine.add_request(str(i), [1] * prompt, params)
    running = []
    with tqdm(total=len(lengths), desc=f"block size {block_size}", unit="request") as bar:
        # Until the queue is empty: what drains afterwards is not full load.
        while engine.scheduler.waiting:
            bar.update(sum(request.finished for request in engine.step()))
            running.append(len(engine.scheduler.running))
        stats = engine.stats()
        while engine.has_unfinished():
            bar.update(sum(request.finished for request in engine.step()))
    seconds = time.perf_counter() - start
    return [
        block_size,
        len(lengths),
        100 * stats.mean_utilization,
        100 * stats.peak_utilization,
        float(np.mean(running)),
        stats.preemptions,
        seconds,
    ]


if __name__ == "__main__":
    main()
