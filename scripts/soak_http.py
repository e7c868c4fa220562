"""Keep a running server busy with users who behave badly, and check that nothing is lost: blocks, memory, counts.

    jpaged serve MODEL --port 8000 &
    python scripts/soak_http.py http://127.0.0.1:8000 --streams 512 --seconds 600

Streams arrive as a Poisson process, as many at once as `--streams`. One in ten goes away in the middle, one in twenty
asks for what is not allowed. At the end the server must be empty, and its metrics must say what was seen here.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter

import numpy as np
from bench_tools import make_parser, print_table, save_json

from jpaged.bench.http_client import HttpClient, HttpError

BAD_BODIES = (
    {"prompt": ""},
    {"prompt": [5], "temperature": -1},
    {"prompt": [5], "max_tokens": 10**9},
    {"prompt": [-1]},
    {"prompt": [5], "n": 0},
    {"prompt": [5], "model": "another"},
)
SETTLE = 60.0  # seconds in which the server must be empty after the last request


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=512, help="most at once (default: 512)")
    parser.add_argument("--seconds", type=float, default=600.0, help="of arrivals (default: 600)")
    parser.add_argument("--rate", type=float, default=50.0, help="arrivals a second, as far as --streams allows")
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows, problems = asyncio.run(soak(args))
    print_table(("what", "value"), rows)
    save_json(args.json, [{"what": what, "value": value} for what, value in rows])
    if problems:
        raise SystemExit("\n".join(problems))


async def soak(args) -> tuple[list[tuple[str, str]], list[str]]:
    client, rng = HttpClient(args.url), np.random.default_rng(args.seed)
    about = (await client.get_json("/v1/models"))["data"][0]
    before = await read_metrics(client)
    seen: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    memory: list[float] = []
    places = asyncio.Semaphore(args.streams)
    tasks: set[asyncio.Task] = set()
    start = time.monotonic()
    noted = 0.0
    while time.monotonic() - start < args.seconds:
        await places.acquire()
        kind = rng.choice(["whole", "leaves", "invalid"], p=[0.85, 0.10, 0.05])
        body = BAD_BODIES[rng.integers(len(BAD_BODIES))] if kind == "invalid" else good_body(rng, args, about)
        task = asyncio.create_task(ask(client, kind, {**body, "stream": True}, int(rng.integers(1, 5)), seen, errors))
        tasks.add(task)
        task.add_done_callback(lambda task: (tasks.discard(task), places.release()))
        if time.monotonic() - noted > args.seconds / 20:
            noted = time.monotonic()
            memory.append((await read_metrics(client))["process_resident_memory_bytes"])
        await asyncio.sleep(rng.exponential(1 / args.rate))
    await asyncio.gather(*tasks)
    lasted = time.monotonic() - start
    after = await wait_until_empty(client)
    return report(before, after, seen, errors, memory, lasted)


def good_body(rng: np.random.Generator, args, about: dict) -> dict:
    ids = rng.integers(10, about["vocab_size"], int(rng.integers(1, 2 * args.input_len))).tolist()
    length = int(rng.integers(1, 2 * args.output_len))
    return {"prompt": ids, "max_tokens": length, "ignore_eos": True, "temperature": float(rng.random() < 0.5)}


async def ask(client: HttpClient, kind: str, body: dict, leave_after: int, seen: Counter, errors: Counter) -> None:
    try:
        async with contextlib.aclosing(client.stream("/v1/completions", body)) as events:
            count = 0
            async for _ in events:
                count += 1
                if kind == "leaves" and count >= leave_after:
                    seen["left"] += 1
                    return
        seen["invalid answered" if kind == "invalid" else "finished"] += 1
    except HttpError as error:
        status = str(error)[:3]
        if kind == "invalid" and status in ("400", "404"):
            seen["invalid refused"] += 1
        elif status == "429":
            seen["told to wait"] += 1
        else:
            errors[f"{kind}: {error}"] += 1
    except OSError as error:
        errors[f"{kind}: {error}"] += 1


async def read_metrics(client: HttpClient) -> dict[str, float]:
    """{name or name{reason or state}: value}."""
    text = (await client.get("/metrics")).decode()
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            label = re.search(r'(?:finished_reason|state)="(\w+)"', name)
            name = name.split("{")[0] + (f"{{{label[1]}}}" if label else "")
            found[name] = float(value)
    return found


async def wait_until_empty(client: HttpClient) -> dict[str, float]:
    until = time.monotonic() + SETTLE
    while True:
        found = await read_metrics(client)
        busy = found["jpaged:num_requests_running"] + found["jpaged:num_requests_waiting"]
        if not busy and found["jpaged:kv_cache_usage_perc"] == 0:
            return found
        if time.monotonic() > until:
            return found
        await asyncio.sleep(0.1)


def report(before: dict, after: dict, seen: Counter, errors: Counter, memory: list[float], lasted: float):
    """(rows of a table, what is not as it should be)."""

    def new(name: str) -> int:
        return int(after.get(name, 0) - before.get(name, 0))

    ended = {
        reason: new(f"jpaged:request_success_total{{{reason}}}") for reason in ("stop", "length", "abort", "error")
    }
    used = after["jpaged:kv_blocks{private}"] + after["jpaged:kv_blocks{shared}"]
    half = memory[len(memory) // 2 :] or [0.0]
    growth = (half[-1] - half[0]) / 1e6
    rows = [(name, str(count)) for name, count in sorted(seen.items())]
    rows += [(f"server: ended by {reason}", str(count)) for reason, count in ended.items()]
    rows += [
        ("output tokens/s", f"{new('jpaged:generation_tokens_total') / lasted:.0f}"),
        ("blocks in use at the end", f"{used:.0f}"),
        ("memory, second half, MB", f"{half[0] / 1e6:.0f} to {half[-1] / 1e6:.0f} ({growth:+.0f})"),
    ]
    problems = [f"{count} x {error}" for error, count in errors.most_common(5)]
    if used or after["jpaged:num_requests_running"] or after["jpaged:num_requests_waiting"]:
        problems.append("the server is not empty")
    # Who leaves may do so just when his answer ends: then it counts as ended.
    complete = ended["stop"] + ended["length"]
    if not seen["finished"] <= complete <= seen["finished"] + seen["left"]:
        problems.append(f"{seen['finished']} were finished here, {complete} by the server")
    if complete + ended["abort"] != seen["finished"] + seen["left"] or ended["error"]:
        problems.append(f"{seen['finished'] + seen['left']} were accepted here, the server ended {ended}")
    if seen["invalid answered"]:
        problems.append(f"{seen['invalid answered']} invalid requests were answered")
    return rows, problems


if __name__ == "__main__":
    main()
