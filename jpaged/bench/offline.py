"""`jpaged bench throughput` and `latency`: the engine alone, without a server."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jpaged.bench.report import save_json
from jpaged.bench.workload import Ask, custom_asks, fitting, random_asks, random_ids, trace_asks
from jpaged.cli_options import ENGINE, add_engine_arguments, pick
from jpaged.llm import LLM
from jpaged.sampling_params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_throughput(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "throughput",
        help="measure tokens a second of many prompts at once",
        description="Run many prompts through LLM.generate and count tokens a second.",
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=run_throughput)
    parser.add_argument("--model", required=True, metavar="MODEL", help="a Hugging Face folder or hub id, or a .gguf")
    add = parser.add_argument_group("requests").add_argument
    add("--dataset-name", choices=("random", "trace", "custom"), default="random", help="(default: random)")
    add("--dataset-path", metavar="FILE", help="of a trace or of prompts, as for `bench serve`")
    add("--num-prompts", type=int, default=1000, metavar="N", help="(default: 1000)")
    add("--input-len", type=int, default=1024, metavar="N", help="tokens of a random prompt (default: 1024)")
    add("--output-len", type=int, default=128, metavar="N", help="tokens of an output (default: 128)")
    add("--prefix-len", type=int, default=0, metavar="N", help="tokens that all prompts begin with (default: 0)")
    add("--random-range-ratio", type=float, default=0.0, metavar="X", help="lengths vary by this share (default: 0)")
    add("--n", type=int, default=1, metavar="N", help="outputs of each prompt (default: 1)")
    add("--output-json", metavar="FILE", help="write the numbers")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add_engine_arguments(parser.add_argument_group("engine"))


def add_latency(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "latency",
        help="measure how long one batch takes",
        description="Run one batch of prompts again and again and time it.",
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=run_latency)
    parser.add_argument("--model", required=True, metavar="MODEL", help="a Hugging Face folder or hub id, or a .gguf")
    add = parser.add_argument_group("requests").add_argument
    add("--input-len", type=int, default=32, metavar="N", help="tokens of a prompt (default: 32)")
    add("--output-len", type=int, default=128, metavar="N", help="tokens of an output (default: 128)")
    add("--batch-size", type=int, default=8, metavar="N", help="prompts at once (default: 8)")
    add("--num-iters-warmup", type=int, default=10, metavar="N", help="batches before it counts (default: 10)")
    add("--num-iters", type=int, default=30, metavar="N", help="batches that count (default: 30)")
    add("--output-json", metavar="FILE", help="write the numbers")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add_engine_arguments(parser.add_argument_group("engine"))


def run_throughput(options: argparse.Namespace) -> None:
    given = vars(options)
    llm = LLM(options.model, progress="disable_tqdm" not in given, **pick(given, ENGINE))
    asks = fitting(_make_asks(options, llm), llm.config.max_model_len)
    if not asks:
        raise ValueError(f"no request fits into the model's context of {llm.config.max_model_len} tokens")
    params = [
        SamplingParams(
            n=options.n, temperature=1.0 if options.n > 1 else 0.0, max_tokens=ask.output_len, ignore_eos=True, seed=0
        )
        for ask in asks
    ]
    start = time.perf_counter()
    outputs = llm.generate([ask.prompt for ask in asks], params, use_tqdm="disable_tqdm" not in given)
    elapsed = time.perf_counter() - start
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    # Names as in the JSON of `vllm bench throughput`, and the two kinds of tokens.
    found = {
        "elapsed_time": elapsed,
        "num_requests": len(asks),
        "total_num_tokens": prompt + generated,
        "requests_per_second": len(asks) / elapsed,
        "tokens_per_second": (prompt + generated) / elapsed,
        "total_prompt_tokens": prompt,
        "total_output_tokens": generated,
        "output_tokens_per_second": generated / elapsed,
        "left_out": options.num_prompts - len(asks),
    }
    print(
        f"Throughput: {found['requests_per_second']:.2f} requests/s, {found['tokens_per_second']:.2f} total tokens/s, "
        f"{found['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {prompt}\nTotal num output tokens:  {generated}")
    if "output_json" in given:
        save_json(options.output_json, found)


def run_latency(options: argparse.Namespace) -> None:
    given = vars(options)
    if min(options.num_iters, options.batch_size, options.input_len, options.output_len) < 1:
        raise ValueError("num_iters, batch_size, input_len and output_len must be at least 1")
    quiet = "disable_tqdm" in given
    llm = LLM(options.model, progress=not quiet, **pick(given, ENGINE))
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)
    vocab = llm.loaded.config.vocab_size

    def run_once() -> float:
        # New prompts each time, or the prefix cache would hold them.
        prompts = [random_ids(rng, vocab, options.input_len) for _ in range(options.batch_size)]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    for _ in tqdm(range(options.num_iters_warmup), desc="Warmup iterations", disable=quiet):
        run_once()
    latencies = [run_once() for _ in tqdm(range(options.num_iters), desc="Bench iterations", disable=quiet)]
    percentiles = {str(each): float(np.percentile(latencies, each)) for each in PERCENTILES}
    found: dict[str, Any] = {
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": percentiles,
    }
    print(f"Avg latency: {found['avg_latency']} seconds")
    for name, value in percentiles.items():
        print(f"{name}% percentile latency: {value} seconds")
    if "output_json" in given:
        save_json(options.output_json, found)


def _make_asks(options: argparse.Namespace, llm: LLM) -> list[Ask]:
    rng, count, vocab = np.random.default_rng(0), options.num_prompts, llm.loaded.config.vocab_size
    if count < 1:
        raise ValueError(f"num_prompts must be at least 1, got {count}")
    if options.dataset_name == "random":
        return random_asks(
            count,
            rng,
            vocab,
            input_len=options.input_len,
            output_len=options.output_len,
            prefix_len=options.prefix_len,
            ratio=options.random_range_ratio,
        )
    if "dataset_path" not in vars(options):
        raise ValueError(f"--dataset-name {options.dataset_name} needs --dataset-path")
    if options.dataset_name == "trace":
        return trace_asks(Path(options.dataset_path), count, rng, vocab)
    return custom_asks(Path(options.dataset_path), count, options.output_len)
