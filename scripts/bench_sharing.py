"""What sharing saves: blocks of parallel sampling and beam search, and throughput of prompts with a common prefix.

And what it costs to bring a preempted sequence back: copied to the host and back, or computed again.

    python scripts/bench_sharing.py saving MODEL --lengths sharegpt_lengths.csv --requests 40
    python scripts/bench_sharing.py prefix
    python scripts/bench_sharing.py beams
    python scripts/bench_sharing.py swap
    python scripts/bench_sharing.py record MODEL beam_parents.json

saving  Share of blocks saved: (blocks without sharing - blocks used) / blocks without sharing, mean over steps, as in
        Fig. 15 of the PagedAttention paper, whose ranges stand beside. Lengths from a CSV file, or, without one, drawn
        like the paper's Alpaca (mean 19.3 tokens in, 58.5 out; geometric). Prompts of random tokens share nothing.
prefix  Output tokens a second of prompts that begin with the same 80 or 341 tokens (Fig. 16), with the prefix cache
        on and off, in turns; a random-weight model of SmolLM2-135M's shape.
beams   Milliseconds a token of beam width 4 and of 4 independent greedy requests, in turns, and the blocks they use;
        the same model, or one that is given.
swap    By block size (Fig. 19): milliseconds to copy 256 tokens to the host (out) and back (in), and to compute them
        again; and output tokens a second of requests that preempt each other for want of memory, in turns; same model.
record  Which beams go on, of groups that a real chat model runs on short instructions: what the simulator plays back
        (jpaged/simulation/data/beam_parents.json is from SmolLM2-135M-Instruct).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from bench_tools import describe_machine, make_parser, print_table, save_json
from jpaged_models import load_model
from random_model import SMOLLM2_135M, random_model
from sharing_measures import measure_beams, measure_prefix, measure_swap
from tqdm import tqdm

from jpaged import BeamSearchParams, Engine, EngineConfig, SamplingParams
from jpaged.compilation_cache import enable_compilation_cache
from jpaged.simulation.jobs import geometric_lengths
from jpaged.traces import read_trace

PAPER = {"parallel": {"alpaca": "6.1 to 9.8", "lengths": "16.2 to 30.5"}}
PAPER["beam"] = {"alpaca": "37.6 to 55.2", "lengths": "44.3 to 66.3"}
PAPER_PREFIX = {80: 1.67, 341: 3.58}  # throughput over Orca (Oracle)
INSTRUCTIONS = (
    "Give three tips for staying healthy.",
    "What are the three primary colors?",
    "Describe the structure of an atom.",
    "How can we reduce air pollution?",
    "Write a short story about a dog that finds its way home.",
    "Rewrite this sentence in the passive voice: The cook burned the soup.",
    "Name four animals that live in the sea.",
    "Explain why leaves turn red in autumn.",
    "Suggest a title for a book about a journey to the moon.",
    "What is the capital of Portugal, and what is it known for?",
    "Write two lines of a poem about rain.",
    "Sort these numbers from small to large: 7, 3, 12, 5.",
    "How do I boil an egg?",
    "Give an example of a metaphor and say what it means.",
    "Summarise what a library is in one sentence.",
    "Compare a bicycle with a car.",
    "Write a polite email that declines an invitation to dinner.",
    "What does a gardener do in spring?",
    "Find the odd one out: apple, pear, hammer, plum.",
    "Explain to a child what gravity is.",
    "List the steps of changing a light bulb.",
    "Make a question whose answer is 'because it was raining'.",
    "What is the difference between weather and climate?",
    "Describe a quiet street early in the morning.",
)


def main() -> None:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    saving = commands.add_parser("saving")
    saving.add_argument("model", help="a small real model: how long beams stay together depends on it")
    saving.add_argument("--lengths", type=Path, help="CSV file with the columns prompt_tokens, output_tokens")
    saving.add_argument("--requests", type=int, default=40)
    saving.add_argument("--max-len", type=int, default=512, help="longer requests are left out (default: 512)")
    saving.add_argument("--width", type=int, nargs="+", default=[2, 4, 6], help="outputs, and beams")
    prefix, beams, swap = (commands.add_parser(name) for name in ("prefix", "beams", "swap"))
    for command in (prefix, beams, swap):
        command.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
        command.add_argument("--repeats", type=int, default=3)
    prefix.add_argument("--prompts", type=int, default=16, help="of a pass (default: 16)")
    prefix.add_argument("--prefix", type=int, nargs="+", default=[80, 341], help="tokens in common")
    beams.add_argument("model", nargs="?", help="instead of the random-weight one")
    beams.add_argument("--width", type=int, default=4)
    swap.add_argument("--block-size", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    record = commands.add_parser("record")
    record.add_argument("model")
    record.add_argument("out", type=Path)
    record.add_argument("--width", type=int, nargs="+", default=[2, 4, 6])
    record.add_argument("--max-tokens", type=int, default=96, help="of a group (default: 96)")
    args = parser.parse_args()
    enable_compilation_cache(None)
    if args.command == "record":
        record_groups(args)
        return
    rows = {"saving": measure_saving, "prefix": run_prefix, "beams": run_beams, "swap": run_swap}[args.command](args)
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    save_json(args.json, rows)


def run_prefix(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = measure_prefix(random_model(SMOLLM2_135M, args.dtype), args.prefix, args.prompts, args.repeats)
    return [row | {"paper's ratio": PAPER_PREFIX.get(row["prefix"], "")} for row in rows]


def run_beams(args: argparse.Namespace) -> list[dict[str, Any]]:
    loaded = load_model(args.model, args.dtype) if args.model else random_model(SMOLLM2_135M, args.dtype)
    return measure_beams(loaded, args.width, args.repeats)


def run_swap(args: argparse.Namespace) -> list[dict[str, Any]]:
    return measure_swap(random_model(SMOLLM2_135M, args.dtype), args.block_size, args.repeats)


def measure_saving(args: argparse.Namespace) -> list[dict[str, Any]]:
    loaded = load_model(args.model, "float32")
    rng = np.random.default_rng(0)
    if args.lengths:
        lengths = [(request.prompt, request.output) for request in read_trace(args.lengths)]
    else:
        lengths = geometric_lengths(19.3, 58.5, 10_000, rng).tolist()
    lengths = [(p, o) for p, o in lengths if p and o and p + o <= args.max_len][: args.requests]
    kind = "lengths" if args.lengths else "alpaca"
    rows = []
    for method in ("parallel", "beam"):
        for width in args.width:
            engine = Engine(
                loaded,
                EngineConfig(num_blocks=6000, max_model_len=args.max_len, max_num_seqs=48, max_num_batched_tokens=512),
            )
            for i, (prompt, output) in enumerate(lengths):
                ids = rng.integers(3, loaded.config.vocab_size, prompt)
                if method == "beam":
                    beams = BeamSearchParams(beam_width=width, max_tokens=int(output), ignore_eos=True)
                    engine.add_request(str(i), ids, beams=beams)
                else:
                    params = SamplingParams(n=width, max_tokens=int(output), ignore_eos=True, seed=i)
                    engine.add_request(str(i), ids, params)
            while engine.has_unfinished():
                engine.step()
            saved = 100 * engine.stats().sharing_saving
            row = {"method": method, "width": width, "requests": len(lengths), "saved %": f"{saved:.1f}"}
            rows.append(row | {"paper %": PAPER[method][kind]})
    return rows


def record_groups(args: argparse.Namespace) -> None:
    """Write, for each width and instruction, which beams the beams go on from."""
    from jpaged.simulation.measure import record_parents

    loaded = load_model(args.model, "float32")
    tokenizer = loaded.tokenizer
    groups = {}
    for width in args.width:
        engine = Engine(loaded, EngineConfig(num_blocks=2000, max_model_len=512, max_num_seqs=2 * width))
        lines = []
        for number, text in enumerate(tqdm(INSTRUCTIONS, desc=f"{width} beams")):
            chat = tokenizer.apply_chat_template([{"role": "user", "content": text}])
            prompt = tokenizer.encode(chat, add_special_tokens=False)
            beams = BeamSearchParams(beam_width=width, max_tokens=args.max_tokens, ignore_eos=True)
            request = engine.add_request(str(number), prompt, beams=beams)
            lines.append(record_parents(request.beams))
        while engine.has_unfinished():
            engine.step()
        groups[width] = ["".join(each) for each in lines]
    about = {"model": Path(args.model).stem, "tokens": args.max_tokens, "jax": describe_machine()["jax"]}
    args.out.write_text(json.dumps({"about": about, "groups": groups}, indent=1) + "\n")


if __name__ == "__main__":
    main()
