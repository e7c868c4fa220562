"""Paged attention's kernels at Llama 3 8B's shapes beside contiguous attention and JAX's own paged kernel.

    python scripts/bench_kernels.py                    # on a GPU, under six minutes
    python scripts/bench_kernels.py --smoke            # a few small points, in seconds, on any machine
    python scripts/bench_kernels.py --tune             # which sizes of the GPU kernels' tiles are the best here
    python scripts/bench_kernels.py --compile h200     # no GPU: whether the Pallas kernels compile at all these points
    python scripts/bench_kernels.py --batch 64 --context 4096 --block-size 16 --prefill 1x4096

32 query heads, 8 KV heads of 128 numbers, bfloat16; tables in random order. Decode: every --batch with every --context;
prefill: SEQUENCESxNEW_TOKENS[@CACHED], causal; each at every --block-size. Times are those of one layer: a call goes
through up to 8 with pages of their own, so that no cache keeps them. Contenders take turns; medians are shown.

"of copy" is the rate at which a decode reads keys, values and queries and writes its output, as a share of the rate at
which this device copies a large array, "of matmul" a prefill's products as a share of its rate at a large product of
matrices; both are measured here. "/ contiguous": our time over that of the best of jax.nn.dot_product_attention (by
cuDNN on GPUs, and by XLA) and torch's, as far as they are there; "/ jax": over JAX's own paged kernel (decode, GPUs).
Each point's output is compared with the project's oracle in the same run, on some of its rows, norm over norm.
Status 1 if a point fails or its error is above 5e-3. Points for which --seconds or memory do not suffice are left out,
and named.
"""

from __future__ import annotations

import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from bench_attention import Work, decode_work, prefill_work
from bench_tools import describe_machine, make_parser, print_table, save_json, take_turns
from kernel_compiling import OURS, compile_points, summarize
from kernel_contenders import CONTIGUOUS, Contender, list_contenders
from kernel_points import HEAD_DIM, HEADS, KV_HEADS, TOKEN_BYTES, Arrays, Point, relative_error
from kernel_tuning import describe_sizes, tune

from jpaged.bench.timing import seconds
from jpaged.targets import find_target, prepare

ALLOWED_ERROR = 5e-3
MOST_TOKENS = 1 << 21  # in the cache: 8 GiB of keys and values, and as much for each layout besides
TURN_SECONDS = 0.005  # a turn takes at least so long, or the clock and the host are what is measured


class Device:
    """What this device reaches at best, measured."""

    def __init__(self, smoke: bool) -> None:
        gpu = jax.default_backend() == "gpu"
        size = (1 << 29) if gpu and not smoke else 1 << 23
        side = 8192 if gpu and not smoke else 512
        x = jnp.zeros(size, jnp.bfloat16)
        a, b = (jax.random.normal(key, (side, side), jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))
        copy, multiply = jax.jit(lambda x: x + 1), jax.jit(lambda a, b: a @ b)
        times = take_turns({"copy": lambda: copy(x), "multiply": lambda: multiply(a, b)}, 7, 4)
        self.bandwidth = 2 * x.nbytes / times["copy"]  # bytes/s, read and written
        self.flops = 2 * side**3 / times["multiply"]


def measure(point: Point, seed: int, contenders: dict[str, Contender], device: Device, repeats: int) -> dict[str, Any]:
    """A row of the table."""
    arrays = Arrays(point, seed)
    rows = arrays.sample()
    expected = arrays.expect(rows)
    runs, errors, refused = {}, {}, {}
    for name, start in contenders.items():
        if name == "xla" and "cudnn" in runs:
            continue  # of jax.nn's two ways it is never the faster one
        try:
            started = start(arrays)
            errors[name] = relative_error(started.first()[rows], expected)
        except Exception as error:  # whatever a library that is not ours raises; it takes no part
            if name == "paged":
                raise
            refused[name] = f"{type(error).__name__}: {str(error).strip()[:200]}"
            continue
        runs[name] = started.run
    calls = max(1, min(100, int(TURN_SECONDS / seconds(runs["paged"]))))
    times = {name: t / point.layers for name, t in take_turns(runs, repeats, calls).items()}
    row = describe(point, times, device)
    row |= {f"{name} us": 1e6 * t for name, t in times.items()} | {f"{name} error": e for name, e in errors.items()}
    return {**row, "checked rows": len(rows), "refused": "; ".join(f"{name}: {why}" for name, why in refused.items())}


def describe(point: Point, times: dict[str, float], device: Device) -> dict[str, Any]:
    """What the point is, and how near our time comes to the device's limits and to others' times (seconds)."""
    ours = times["paged"]
    contiguous = [times[name] for name in CONTIGUOUS if name in times]
    row: dict[str, Any] = {"work": point.work.name, "block": point.block_size}
    if point.kind == "decode":
        row |= {"GB/s": point.bytes / ours / 1e9, "of copy": point.bytes / ours / device.bandwidth}
    else:
        row |= {"TFLOP/s": point.flops / ours / 1e12, "of matmul": point.flops / ours / device.flops}
    if contiguous:
        row["/ contiguous"] = ours / min(contiguous)
    if "jax paged" in times:
        row["/ jax"] = ours / times["jax paged"]
    return row


def find_points(options: Namespace) -> Iterator[Point]:
    """The grid, the first block size's points first."""
    works = [decode_work(f"{batch}x{context}") for context in options.context for batch in options.batch]
    for block in options.block_size:
        for work in [*works, *options.prefill]:
            yield Point(work, block)


def count_most_tokens() -> int:
    """How many tokens in the cache a point may have: in four layouts they take most of the device's memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = int(stats.get("bytes_limit", 8 << 30))
    return min(MOST_TOKENS, int(0.8 * limit) // (4 * TOKEN_BYTES))


def choose_within(
    points: Iterable[Point],
    budget: float,
    started: float,
    left_out: list[str],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Point]:
    """Those that memory and time suffice for; a point is expected to take as long as the longest before it."""
    longest, most = 0.0, count_most_tokens()
    for point in points:
        name = f"{point.work.name} in blocks of {point.block_size}"
        began = clock()
        if point.kv_tokens > most:
            left_out.append(f"{name}: more than {most} tokens in the cache")
        elif began - started + longest > budget:
            left_out.append(f"{name}: {budget:.0f} seconds are over")
        else:
            yield point
            longest = max(longest, clock() - began)


def compile_all(options: Namespace) -> int:
    """`--compile`: one layer of every point, whatever the memory and time it would take to run."""
    prepare()
    try:
        target = find_target(options.compile)
    except ValueError as error:
        print(f"bench_kernels: {error}", file=sys.stderr)
        return 2
    started, rows = time.monotonic(), []
    for row in compile_points(find_points(options), target, options.tune):
        rows.append(row)
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    table = summarize(rows, options.tune)
    print_table(list(table[0]), [list(row.values()) for row in table])
    save_json(options.json, table, {"target": options.compile})
    wrong = [row for row in rows if row["kernel"] == OURS and "failed" in row]
    print(f"{len(rows) - len(wrong)} of {len(rows)} programs as they should be, {time.monotonic() - started:.0f} s")
    return 1 if wrong else 0


def main() -> int:
    started = time.monotonic()
    options = parse()
    if options.compile:
        return compile_all(options)
    print(f"{describe_machine()['device']}, JAX {jax.__version__}", flush=True)
    device = Device(options.smoke)
    print(
        f"copies {device.bandwidth / 1e9:,.0f} GB/s (read and written), multiplies {device.flops / 1e12:,.3g} TFLOP/s; "
        f"{HEADS} query heads, {KV_HEADS} KV heads, {HEAD_DIM} numbers, bfloat16",
        flush=True,
    )
    limits = {"copy GB/s": round(device.bandwidth / 1e9), "matmul TFLOP/s": round(device.flops / 1e12, 2)}
    contenders = list_contenders()
    left_out: list[str] = []
    table = []
    for number, point in enumerate(choose_within(find_points(options), options.seconds, started, left_out)):
        try:
            if options.tune:
                row = tune(point, number, options.repeats, options.smoke)
            else:
                row = measure(point, number, contenders, device, options.repeats)
        except Exception as error:  # the other points are still worth their time; this one counts as wrong
            row = {"work": point.work.name, "block": point.block_size, "failed": f"{type(error).__name__}: {error}"}
        table.append(row)
        save_json(options.json, table, limits)  # now, so that a run that is stopped leaves what it had
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    print()
    for name in left_out:
        print(f"left out: {name}")
    shown = ("work", "block", "paged us", "GB/s", "of copy", "TFLOP/s", "of matmul", "/ contiguous", "/ jax")
    shown = describe_sizes() if options.tune else (*shown, "paged error")
    print_table(shown, [[row.get(column) for column in shown] for row in table])
    wrong = [row for row in table if not row.get("paged error", math.nan) <= ALLOWED_ERROR]
    if wrong or not table:
        print(f"{len(wrong)} of {len(table)} points failed or have an error above {ALLOWED_ERROR}", file=sys.stderr)
    return 1 if wrong or not table else 0


def parse() -> Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--smoke", action="store_true", help="a few small points (an option that is given is kept)")
    add("--tune", action="store_true", help="measure the GPU kernels with tiles of other sizes (elsewhere interpreted)")
    add("--compile", metavar="TARGET", help="measure nothing, and compile for a target of jpaged plan, e.g. h200")
    add("--batch", nargs="*", type=int, help="sequences of decode points (default: 1 16 64 256; with --tune 64 1 256)")
    add("--context", nargs="*", type=int, help="tokens of each (default: 4096 1024 128 32768; with --tune 4096 1024)")
    add("--block-size", nargs="+", type=int, help="tokens a block (default: 16 32 64 128; with --tune 16)")
    add("--prefill", nargs="*", type=prefill_work, help="prefill points, SEQUENCESxNEW_TOKENS[@CACHED]")
    add("--seconds", type=float, default=330.0, help="after which no point is begun (default: 330)")
    add("--repeats", type=int, help="turns of each contender (default: 7)")
    options = parser.parse_args()
    defaults: dict[str, Any] = {
        "batch": [1, 16, 64, 256],
        "context": [4096, 1024, 128, 32768],
        "block_size": [16] if options.tune else [16, 32, 64, 128],
        "prefill": _works("1x4096 4x4096 1x512 16x512 256x128 1x32768 1x2048@30720"),
        "repeats": 7,
    }
    if options.tune:
        defaults |= {"batch": [64, 1, 256], "context": [4096, 1024], "prefill": _works("1x4096 16x512")}
    if options.smoke:
        smoke: dict[str, Any] = {"batch": [2], "context": [40], "prefill": _works("2x24 1x8@16")}
        defaults |= {**smoke, "block_size": [16] if options.tune else [16, 32], "repeats": 1}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in ("batch", "context", "block_size", "repeats"):
        values = getattr(options, name)
        if any(value < 1 for value in (values if isinstance(values, list) else [values])):
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {values}")
    return options


def _works(text: str) -> list[Work]:
    return [prefill_work(word) for word in text.split()]


if __name__ == "__main__":
    sys.exit(main())
