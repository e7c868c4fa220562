"""Hit rate of the prefix cache on a trace of real prompts, through the scheduler and the index, without a model.

    python scripts/bench_prefix_trace.py mooncake_conversation.jsonl.gz --blocks 2000 10000 40000

The trace has a line of JSON a request: input_length, output_length, hash_ids (one for each block of 512 prompt tokens;
equal ids mean that all tokens up to the block's end are equal). Requests come in the trace's order as fast as they can
be run. Beside our hit rate stand those of a cache without limit and of an ideal LRU cache with as many blocks as our
pool: it learns of a whole request at once, its output included, and running sequences take no memory from it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench_tools import make_parser, print_table, save_json

from jpaged.config import EngineConfig
from jpaged.simulation import Job, SimulatedEngine, read_jobs, roofline
from jpaged.traces import TRACE_BLOCK

HEADER = ("blocks", "requests", "hit rate", "ideal LRU", "of ideal", "no limit", "evictions", "host us/request")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2_000, 10_000, 40_000], help="sizes of the pool")
    parser.add_argument("--requests", type=int, help="only the first N")
    parser.add_argument("--running", type=int, default=16, help="most sequences at once (default: 16)")
    args = parser.parse_args()
    jobs = [dataclasses.replace(job, arrival=0.0) for job in read_jobs(args.trace, args.requests)]
    rows = [measure(jobs, blocks, args.running) for blocks in args.blocks]
    print_table(HEADER, rows)
    save_json(args.json, [dict(zip(HEADER, row, strict=True)) for row in rows])


def measure(jobs: Sequence[Job], blocks: int, running: int) -> tuple:
    tokens = sum(job.prompt for job in jobs)
    ideal = count_hits(jobs, blocks) / tokens
    hits, evictions, seconds = run(jobs, blocks, running)
    return (
        blocks,
        len(jobs),
        f"{hits / tokens:.2%}",
        f"{ideal:.2%}",
        f"{hits / tokens / ideal:.2%}",
        f"{count_hits(jobs, None) / tokens:.2%}",
        evictions,
        round(seconds / len(jobs) * 1e6),
    )


def count_hits(jobs: Iterable[Job], limit: int | None) -> int:
    """Tokens found in an ideal LRU cache of `limit` blocks, or without limit."""
    cache: OrderedDict[object, None] = OrderedDict()
    hits = 0
    for number, job in enumerate(jobs):
        known = True
        # Full blocks may be found, and one token at least is computed.
        for block in job.prefix[: (job.prompt - 1) // TRACE_BLOCK]:
            known = known and block in cache
            hits += TRACE_BLOCK * known
        whole = (job.prompt + job.output - 1) // TRACE_BLOCK
        own = [
            (number, column) for column in range(len(job.prefix), whole)
        ]  # filled by the output: nobody asks for them
        for block in reversed([*job.prefix, *own]):
            cache[block] = None
            cache.move_to_end(block)
        while limit is not None and len(cache) > limit:
            cache.popitem(last=False)
    return hits


def run(jobs: Sequence[Job], blocks: int, running: int) -> tuple[int, int, float]:
    """Tokens found in our cache, evictions, and the host's seconds in the scheduler."""
    longest = max(job.prompt + job.output for job in jobs)
    config = EngineConfig(
        num_blocks=blocks + 1,
        max_model_len=longest,
        block_size=TRACE_BLOCK,
        max_num_seqs=running,
        max_num_batched_tokens=longest,
        decode_steps=TRACE_BLOCK,
        watermark=0.0,
        async_scheduling=False,
    )
    # How long a step takes does not matter: nobody waits for the clock.
    engine = SimulatedEngine(config, roofline("h200", "llama-3.1-8b"), queue=2)
    scheduler, seconds = engine.scheduler, [0.0]
    for name in ("add", "schedule", "update"):
        setattr(scheduler, name, timed(getattr(scheduler, name), seconds))
    engine.run(jobs)
    return scheduler.prefix_hits, scheduler.index.evictions, seconds[0]


def timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The same call, whose wall time is added to seconds[0]."""

    def wrapped(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            seconds[0] += time.perf_counter() - start

    return wrapped


if __name__ == "__main__":
    main()
