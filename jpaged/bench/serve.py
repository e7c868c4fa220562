"""`jpaged bench serve`: requests to a server as users would send them, and how long they wait."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jpaged.bench.http_client import HttpClient, HttpError
from jpaged.bench.report import METRICS, Result, format_table, read_goodput, save_json, summarize
from jpaged.bench.workload import DATASETS, Ask, arrival_times, custom_asks, fitting, random_asks, trace_asks

PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
READY_POLL = 0.2  # seconds between looks at a server that is not there yet


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help that tells a default where there is one and the text does not."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, []) or "(default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def add_serve(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve",
        help="measure a running server",
        description="Send requests to a running server and measure how fast it answers.",
        formatter_class=_Help,
    )
    parser.set_defaults(run=run_serve)
    add = parser.add_argument_group("server").add_argument
    add("--base-url", metavar="URL", help="instead of --host and --port")
    add("--host", default="127.0.0.1", help="of the server")
    add("--port", type=int, default=8000, help="of the server")
    add("--api-key", metavar="KEY", help="if it wants one")
    add("--backend", choices=list(PATHS), default="openai", help="which of OpenAI's APIs to ask")
    add("--model", metavar="NAME", help="a name the server knows (default: its first)")
    add("--ready-check-timeout-sec", type=float, default=600.0, metavar="S", help="wait so long for it to be there")
    add = parser.add_argument_group("requests").add_argument
    add("--dataset-name", choices=DATASETS, default="random", help="random tokens, a trace, or prompts of a file")
    add("--dataset-path", metavar="FILE", help="of a trace (Azure, Mooncake, lengths) or of prompts (JSON lines)")
    add("--num-prompts", type=int, default=1000, metavar="N", help="how many requests")
    add("--random-input-len", type=int, default=1024, metavar="N", help="tokens of a prompt")
    add("--random-output-len", type=int, default=128, metavar="N", help="tokens of an output")
    add("--random-prefix-len", type=int, default=0, metavar="N", help="tokens that all prompts begin with")
    add("--random-range-ratio", type=float, default=0.0, metavar="X", help="lengths vary by this share")
    add("--random-vocab-size", type=int, metavar="N", help="ids to draw from (default: as the server says)")
    add("--custom-output-len", type=int, default=256, metavar="N", help="where a line of the file says none")
    add("--seed", type=int, default=0, help="of lengths, tokens and arrivals")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="outputs of exactly their length")
    add("--temperature", type=float, default=0.0, metavar="T", help="of sampling")
    add = parser.add_argument_group("arrivals").add_argument
    add("--request-rate", type=float, default=math.inf, metavar="R", help="requests a second; inf: all at once")
    add("--burstiness", type=float, default=1.0, metavar="X", help="1: Poisson; below: bursts; above: even")
    add("--max-concurrency", type=int, metavar="N", help="most requests at once")
    add("--trace-speedup", type=float, default=1.0, metavar="X", help="replay a trace so many times as fast")
    add("--num-warmups", type=int, default=0, metavar="N", help="requests before it counts")
    add = parser.add_argument_group("report").add_argument
    add("--percentile-metrics", default="ttft,tpot,itl", metavar="NAMES", help=f"of {', '.join(METRICS)}")
    add("--metric-percentiles", default="99", metavar="NUMBERS", help="as 50,90,99")
    add("--goodput", nargs="+", default=[], metavar="LIMIT", help="count requests within limits, as ttft:500 tpot:50")
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help="with every request's numbers in it")
    add("--result-dir", default=".", metavar="FOLDER", help="where")
    add("--result-filename", metavar="FILE", help="its name (default: from date and rate)")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def run_serve(options: argparse.Namespace) -> None:
    percentiles = [float(each) for each in options.metric_percentiles.split(",")]
    metrics = options.percentile_metrics.split(",")
    if unknown := set(metrics) - set(METRICS):
        raise ValueError(f"percentile_metrics knows {', '.join(METRICS)}, got {', '.join(sorted(unknown))}")
    goodput = read_goodput(options.goodput)
    found, results = asyncio.run(_measure(options, percentiles, goodput))
    print(format_table(found, metrics, percentiles))
    for error in list(dict.fromkeys(result.error for result in results if result.error))[:3]:
        print(f"failed: {error}", file=sys.stderr)
    if options.save_result or options.save_detailed:
        rate = found["request_rate"]
        name = options.result_filename or f"{options.backend}-{rate}qps-{found['date']}.json"
        if options.save_detailed:
            found |= {
                "input_lens": [each.prompt_len for each in results],
                "output_lens": [each.output_len for each in results],
                "ttfts": [each.ttft for each in results],
                "itls": [each.itl for each in results],
                "generated_texts": [each.text for each in results],
                "errors": [each.error for each in results],
            }
        save_json(Path(options.result_dir) / name, found)


async def _measure(
    options: argparse.Namespace, percentiles: list[float], goodput: dict[str, float]
) -> tuple[dict[str, Any], list[Result]]:
    url = options.base_url or f"http://{options.host}:{options.port}"
    client = HttpClient(url, api_key=options.api_key)
    about = await _wait_for(client, options.ready_check_timeout_sec)
    model = options.model or about["id"]
    asks = fitting(_make_asks(options, about), about.get("max_model_len"))
    if not asks:
        raise ValueError(f"no request fits into the model's context of {about.get('max_model_len')} tokens")
    make = _body_of(options, model)
    for ask in (asks * options.num_warmups)[: options.num_warmups]:
        warm = await send(client, PATHS[options.backend], make(ask))
        if warm.error:
            raise ValueError(f"the server refused a first request: {warm.error}")
    times = arrival_times(asks, np.random.default_rng(options.seed + 1), options.request_rate, options.burstiness)
    bodies = [make(ask) for ask in asks]
    start = time.perf_counter()
    results = await send_all(
        client,
        PATHS[options.backend],
        bodies,
        times,
        max_concurrency=options.max_concurrency,
        progress=not options.disable_tqdm,
    )
    duration = time.perf_counter() - start
    found = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": options.backend,
        "model_id": model,
        "num_prompts": len(asks),
        "left_out": options.num_prompts - len(asks),
        "request_rate": options.request_rate if math.isfinite(options.request_rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        **summarize(results, duration, percentiles, goodput),
    }
    return found, results


async def _wait_for(client: HttpClient, seconds: float) -> dict[str, Any]:
    """What the server says of its model, once it is there."""
    until = time.monotonic() + seconds
    while True:
        try:
            return (await client.get_json("/v1/models"))["data"][0]
        except OSError as error:
            if time.monotonic() >= until:
                raise ValueError(f"no server at {client.host} port {client.port}: {error}") from error
        await asyncio.sleep(READY_POLL)


def _make_asks(options: argparse.Namespace, about: dict[str, Any]) -> list[Ask]:
    rng, count = np.random.default_rng(options.seed), options.num_prompts
    if count < 1:
        raise ValueError(f"num_prompts must be at least 1, got {count}")
    if options.dataset_name != "random" and options.dataset_path is None:
        raise ValueError(f"--dataset-name {options.dataset_name} needs --dataset-path")
    if options.dataset_name == "custom":
        return custom_asks(Path(options.dataset_path), count, options.custom_output_len)
    if options.backend == "openai-chat":
        raise ValueError("random tokens and traces are for --backend openai: chat takes texts (--dataset-name custom)")
    vocab = options.random_vocab_size or about.get("vocab_size")
    if vocab is None:
        raise ValueError("the server does not say how large its vocabulary is: give --random-vocab-size")
    if options.dataset_name == "trace":
        return trace_asks(Path(options.dataset_path), count, rng, vocab, speedup=options.trace_speedup)
    return random_asks(
        count,
        rng,
        vocab,
        input_len=options.random_input_len,
        output_len=options.random_output_len,
        prefix_len=options.random_prefix_len,
        ratio=options.random_range_ratio,
    )


def _body_of(options: argparse.Namespace, model: str) -> Any:
    common = {
        "model": model,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": options.ignore_eos,
    }

    def make(ask: Ask) -> dict[str, Any]:
        if options.backend == "openai-chat":
            return common | {"messages": [{"role": "user", "content": ask.prompt}], "max_tokens": ask.output_len}
        return common | {"prompt": ask.prompt, "max_tokens": ask.output_len}

    return make


async def send_all(
    client: HttpClient,
    path: str,
    bodies: Sequence[dict[str, Any]],
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    progress: bool = False,
) -> list[Result]:
    """Send every body at its time, in seconds from now; results in their order."""
    places = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    start = time.perf_counter()
    with tqdm(total=len(bodies), desc="Requests", unit="request", disable=not progress) as bar:

        async def one(body: dict[str, Any], at: float) -> Result:
            await asyncio.sleep(start + at - time.perf_counter())
            async with places:
                result = await send(client, path, body)
            bar.update()
            return result

        return await asyncio.gather(*(one(*each) for each in zip(bodies, times, strict=True)))


async def send(client: HttpClient, path: str, body: dict[str, Any]) -> Result:
    """One streamed request, timed."""
    result = Result(start=time.perf_counter())
    last = result.start
    try:
        async with contextlib.aclosing(client.stream(path, body)) as events:
            async for event in events:
                if usage := event.get("usage"):
                    result.prompt_len, result.output_len = usage["prompt_tokens"], usage["completion_tokens"]
                for choice in event["choices"]:
                    text = choice["text"] if "text" in choice else choice["delta"].get("content")
                    if not text and not choice["finish_reason"]:
                        continue
                    now = time.perf_counter()
                    if result.ttft == 0.0:
                        result.ttft = now - result.start
                    else:
                        result.itl.append(now - last)
                    last = now
                    result.text += text or ""
        result.latency = last - result.start
    except (HttpError, OSError, KeyError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
    return result
