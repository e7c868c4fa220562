"""`jpaged bench serve | throughput | latency | startup | step`."""

from __future__ import annotations

import argparse

from jpaged.bench.offline import add_latency, add_throughput
from jpaged.bench.serve import add_serve
from jpaged.bench.startup import add_startup
from jpaged.bench.step import add_step


def add_bench(commands: argparse._SubParsersAction) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure a server or the engine",
        description="Measure a server, the engine, one of its steps, or how fast they start. Options and JSON names "
        "are vLLM's.",
    )
    benches = bench.add_subparsers(dest="bench", required=True, metavar="BENCHMARK", title="benchmarks")
    for add in (add_serve, add_throughput, add_latency, add_startup, add_step):
        add(benches)
