"""`jpaged bench startup`: from the start of `jpaged serve` to its first token, with and without compiled programs."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jpaged.bench.http_client import HttpClient
from jpaged.bench.report import save_json
from jpaged.bench.serve import PATHS, send

PERCENTILES = (10, 50, 90, 99)
STOP_TIMEOUT = 60.0


def add_startup(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "startup",
        help="measure the time from start to first token",
        description="Start `jpaged serve` again and again and time it until it answers with a first token.",
        epilog="What comes after -- goes to `jpaged serve`, as in: jpaged bench startup --model M -- --max-num-seqs 8",
    )
    parser.set_defaults(run=run_startup)
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help="a Hugging Face folder or hub id, or a .gguf file")
    add("--num-iters-cold", type=int, default=0, metavar="N", help="starts without compiled programs (default: 0)")
    add("--num-iters-warmup", type=int, default=1, metavar="N", help="starts that fill the cache (default: 1)")
    add("--num-iters-warm", type=int, default=3, metavar="N", help="starts with compiled programs (default: 3)")
    add("--output-json", metavar="FILE", help="write the numbers")
    add("serve_options", nargs="*", metavar="-- OPTIONS", help="for `jpaged serve`")


def run_startup(options: argparse.Namespace) -> None:
    if (
        options.num_iters_cold < 0
        or options.num_iters_warmup < 0
        or options.num_iters_cold + options.num_iters_warm < 1
    ):
        raise ValueError("num_iters_cold and num_iters_warm must be at least 0, and one of them above it")
    found: dict[str, Any] = {}
    cold = []
    for _ in range(options.num_iters_cold):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(time_start(options.model, options.serve_options, {"XDG_CACHE_HOME": cache}))
    for _ in range(options.num_iters_warmup if options.num_iters_warm else 0):
        time_start(options.model, options.serve_options, {})
    warm = [time_start(options.model, options.serve_options, {}) for _ in range(options.num_iters_warm)]
    for name, times in (("cold", cold), ("warm", warm)):
        if times:
            found[f"avg_{name}_startup_time"] = float(np.mean(times))
            found[f"{name}_startup_times"] = times
            found[f"{name}_startup_percentiles"] = {str(p): float(np.percentile(times, p)) for p in PERCENTILES}
            print(f"Avg {name} startup time: {np.mean(times):.2f} seconds ({', '.join(f'{t:.2f}' for t in times)})")
    if options.output_json is not None:
        save_json(options.output_json, found)


def time_start(model: str, serve_options: Sequence[str], environment: dict[str, str]) -> float:
    """Seconds from starting the process until its first token has arrived."""
    command = [sys.executable, "-m", "jpaged", "serve", model, "--port", "0", *serve_options]
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        url = _read_address(process)
        body = {"prompt": [1], "max_tokens": 1, "temperature": 0, "stream": True}
        result = asyncio.run(send(HttpClient(url), PATHS["openai"], body))
        elapsed = time.perf_counter() - start
        if result.error:
            raise ValueError(f"the server failed: {result.error}")
        return elapsed
    finally:
        process.terminate()
        try:
            process.communicate(timeout=STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _read_address(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        if found := re.match(r"Serving .* at (http\S+) ", line):
            return found[1]
        lines.append(line)
    raise ValueError("the server did not start:\n" + "".join(lines[-20:]))
