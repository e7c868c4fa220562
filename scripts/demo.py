#!/usr/bin/env python3
"""Answer eight chat prompts with a small real model, then show the speed and how the KV blocks were used."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
import time
from typing import TYPE_CHECKING

from fetch_demo_model import FetchError, cached_demo_model, fetch_demo_model

if TYPE_CHECKING:
    from jpaged import EngineStats

ARTICLE = (
    "The octopus is a soft-bodied animal with eight arms that lives in every ocean. It has three hearts and "
    "blue blood, and about two thirds of its nerve cells are in its arms, so that an arm can taste, feel and "
    "move on its own. Octopuses can change colour and texture in a fraction of a second to hide from "
    "predators, and they escape by squirting a cloud of ink and shooting away backwards. They are known for "
    "opening jars, finding their way through mazes and slipping out of their tanks at night. Most species "
    "live for only one or two years, and the mother usually dies soon after her eggs have hatched."
)

PROMPTS = (
    "What is the chemical symbol for gold?",
    "Give me three synonyms for 'happy'.",
    "Explain in two sentences why the sky is blue.",
    "List five things to pack for a weekend of hiking in the mountains, and say why each of them matters.",
    "Write a Python function that returns the n-th Fibonacci number, with a short comment.",
    "My friend Anna turns thirty next week. She loves cats, crosswords and strong coffee. Write a short and "
    "friendly birthday message to her.",
    "I would like to learn to play the guitar. I am forty years old, I have never played an instrument, "
    "and I can spare half an hour a day. How should I start, and what could I play after three months?",
    f"Summarise the following text in one sentence.\n\n{ARTICLE}",
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Answers may be wrong: the model has 135 million parameters.",
    )
    add = parser.add_argument
    add("--model", help="a folder, hub id or .gguf file of another chat model")
    add("--max-tokens", type=int, default=128, metavar="N", help="longest answer, in tokens")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: always the likeliest token")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest tokens, up to P")
    add("--seed", type=int, default=0, help="of the sampling, where the temperature is not 0")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of weights and KV cache")
    add("--max-num-seqs", type=int, default=8, metavar="N", help="prompts answered at once")
    add("--max-num-batched-tokens", type=int, default=128, metavar="N", help="most tokens in one step")
    add("--max-model-len", type=int, default=1024, metavar="N", help="longest prompt and answer, in tokens")
    add("--kv-cache-mb", type=int, default=256, metavar="MB", help="memory for KV blocks")
    add("--full", action="store_true", help="print whole answers")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        return run(options)
    except (FetchError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    model = options.model
    if model is None:
        if cached_demo_model() is None:
            print("Downloading SmolLM2-135M-Instruct (93 MB, once) ...", flush=True)
        model = fetch_demo_model()

    started = time.perf_counter()
    print("Loading the model ...", flush=True)
    from jpaged import LLM, SamplingParams  # here, so that --help and a bad option answer at once

    # Checked before the model is loaded: a bad value should not cost half a minute.
    sampling = [
        SamplingParams(
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed + i,
            max_tokens=options.max_tokens,
        )
        for i in range(len(PROMPTS))
    ]
    llm = LLM(
        str(model),
        dtype=options.dtype,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        kv_cache_memory_bytes=options.kv_cache_mb << 20,
        warm_up=False,
    )
    loaded = time.perf_counter()
    print(f"Loaded in {loaded - started:.1f} s. Compiling (cached for the next run) ...", flush=True)
    llm.warm_up(progress=True)
    ready = time.perf_counter()
    print(f"Compiled in {ready - loaded:.1f} s.", flush=True)

    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    outputs = llm.chat(conversations, sampling, use_tqdm=True)
    seconds = time.perf_counter() - ready

    for prompt, output in zip(PROMPTS, outputs, strict=True):
        show(prompt, output.outputs[0].text, output.outputs[0].finish_reason, options.full)
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    answer_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(
        f"\n{len(outputs)} prompts, {prompt_tokens} tokens in, {answer_tokens} tokens out in "
        f"{seconds:.1f} s: {answer_tokens / seconds:.0f} tokens/s of output\n"
    )
    show_blocks(llm.stats())
    return 0


def show(prompt: str, answer: str, finish_reason: str | None, full: bool) -> None:
    """Prints one question and its answer, cut to a few lines each unless full."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110) - 4
    print(f"\n>>> {prompt if full else textwrap.shorten(' '.join(prompt.split()), width, placeholder=' ...')}")
    # Blank lines are worth more as text when there are only a few lines to show.
    lines = [
        piece
        for line in answer.strip().splitlines()
        if full or line.strip()
        for piece in textwrap.wrap(line, width, replace_whitespace=False) or [""]
    ]
    shown = lines if full else lines[:5]
    print("\n".join(f"    {line}".rstrip() for line in shown))
    if left := len(lines) - len(shown):
        print(f"    ... ({left} more line{'s' if left > 1 else ''}; --full shows the rest)")
    elif finish_reason == "length":
        print("    ... (--max-tokens reached)")


def show_blocks(stats: EngineStats) -> None:
    """Prints how the KV blocks are used now, and were when most of them were used."""
    blocks = stats.blocks
    peak = stats.peak_blocks
    rows = (
        ("used", blocks.used, peak.used),
        ("cached (kept, in use by no prompt)", blocks.cached, peak.cached),
        ("shared by several prompts", blocks.shared, peak.shared),
        ("free", blocks.free, peak.free),
        ("utilisation of used blocks", "-", f"{stats.peak_utilization:.1%}"),
    )
    print(f"{f'KV blocks of {stats.block_size} tokens':36}{'now':>8}{'at the peak':>14}")
    for name, now, then in rows:
        print(f"{name:36}{now:>8}{then:>14}")
    print(
        f"\nUtilisation over the run: {stats.mean_utilization:.1%} of the slots in used blocks held tokens. "
        f"Preemptions: {stats.preemptions}."
    )


if __name__ == "__main__":
    sys.exit(main())
