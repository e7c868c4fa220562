"""Continuous batching over paged KV beside static batches over contiguous KV, at equal KV memory.

    python scripts/bench_naive.py MODEL LENGTHS.csv --dtype bfloat16

LENGTHS.csv has the columns prompt_tokens and output_tokens: real lengths, served with random prompts. All requests are
submitted at once, in the file's order, to each server in turn:

    static  a cache [batch, max_len] (see naive_serving.py); batch is what the memory holds at max_len tokens a row
    paged   the engine with as many slots of KV in blocks of 16, without prefix cache and with as many sequences as fit
    alone   static with a batch of one, the first requests only

All run the same decoder, weights (packed where the native kernels are there) and kernels, greedily. Utilization is the
share of reserved KV slots that hold a token of a request that is not done, over the decoder's passes; "of memory" the
same of all KV slots. A static batch answers when its longest request is done. Latency counts from the start of all.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time

import numpy as np
from bench_tools import make_parser, print_table, save_json
from naive_serving import Job, NaiveServer, Served
from random_model import SMOLLM2_135M, random_model
from tqdm import tqdm

from jpaged import LLM, Engine, SamplingParams

HEADER = [
    "server",
    "requests",
    "batch",
    "mean running",
    "utilization %",
    "of memory %",
    "tokens/s",
    "all tokens/s",
    "mean latency s",
    "p99 s/token",
    "preemptions",
]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", help="a Hugging Face folder or hub id, a .gguf file, or random-135m")
    parser.add_argument("lengths", help="CSV file with the columns prompt_tokens, output_tokens")
    parser.add_argument("--requests", type=int, default=32, help="the first that fit of the file (default: 32)")
    parser.add_argument("--alone", type=int, default=3, help="of them, those that are served alone (default: 3)")
    parser.add_argument("--max-len", type=int, default=512, help="longest request, slots of a row (default: 512)")
    parser.add_argument("--slots", type=int, default=4096, help="tokens that the KV memory holds (default: 4096)")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="most that run in the engine (default: 64)")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3, help="turns, whose medians count (default: 3)")
    args = parser.parse_args()
    if args.slots < args.max_len:
        parser.error(f"--slots must be at least --max-len ({args.max_len}), got {args.slots}")
    model = random_model(SMOLLM2_135M, args.dtype) if args.model == "random-135m" else args.model
    llm = LLM(
        model,
        dtype=args.dtype,
        max_model_len=args.max_len,
        max_num_seqs=args.max_num_seqs,
        num_blocks=args.slots // 16 + 1,
        enable_prefix_caching=False,
    )
    jobs = read_jobs(args, llm.loaded.config.vocab_size)
    static = NaiveServer(llm.loaded, args.slots // args.max_len, args.max_len)
    single = NaiveServer(llm.loaded, 1, args.max_len)
    servers = {
        "static": (static.batch, lambda: static.serve(jobs)),
        "paged": (args.max_num_seqs, lambda: serve_paged(llm.engine, jobs)),
        "alone": (1, lambda: single.serve(jobs[: args.alone])),
    }
    for server in (static, single):  # compile
        server.serve([Job(job.prompt[:8], 2) for job in jobs[:2]])
    found: dict[str, list[Served]] = {name: [] for name in servers}
    preempted = []
    for turn in tqdm(range(args.rounds), desc="rounds"):
        for name in sorted(servers, reverse=turn % 2 == 1):
            before = llm.engine.scheduler.num_preemptions
            found[name].append(servers[name][1]())
            preempted += [llm.engine.scheduler.num_preemptions - before] if name == "paged" else []
    rows = []
    for name, (batch, _) in servers.items():
        count = args.alone if name == "alone" else len(jobs)
        slots = args.max_len if name == "alone" else args.slots
        values = [summarize(served, jobs[:count], slots) for served in found[name]]
        middle = [statistics.median(column) for column in zip(*values, strict=True)]
        each = " ".join(f"{value[3]:.0f}" for value in values)
        stops = statistics.median(preempted) if name == "paged" else 0
        rows.append([name, count, batch, *middle[:4], each, *middle[4:], stops])
    print_table(HEADER, rows)
    same = np.mean([a == b for a, b in zip(found["static"][0].tokens, found["paged"][0].tokens, strict=True)])
    print(f"requests that both servers answered with the same tokens: {same:.0%}")
    save_json(args.json, [dict(zip(HEADER, row, strict=True)) for row in rows])


def read_jobs(args: argparse.Namespace, vocab: int) -> list[Job]:
    """Random prompts of the file's first lengths that fit max_len tokens, prompt and output together."""
    with open(args.lengths, newline="") as file:
        lengths = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    fit = [(prompt, out) for prompt, out in lengths if prompt > 0 and out > 0 and prompt + out <= args.max_len]
    if len(fit) < args.requests:
        raise ValueError(f"{args.requests} requests of at most {args.max_len} tokens are wanted, {len(fit)} are there")
    rng = np.random.default_rng(0)
    return [Job(rng.integers(3, vocab, prompt).tolist(), out) for prompt, out in fit[: args.requests]]


def serve_paged(engine: Engine, jobs: list[Job]) -> Served:
    """Serve jobs by an engine that is idle."""
    served, start = Served(), time.perf_counter()
    requests = [
        engine.add_request(str(i), job.prompt, SamplingParams(temperature=0, max_tokens=job.output, ignore_eos=True))
        for i, job in enumerate(jobs)
    ]
    size, before = engine.config.block_size, engine.collector.iterations
    while engine.has_unfinished():
        running = len(engine.scheduler.running)
        engine.step()
        passes, counts = engine.collector.iterations - before, engine.collector.counts
        before += passes
        served.count(passes, passes * counts.tokens, passes * counts.used * size, passes * running)
    served.seconds = time.perf_counter() - start
    served.latency = [request.finished_time - start for request in requests]
    served.tokens = [request.output_token_ids for request in requests]
    return served


def summarize(served: Served, jobs: list[Job], slots: int) -> list[float]:
    """Mean running, utilization of what is reserved and of all memory in %, tokens/s, mean latency, p99 a token."""
    outputs = [job.output for job in jobs]
    a_token = [latency / output for latency, output in zip(served.latency, outputs, strict=True)]
    return [
        served.running / served.passes,
        100 * served.live / served.reserved,
        100 * served.live / (served.passes * slots),
        sum(outputs) / served.seconds,
        statistics.mean(served.latency),
        float(np.percentile(a_token, 99)),
    ]


if __name__ == "__main__":
    main()
