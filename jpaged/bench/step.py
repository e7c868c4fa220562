"""`jpaged bench step`: how long a decode step and a prefill step take, and which of their parts take it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jpaged_models import LoadedModel
from jpaged_models.layers import multiply_head
from jpaged_models.packing import pack_as

from jpaged.bench.parts import Part, StepShape, make_parts
from jpaged.bench.report import save_json
from jpaged.bench.timing import median_of_turns, seconds
from jpaged.bench.workload import random_ids
from jpaged.cli_options import ENGINE, add_engine_arguments, pick
from jpaged.config import EngineConfig
from jpaged.llm import LLM
from jpaged.sampling_params import SamplingParams

DISPATCHES = 5  # that the whole decode step is timed over
READ_BYTES = 512 << 20
MATRIX = (512, 2048, 2048)  # rows, outputs, inputs


def add_step(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "step",
        help="measure one decode step and one prefill step",
        description="Time one decode step and one prefill step; with --breakdown each part of them by itself, over all "
        "layers, beside what the machine can read and multiply.",
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=run_step)
    parser.add_argument("--model", required=True, metavar="MODEL", help="a Hugging Face folder or hub id, or a .gguf")
    add = parser.add_argument_group("steps").add_argument
    add("--batch-size", type=int, default=32, metavar="N", help="sequences of the decode step (default: 32)")
    add("--context-len", type=int, default=256, metavar="N", help="tokens each has in the cache (default: 256)")
    add(
        "--input-len",
        type=int,
        default=512,
        metavar="N",
        help="tokens of the prompt of the prefill step (default: 512)",
    )
    add("--num-iters", type=int, default=7, metavar="N", help="turns, of which the median counts (default: 7)")
    add("--breakdown", action="store_true", help="the parts of each step as well")
    add("--output-json", metavar="FILE", help="write the numbers")
    add_engine_arguments(parser.add_argument_group("engine"))


def run_step(options: argparse.Namespace) -> None:
    given = vars(options)
    batch, context, prompt, turns = options.batch_size, options.context_len, options.input_len, options.num_iters
    for name in ("batch_size", "context_len", "input_len", "num_iters"):
        if given[name] < 1:
            raise ValueError(f"{name} must be at least 1, got {given[name]}")
    steps = given.get("decode_steps", EngineConfig.decode_steps)
    room = 1 + DISPATCHES * steps
    needed = {
        "max_num_seqs": batch,
        "max_model_len": max(context, prompt) + room,
        "max_num_batched_tokens": max(prompt, batch),
    }
    llm = LLM(options.model, **needed | pick(given, ENGINE) | {"enable_prefix_caching": False})
    config = llm.config
    fits = max(context, prompt) < config.max_model_len and prompt <= config.max_num_batched_tokens
    if batch > config.max_num_seqs or not fits:
        raise ValueError(
            f"steps of {batch} sequences of {context} tokens and a prompt of {prompt} are more than the engine takes: "
            f"max_num_seqs is {config.max_num_seqs}, max_model_len {config.max_model_len}, "
            f"max_num_batched_tokens {config.max_num_batched_tokens}"
        )
    found: dict[str, Any] = time_steps(llm, batch, context, prompt, turns)
    if "breakdown" in given:
        limits = measure_limits(llm.loaded)
        found |= limits
        # The whole step is timed while the context grows: its parts at the middle.
        middle = min(context + room // 2, config.max_model_len)
        shapes = {"decode": StepShape([1] * batch, [middle] * batch), "prefill": StepShape([prompt], [prompt])}
        for name, shape in shapes.items():
            found[f"{name}_parts"] = time_parts(make_parts(llm.loaded, config, shape), turns)
    print(format_steps(found, options))
    if "output_json" in given:
        save_json(options.output_json, found)


def time_steps(llm: LLM, batch: int, context: int, prompt: int, turns: int) -> dict[str, float]:
    """Seconds of a decode iteration and of a prefill step, and what the host does in each dispatch meanwhile."""
    rng, vocab = np.random.default_rng(0), llm.loaded.config.vocab_size

    def prefill() -> float:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        return seconds(lambda: llm.generate(random_ids(rng, vocab, prompt), params, use_tqdm=False))

    prompts = [random_ids(rng, vocab, context) for _ in range(batch)]
    times = take_turns({"decode": lambda: time_decode(llm, prompts), "prefill": prefill}, turns)
    host = llm.stats().step_times
    return {
        "decode_seconds": times["decode"],
        "prefill_seconds": times["prefill"],
        "host_seconds": host.schedule + host.dispatch + host.update,
    }


def time_decode(llm: LLM, prompts: list[list[int]]) -> float:
    """Seconds of an iteration, the mean over full dispatches in which all prompts decode."""
    engine, steps = llm.engine, llm.config.decode_steps
    room = llm.config.max_model_len - len(prompts[0])
    params = SamplingParams(temperature=0.0, max_tokens=min(1 + DISPATCHES * steps, room), ignore_eos=True)
    requests = [engine.add_request(f"step-{i}", prompt, params) for i, prompt in enumerate(prompts)]
    spent, dispatches = 0.0, 0
    while engine.has_unfinished():
        before = [len(request.output_token_ids) for request in requests]
        start = time.perf_counter()
        engine.step()
        elapsed = time.perf_counter() - start
        if all(len(request.output_token_ids) - old == steps for request, old in zip(requests, before, strict=True)):
            spent, dispatches = spent + elapsed, dispatches + 1
    if not dispatches:
        raise ValueError(f"no dispatch decoded {steps} tokens of all sequences: they have room for {room} more")
    return spent / dispatches / steps


def time_parts(parts: Mapping[str, Part], turns: int) -> dict[str, dict[str, float]]:
    """Name -> seconds, bytes and flops of each."""

    times = take_turns({name: partial(seconds, part.run) for name, part in parts.items()}, turns)
    return {name: {"seconds": times[name], "bytes": part.bytes, "flops": part.flops} for name, part in parts.items()}


def take_turns(measures: Mapping[str, Callable[[], float]], turns: int) -> dict[str, float]:
    """`median_of_turns` after a first one, which compiles."""
    for measure in measures.values():
        measure()
    return median_of_turns(measures, turns)


def measure_limits(loaded: LoadedModel, read_bytes: int = READ_BYTES) -> dict[str, float]:
    """Bytes a second that can be read, and flops of a product of the model's kind of weights."""
    rows, outputs, inputs = MATRIX
    long = jnp.ones(read_bytes // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    x = jnp.ones((rows, inputs), loaded.dtype)
    weight = pack_as(loaded, jnp.ones((outputs, inputs), loaded.dtype))
    product = jax.jit(lambda x, weight: multiply_head(x, weight, outputs, None))
    times = take_turns({"read": partial(seconds, total, long), "multiply": partial(seconds, product, x, weight)}, 9)
    return {
        "read_bytes_per_second": read_bytes / times["read"],
        "matrix_flops_per_second": 2 * rows * outputs * inputs / times["multiply"],
    }


def format_steps(found: Mapping[str, Any], options: argparse.Namespace) -> str:
    """The report that people read."""
    titles = {
        "decode": f"decode step, {options.batch_size} sequences of {options.context_len} tokens",
        "prefill": f"prefill step, {options.input_len} tokens",
    }
    lines = []
    for name, title in titles.items():
        whole = found[f"{name}_seconds"]
        lines.append(f"{title}: {whole * 1e3:.2f} ms")
        if f"{name}_parts" not in found:
            continue
        head = ("part", "ms", "share", "MB", "GB/s", "of read", "GFLOP", "GFLOP/s", "of matrix")
        lines.append("  {:<10}{:>9}{:>8}{:>10}{:>8}{:>9}{:>9}{:>9}{:>11}".format(*head))
        rest = whole
        for part, each in found[f"{name}_parts"].items():
            rest -= each["seconds"]
            lines.append("  " + format_part(part, each, whole, found))
        lines.append(
            f"  {'rest':<10}{rest * 1e3:>9.2f}{rest / whole:>8.0%}   blocks, bookkeeping, and what parts cost together"
        )
    lines.append(f"host, a dispatch (while the device works): {found['host_seconds'] * 1e3:.2f} ms")
    if "read_bytes_per_second" in found:
        read, matrix = found["read_bytes_per_second"] / 1e9, found["matrix_flops_per_second"] / 1e9
        lines.append(
            f"this machine: reads {read:.1f} GB/s, multiplies {matrix:.0f} GFLOP/s (weights of the model's kind)"
        )
    return "\n".join(lines)


def format_part(name: str, each: Mapping[str, float], whole: float, found: Mapping[str, Any]) -> str:
    spent, moved, flops = each["seconds"], each["bytes"], each["flops"]
    line = f"{name:<10}{spent * 1e3:>9.2f}{spent / whole:>8.0%}{moved / 1e6:>10.2f}{moved / spent / 1e9:>8.1f}"
    line += f"{moved / spent / found['read_bytes_per_second']:>9.0%}"
    if flops:
        rate = flops / spent
        line += f"{flops / 1e9:>9.2f}{rate / 1e9:>9.0f}{rate / found['matrix_flops_per_second']:>11.0%}"
    return line
