"""Options that commands share: those of sampling and of the engine, named as in vLLM where they mean the same."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from jpaged_models import QUANTIZATIONS

from jpaged.config import KV_CACHE_DTYPES, PREEMPTION_MODES
from jpaged.policies import POLICIES
from jpaged.sampling_params import SamplingParams

# Fields of SamplingParams that the command line can set; what is not given, the checkpoint recommends.
SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)
# Arguments of LLM that it can set; what is not given, LLM chooses.
ENGINE = (
    "tokenizer",
    "dtype",
    "quantization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_dtype",
    "kv_cache_memory_bytes",
    "preemption",
    "swap_space",
    "seed",
    "memory_fraction",
    "tensor_parallel_size",
    "enable_prefix_caching",
    "prefix_cache_host_bytes",
    "prefix_cache_dir",
    "prefix_cache_disk_bytes",
    "scheduling_policy",
    "decode_steps",
    "max_logprobs",
)


def add_sampling_arguments(group: argparse._ArgumentGroup) -> None:
    """Options named as the fields of SamplingParams; absent from the result unless given."""
    add = group.add_argument
    default = SamplingParams()
    add("--max-tokens", type=int, metavar="N", help=f"most tokens of an output (default: {default.max_tokens})")
    add("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens; 0: from all")
    add("--top-p", type=float, metavar="P", help="sample from the likeliest tokens whose probabilities reach P")
    add("--min-p", type=float, metavar="P", help="leave out tokens less than P times as likely as the likeliest")
    add("--repetition-penalty", type=float, metavar="X", help="above 1: tokens seen before become less likely")
    add("--frequency-penalty", type=float, metavar="X", help="taken from a token's logit each time it was generated")
    add("--presence-penalty", type=float, metavar="X", help="taken from the logit of tokens that were generated")
    add("--min-tokens", type=int, metavar="N", help="no end of an output before N tokens")
    add("--stop", nargs="+", metavar="TEXT", help="texts that end an output")
    add("--stop-token-ids", type=int, nargs="+", metavar="ID", help="tokens that end an output, besides the model's")
    add("--ignore-eos", action="store_true", help="go on after the model's end of text")


def add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    """Options named as the arguments of LLM; absent from the result unless given."""
    add = group.add_argument
    add("--tokenizer", metavar="MODEL", help="another folder, hub id or .gguf file for the tokenizer")
    add("--dtype", choices=["auto", "float32", "bfloat16"], help="of the weights (default: auto, as stored)")
    add("--quantization", choices=[name for name in QUANTIZATIONS if name], help="round the weights to fewer bits")
    add("--max-model-len", type=int, metavar="N", help="longest prompt and output (default: the model's limit)")
    add("--max-num-seqs", type=int, metavar="N", help="prompts that run at once (default: 32 on CPU, else 256)")
    add(
        "--max-num-batched-tokens", type=int, metavar="N", help="most tokens in a step (default: 512 on CPU, else 2048)"
    )
    add("--block-size", type=int, metavar="N", help="tokens in a KV block (default: 16)")
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help="of keys and values (default: auto, as --dtype)")
    add("--kv-cache-memory-bytes", type=int, metavar="BYTES", help="memory for KV blocks (default: what is of use)")
    add("--preemption", choices=PREEMPTION_MODES, help="of prompts that make way for others (default: auto)")
    add("--swap-space", type=float, metavar="GIB", help="host memory for their KV blocks (default: 4)")
    add("--seed", type=int, metavar="N", help="the same seed and prompts give the same outputs (default: 0)")
    add(
        "--gpu-memory-utilization",
        "--memory-fraction",
        dest="memory_fraction",
        type=float,
        metavar="X",
        help="share of the device's memory to use (default: 0.9, on CPU at most 4 GiB for KV blocks)",
    )
    add("--tensor-parallel-size", type=int, metavar="N", help="devices to divide the model among (default: 1)")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="keep computed blocks for later prompts that begin alike (default: yes)",
    )
    add("--prefix-cache-host-bytes", type=int, metavar="BYTES", help="host memory for blocks it evicts (default: none)")
    add("--prefix-cache-dir", metavar="FOLDER", help="for those evicted from there; kept for the next process")
    add("--prefix-cache-disk-bytes", type=int, metavar="BYTES", help="most that may lie in it (default: 16 GiB)")
    add("--scheduling-policy", choices=list(POLICIES), help="who is served first (default: fcfs)")
    add("--decode-steps", type=int, metavar="N", help="most tokens an output gets in one dispatch (default: 8)")
    add("--max-logprobs", type=int, metavar="N", help="most log-probabilities a token may have (default: 20)")


def pick(given: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}
