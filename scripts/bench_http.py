"""Tokens a second through HTTP streams and of LLM.generate: the same engine, the same requests, in turns.

    python scripts/bench_http.py MODEL --dtype bfloat16 --rounds 3

A round runs the workload through `LLM.generate`, then serves the same engine and lets `jpaged bench serve`, a process
of its own, send the same requests at once and read every stream. With few cores the client's work is in the figure too.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import uvicorn
from bench_tools import make_parser, print_table, save_json

from jpaged import LLM, SamplingParams
from jpaged.bench.workload import Ask, random_asks
from jpaged.server.app import make_app
from jpaged.server.serving import Server, make_service, open_socket
from jpaged.server.settings import ServerSettings

HEADER = ("round", "generate tok/s", "HTTP tok/s", "ratio")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream-interval", type=int, default=1, help="as of `jpaged serve` (default: 1)")
    args = parser.parse_args()
    llm = LLM(args.model, dtype=args.dtype, max_model_len=args.max_model_len, progress=sys.stderr.isatty())
    rows = []
    for number in range(args.rounds + 1):
        asks = random_asks(
            args.prompts,
            np.random.default_rng(number),
            llm.loaded.config.vocab_size,
            input_len=args.input_len,
            output_len=args.output_len,
            prefix_len=0,
            ratio=0.5,
        )
        alone, served = run_alone(llm, asks), run_served(llm, args, number)
        if number:  # the first round is a warm-up
            rows.append((number, f"{alone:.1f}", f"{served:.1f}", f"{served / alone:.3f}"))
    print_table(HEADER, rows)
    print(f"median ratio {statistics.median(float(row[3]) for row in rows):.3f}")
    save_json(args.json, [dict(zip(HEADER, row, strict=True)) for row in rows])


def run_alone(llm: LLM, asks: list[Ask]) -> float:
    """Output tokens a second of LLM.generate."""
    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=0.0, max_tokens=ask.output_len, ignore_eos=True) for ask in asks]
    start = time.perf_counter()
    outputs = llm.generate([ask.prompt for ask in asks], params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - start)


def run_served(llm: LLM, args, seed: int) -> float:
    """Output tokens a second that `jpaged bench serve` sees."""
    llm.reset_prefix_cache()
    service = make_service(llm, ServerSettings(("model",), stream_interval=args.stream_interval))
    bound = open_socket("127.0.0.1", 0)
    client: list[subprocess.Popen] = []

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jpaged", "bench", "serve", "--port", str(bound.getsockname()[1])]
        command += ["--num-prompts", str(args.prompts), "--random-input-len", str(args.input_len)]
        command += ["--random-output-len", str(args.output_len), "--random-range-ratio", "0.5", "--seed", str(seed)]
        command += ["--disable-tqdm", "--save-result", "--result-dir", folder, "--result-filename", "found.json"]

        config = uvicorn.Config(make_app(service), log_level="warning", lifespan="off", ws="none")

        async def serve() -> None:
            server = Server(
                config, service, lambda: client.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            )
            task = asyncio.ensure_future(server.serve(sockets=[bound]))
            while not client:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(client[0].wait)
            server.should_exit = True
            await task

        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:  # the loop that `jpaged serve` has
            runner.run(serve())
        found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    if found["failed"] or found["completed"] != args.prompts:
        raise RuntimeError(f"{found['failed']} of {args.prompts} requests failed")
    return found["output_throughput"]


if __name__ == "__main__":
    main()
