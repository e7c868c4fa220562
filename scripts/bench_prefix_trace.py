"""Hit rate of the prefix cache on a trace of real prompts, through the scheduler and the index, without a model.

    python scripts/bench_prefix_trace.py mooncake_conversation.jsonl.gz --blocks 2000 10000 40000

The trace has a line of JSON a request: input_length, output_length, hash_ids (one for each block of 512 prompt tokens;
equal ids mean that all tokens up to the block's end are equal). Requests come in the trace's order as fast as they can
be run. Beside our hit rate stand those of a cache without limit and of an ideal LRU cache with as many blocks as our
pool: it learns of a whole request at once, its output included, and running sequences take no memory from it.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from bench_tools import make_parser, print_table, save_json

from jpaged.config import EngineConfig
from jpaged.request import Request
from jpaged.sampling_params import SamplingParams
from jpaged.schedule import Schedule
from jpaged.scheduler import Scheduler

BLOCK = 512
HEADER = ("blocks", "requests", "hit rate", "ideal LRU", "of ideal", "no limit", "evictions", "host us/request")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2_000, 10_000, 40_000], help="sizes of the pool")
    parser.add_argument("--requests", type=int, help="only the first N")
    parser.add_argument("--running", type=int, default=16, help="most sequences at once (default: 16)")
    args = parser.parse_args()
    lines = read_trace(args.trace)[: args.requests]
    rows = [measure(lines, blocks, args.running) for blocks in args.blocks]
    print_table(HEADER, rows)
    save_json(args.json, [dict(zip(HEADER, row, strict=True)) for row in rows])


def read_trace(path: Path) -> list[dict]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        return [json.loads(line) for line in file]


def measure(lines: list[dict], blocks: int, running: int) -> tuple:
    tokens = sum(line["input_length"] for line in lines)
    ideal = count_hits(lines, blocks) / tokens
    hits, evictions, seconds = run(lines, blocks, running)
    return (
        blocks,
        len(lines),
        f"{hits / tokens:.2%}",
        f"{ideal:.2%}",
        f"{hits / tokens / ideal:.2%}",
        f"{count_hits(lines, None) / tokens:.2%}",
        evictions,
        round(seconds / len(lines) * 1e6),
    )


def cacheable(line: dict) -> list[int]:
    """Ids of the blocks that a prompt may find in a cache: full ones, and one token at least is computed."""
    return line["hash_ids"][: (line["input_length"] - 1) // BLOCK]


def count_hits(lines: Iterable[dict], limit: int | None) -> int:
    """Tokens found in an ideal LRU cache of `limit` blocks, or without limit."""
    cache: OrderedDict[object, None] = OrderedDict()
    hits = 0
    for number, line in enumerate(lines):
        known = True
        for block in cacheable(line):
            known = known and block in cache
            hits += BLOCK * known
        prompt = line["input_length"] // BLOCK
        whole = (line["input_length"] + line["output_length"] - 1) // BLOCK
        own = [(number, column) for column in range(prompt, whole)]  # filled by the output: nobody asks for them
        for block in reversed([*line["hash_ids"][:prompt], *own]):
            cache[block] = None
            cache.move_to_end(block)
        while limit is not None and len(cache) > limit:
            cache.popitem(last=False)
    return hits


def run(lines: list[dict], blocks: int, running: int) -> tuple[int, int, float]:
    """Tokens found in our cache, evictions, and the host's seconds in the scheduler."""
    longest = max(line["input_length"] + line["output_length"] for line in lines)
    config = EngineConfig(
        num_blocks=blocks + 1,
        max_model_len=longest,
        block_size=BLOCK,
        max_num_seqs=running,
        max_num_batched_tokens=longest,
        decode_steps=BLOCK,
        watermark=0.0,
        async_scheduling=False,
    )
    scheduler = Scheduler(config)
    params = SamplingParams(max_tokens=None)
    waiting = iter(enumerate(lines))
    seconds = 0.0
    while True:
        while len(scheduler.waiting) < 2 and (entry := next(waiting, None)) is not None:
            number, line = entry
            request = Request(str(number), [0] * line["input_length"], params, line["output_length"] or 1, seed=0)
            request.block_keys = [
                block.to_bytes(8, "little") for block in line["hash_ids"][: line["input_length"] // BLOCK]
            ]
            start = time.perf_counter()
            scheduler.add(request)
            seconds += time.perf_counter() - start
        if not scheduler.has_unfinished():
            break
        start = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        tokens, left = answer(plan, config, scheduler.steps_read)
        restart = time.perf_counter()
        scheduler.update(plan, tokens, left)
        seconds += time.perf_counter() - restart + middle - start
    return scheduler.prefix_hits, scheduler.index.evictions, seconds


def answer(plan: Schedule, config: EngineConfig, step: int) -> tuple[np.ndarray, np.ndarray]:
    """What a device would send: every row gets its tokens, no two sequences the same."""
    requests = [*plan.decode, *(chunk.request for chunk in plan.prefill)]
    left = np.array([request.max_tokens - len(request.output_token_ids) for request in requests])
    decoded = np.arange(len(requests)) < len(plan.decode)
    counts = np.where(decoded, np.minimum(left, plan.num_steps), 1)
    if plan.stop_early and len(plan.decode):
        counts = np.minimum(counts, left[decoded].min())
    steps = np.arange(plan.num_steps)[:, None]
    tokens = np.where(steps < counts, 1 + (step * 7919 + np.arange(len(requests))) % 100_000 + steps, -1)
    for row, chunk in enumerate(plan.prefill, len(plan.decode)):
        if not chunk.last:
            tokens[:, row], counts[row] = -1, 0
    return tokens, left - counts


if __name__ == "__main__":
    main()
