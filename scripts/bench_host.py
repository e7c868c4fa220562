"""The host's work in one decode step, by part: schedule, plan, dispatch, read back.

    python scripts/bench_host.py --running 256

The engine runs a model with as many layers (so as many arrays to pass) as SmolLM2-135M, but narrow, so that the device
does not hide the host. Times are CPU time of the host's thread, in a loop that waits for the device between dispatch
and reading. Where the device is the CPU itself, its threads push the host's data out of the caches; --idle-device
leaves the device's part out (the program gets a plan without rows, the result is made up): the host as it is beside an
accelerator.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import numpy as np
from bench_tools import make_parser, print_table, save_json
from random_model import SMOLLM2_135M, random_model

from jpaged import Engine, EngineConfig, SamplingParams
from jpaged.plan import pack_plan
from jpaged.schedule import Schedule

NARROW = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}
PARTS = ("schedule", "pack plan", "dispatch", "read back", "update")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--running", type=int, default=256, help="sequences decoding (default: 256)")
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10, 1000, 100_000], help="requests in the queue")
    parser.add_argument("--decode-steps", type=int, default=1, help="iterations in a dispatch (default: 1)")
    parser.add_argument("--idle-device", action="store_true", help="leave the device's work out")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--steps", type=int, default=100, help="steps timed (default: 100)")
    args = parser.parse_args()
    loaded = random_model({**SMOLLM2_135M, **NARROW, "num_hidden_layers": args.layers}, "float32")
    rows = [measure(loaded, args, waiting) for waiting in args.waiting]
    header = ["running", "waiting", *(f"{part} ms" for part in PARTS), "host total ms"]
    print_table(header, rows)
    save_json(args.json, [dict(zip(header, row, strict=True)) for row in rows])


def measure(loaded, args: argparse.Namespace, waiting: int) -> list:
    """Median milliseconds of each part with `waiting` requests queued behind the running ones."""
    length = 32 + args.steps * args.decode_steps + 64
    config = EngineConfig(
        num_blocks=args.running * (-(-length // 16)) + 1,
        max_model_len=length,
        max_num_seqs=args.running,
        max_num_batched_tokens=max(512, args.running),
        decode_steps=args.decode_steps,
        watermark=0.0,
    )
    engine = Engine(loaded, config)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for i in range(args.running + waiting):
        engine.add_request(str(i), [1 + i % 500] * 8, params)
    while len(engine.scheduler.running) < args.running or engine.scheduler.prefilling:
        engine.step()
    engine.scheduler.update(engine.pending.schedule, *engine.runner.read(engine.pending)[:2])
    engine.pending = None
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(args.steps):
        marks = [time.thread_time()]
        schedule = engine.scheduler.schedule()
        marks.append(time.thread_time())
        # dispatch() packs too: the packing is timed on its own and taken off.
        layout, program = engine.runner.programs.decode[config.decode_buckets[-1]]
        pack_plan(schedule, layout)
        marks.append(time.thread_time())
        if args.idle_device:
            dispatched = engine.runner._run(layout, program, Schedule())
        else:
            dispatched = engine.runner.dispatch(schedule)
        marks.append(time.thread_time())
        jax.block_until_ready(dispatched.result)
        ready = time.thread_time()
        result = engine.runner.read(dispatched)
        if args.idle_device:
            result = result._replace(tokens=np.full_like(result.tokens, 1), left=np.full_like(result.left, 1))
        read = time.thread_time()
        engine.scheduler.update(schedule, result.tokens, result.left)
        end = time.thread_time()
        packing = marks[2] - marks[1]
        for part, value in zip(
            PARTS, (marks[1] - marks[0], packing, marks[3] - marks[2] - packing, read - ready, end - read), strict=True
        ):
            times[part].append(value * 1e3)
    medians = [statistics.median(times[part]) for part in PARTS]
    total = float(np.median(np.sum([times[part] for part in PARTS], axis=0)))
    return [args.running, waiting, *medians, total]


if __name__ == "__main__":
    main()
