"""`jpaged plan`: what fits on a machine that one does not have yet, and how fast it can be at best."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import jax.numpy as jnp
from jpaged_models import ModelConfig

from jpaged.config import KV_CACHE_DTYPES, EngineConfig
from jpaged.planner import decode_rate, fit, measure, prefill_rate
from jpaged.targets import TARGETS, find_target, prepare

GIB = 1 << 30


def add_plan(commands: argparse._SubParsersAction) -> None:
    plan = commands.add_parser(
        "plan",
        help="say what fits on a GPU or TPU, without having it",
        description="Compile a model's steps with the compiler of a GPU or TPU that need not be here, and print what "
        "of its memory they take, how many KV blocks and sequences fit besides, and how fast decoding can be at best. "
        "The compilers: pip install 'jpaged[cuda-compiler]' or 'jpaged[tpu]', in an environment each.",
    )
    plan.set_defaults(run=run_plan)
    add = plan.add_argument
    add("--model", required=True, type=Path, metavar="PATH", help="a config.json, or the folder of a checkpoint")
    add(
        "--target",
        required=True,
        choices=sorted(TARGETS),
        metavar="CHIPS",
        help="a chip, or as many as the model is divided among: " + ", ".join(sorted(TARGETS)),
    )
    add("--max-model-len", type=int, metavar="N", help="longest prompt + output (default: the model's, 8192 at most)")
    add("--max-num-seqs", type=int, default=64, metavar="N", help="sequences that run at once (default: 64)")
    add("--max-num-batched-tokens", type=int, default=2048, metavar="N", help="most tokens in a step (default: 2048)")
    add("--block-size", type=int, default=16, metavar="N", help="tokens in a KV block (default: 16)")
    dtypes = ("bfloat16", "float32")
    add("--dtype", default=dtypes[0], choices=dtypes, help="of weights and activations (default: bfloat16)")
    add(
        "--kv-cache-dtype",
        default="auto",
        choices=KV_CACHE_DTYPES,
        metavar="DTYPE",
        help=f"of keys and values: {', '.join(KV_CACHE_DTYPES)} (default: auto, as --dtype)",
    )
    add("--memory-fraction", type=float, default=0.9, metavar="F", help="of a chip's memory to use (default: 0.9)")
    add("--json", action="store_true", help="print one JSON object")


def run_plan(options: argparse.Namespace) -> None:
    if not 0.0 < options.memory_fraction <= 1.0:
        raise ValueError(f"memory_fraction must be in (0, 1], got {options.memory_fraction!r}")
    path = options.model / "config.json" if options.model.is_dir() else options.model
    model = ModelConfig.from_hf(json.loads(path.read_text(encoding="utf-8")))
    target = find_target(options.target)
    prepare()
    length = options.max_model_len or min(model.max_position_embeddings, 8192)
    if length > model.max_position_embeddings:
        raise ValueError(f"max_model_len={length} is more than the model's {model.max_position_embeddings} positions")
    config = EngineConfig(
        num_blocks=-(-length // options.block_size) + 1,
        max_model_len=length,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max(options.max_num_batched_tokens, options.max_num_seqs),
        linear_backend="xla",
        tensor_parallel_size=target.chips,
    )
    kv_dtype = options.dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    print(f"compiling two steps for {options.target}, which can take minutes", file=sys.stderr, flush=True)
    needs = measure(model, config, options.dtype, kv_dtype, target)
    usable = int(target.memory_bytes * options.memory_fraction)
    found = fit(needs, usable, options.block_size, length)
    itemsize = jnp.dtype(options.dtype).itemsize
    rates = {}
    for context in sorted({min(1024, length), length}):
        most = min(options.max_num_seqs, found.blocks // -(-context // options.block_size))
        for sequences in sorted({1, min(16, most), most}) if most else ():
            rate = decode_rate(needs, itemsize, options.block_size, sequences, context, target)
            rates[f"{sequences}x{context}"] = round(rate)
    result = {
        "target": options.target,
        "chips": target.chips,
        "memory_gib": round(target.memory_bytes / GIB, 1),
        "usable_gib": round(usable / GIB, 1),
        "weights_gib": round(needs.weights / GIB, 2),
        "state_gib": round(needs.state / GIB, 2),
        "temporaries_gib": round(needs.temporaries / GIB, 2),
        "kv_gib": round(found.kv_bytes / GIB, 2),
        "kv_bytes_per_token": needs.block // options.block_size,
        "kv_blocks": found.blocks,
        "kv_tokens": found.tokens,
        "sequences_of_max_model_len": found.sequences,
        "decode_tokens_per_s_at_most": rates,
        "prompt_tokens_per_s_at_most": round(prefill_rate(needs, itemsize, target)),
    }
    print(json.dumps(result) if options.json else describe(result, length, options.block_size))


def describe(result: dict, length: int, block_size: int) -> str:
    """For people to read."""
    r = result
    chips = together = ""
    if r["chips"] > 1:
        chips = f", divided among {r['chips']} chips (tensor_parallel_size); GiB and bytes are of each"
        together = ", all chips together"
    lines = [
        f"{r['target']}: {r['memory_gib']} GiB a chip, {r['usable_gib']} of them to be used{chips}",
        f"  weights     {r['weights_gib']:8.2f} GiB",
        f"  state       {r['state_gib']:8.2f} GiB   all that the engine keeps besides weights and KV",
        f"  temporaries {r['temporaries_gib']:8.2f} GiB   of the largest step, as the compiler says",
    ]
    if not r["kv_blocks"]:
        return "\n".join([*lines, "The model does not fit: nothing is left for a block of keys and values."])
    lines += [
        f"  KV cache    {r['kv_gib']:8.2f} GiB   {r['kv_blocks']:,} blocks of {block_size} tokens, "
        f"{r['kv_bytes_per_token']:,} bytes a token",
        f"It holds {r['kv_tokens']:,} tokens: {r['sequences_of_max_model_len']:,} sequences of {length:,}.",
        f"At most{together}, by memory's speed and the products' (a roofline; waiting for other chips is left out):",
        f"  {r['prompt_tokens_per_s_at_most']:10,} tokens/s of prompts",
    ]
    for name, rate in r["decode_tokens_per_s_at_most"].items():
        sequences, context = map(int, name.split("x"))
        among = "sequence" if sequences == 1 else "sequences"
        lines.append(
            f"  {rate:10,} tokens/s generated for {sequences} {among} with {context:,} tokens in the cache each"
        )
    return "\n".join(lines)
