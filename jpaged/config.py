"""What an engine is told at start: sizes, limits and policies, validated before any device work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8")
DECODE_ROWS_MIN = 8  # a bf16 matrix product with fewer rows leaves XLA:CPU's fast path
TOKEN_BUCKET_MIN = 32
# A step of 132 tokens costs as much as its bucket of 256. Below this share, fill the smaller bucket instead.
MIN_BUCKET_FILL = 0.7
PREEMPTION_MODES = ("recompute", "swap", "auto")


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of one engine. Every length is in tokens, every `num_blocks` counts the null block too.

    block_size              tokens a KV block holds
    num_blocks              blocks in the pool; block 0 is the null block
    max_model_len           longest prompt + output of one request
    max_num_seqs            sequences that run at once (slots)
    max_num_batched_tokens  most tokens in one step; longer prompts are prefilled in chunks
    decode_steps            most decode iterations in one dispatch
    watermark               share of the pool that admission leaves free for running sequences to grow into
    async_scheduling        plan a step while the previous one runs
    attention_backend       what reads and writes the pages: "auto" or a name of pallas_kernels' backends
    tensor_parallel_size    devices that the model and its KV heads are divided among (see models/split.py)
    linear_backend          products: "cpu" (packed weights, the native kernels), "xla" or "auto"
    free_padding            rows that are padding cost nothing (packed weights, see models/packing.py): fewer sizes are
                            compiled, and no step is cut down to fill one
    kv_cache_dtype          what keys and values are stored in, one of KV_CACHE_DTYPES; "auto": the model's dtype
    enable_prefix_caching   keep the full blocks of what was computed for later prompts that begin alike
    preemption              what becomes of the blocks of a sequence that makes way, one of PREEMPTION_MODES: computed
                            again, copied to the host and back, or whichever took less time when both were measured
    swap_space_bytes        host memory for blocks of such sequences; 0 leaves none, so all is computed again
    prefix_cache_host_bytes host memory for cached blocks that the device has no room for; 0: none
    prefix_cache_dir        folder for those that go from there, kept for the next engine of the same model; None: none
    prefix_cache_disk_bytes most bytes in that folder
    window                  most tokens that any layer sees, itself included: blocks behind it are given back while a
                            sequence runs; None: all. An engine fills it in from its model (see memory.py)
    max_stop_ids            stop ids of a request that the device looks at; the host looks at the rest
    max_logprobs            most tokens a request may ask log-probabilities of
    max_logit_bias          most entries of logit_bias in a request (with min_tokens, its stop ids count too)
    max_bad_words           most bad words of several tokens in a request, each of at most ...
    max_bad_word_tokens     ... this many tokens
    logits_processor        a jit-able (logits f32[n, V], args f32[n, A], position i32[n]) -> f32[n, V], applied to
                            requests that give extra_args, after the bias and before the penalties
    processor_args          {name: default} of the arguments A that requests may give it
    """

    num_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    decode_steps: int = 8
    watermark: float = 0.01
    async_scheduling: bool = True
    enable_prefix_caching: bool = True
    preemption: str = "auto"
    swap_space_bytes: int = 4 << 30
    prefix_cache_host_bytes: int = 0
    prefix_cache_dir: str | None = None
    prefix_cache_disk_bytes: int = 16 << 30
    attention_backend: str = "auto"
    linear_backend: str = "auto"
    tensor_parallel_size: int = 1
    free_padding: bool = False
    kv_cache_dtype: str = "auto"
    window: int | None = None
    max_stop_ids: int = 8
    max_logprobs: int = 20
    max_logit_bias: int = 512
    max_bad_words: int = 64
    max_bad_word_tokens: int = 16
    logits_processor: Callable | None = None
    processor_args: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in (
            "num_blocks",
            "max_model_len",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "decode_steps",
            "tensor_parallel_size",
            "max_stop_ids",
            "max_logprobs",
            "max_logit_bias",
            "max_bad_words",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.max_bad_word_tokens < 2:
            raise ValueError(f"max_bad_word_tokens must be at least 2, got {self.max_bad_word_tokens!r}")
        if self.processor_args and self.logits_processor is None:
            raise ValueError("processor_args must be empty without a logits_processor, got " + str(self.processor_args))
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark!r}")
        check_kv_cache_dtype(self.kv_cache_dtype)
        if self.preemption not in PREEMPTION_MODES:
            raise ValueError(f"preemption must be one of {list(PREEMPTION_MODES)}, got {self.preemption!r}")
        for name in ("swap_space_bytes", "prefix_cache_host_bytes", "prefix_cache_disk_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
        if not self.enable_prefix_caching and (self.prefix_cache_host_bytes or self.prefix_cache_dir is not None):
            raise ValueError("prefix_cache_host_bytes and prefix_cache_dir need enable_prefix_caching=True, got False")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), because every running "
                f"sequence decodes one token in a step; got {self.max_num_batched_tokens}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be None or at least 1, got {self.window!r}")
        if self.most_held_blocks > self.num_blocks - 1:
            raise ValueError(
                f"num_blocks={self.num_blocks} (one of them the null block) of {self.block_size} tokens cannot hold "
                f"one sequence of max_model_len={self.max_model_len} tokens; it needs "
                f"{self.most_held_blocks + 1} blocks: raise the KV memory or lower max_model_len"
            )

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def most_held_blocks(self) -> int:
        """Blocks that one sequence can have at once: with a window those of the window and of what a step adds."""
        if self.window is None:
            return self.max_blocks_per_seq
        added = max(self.max_num_batched_tokens, 2 * self.decode_steps)  # decoded in the steps under way
        return min((self.window + added - 2) // self.block_size + 2, self.max_blocks_per_seq)

    @property
    def max_orders(self) -> int:
        """Orders about named blocks that one plan holds (see named_blocks.py): the scheduler keeps within them.

        Room for the blocks of two sequences of the greatest length and some, besides what a step may need: a drop for
        each block that decoding sequences grow by, and a name for each block that prompts fill.
        """
        grown = self.max_num_seqs * -(-self.decode_steps // self.block_size)
        grown += 0 if self.window is None else self.max_num_seqs  # each may give up blocks
        return 2 * self.max_blocks_per_seq + 4 * self.max_num_seqs + grown + self.max_filled_blocks

    @property
    def max_filled_blocks(self) -> int:
        """Blocks that the prompt tokens of one step can fill: each of its chunks may complete one more."""
        return -(-self.max_num_batched_tokens // self.block_size) + self.max_num_seqs

    @property
    def num_names(self) -> int:
        """Names for blocks; more than blocks, because a name that goes is not given again in the same plan."""
        return self.num_blocks + self.max_orders

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Row counts that a decode program is compiled for."""
        return self._grow_sizes(DECODE_ROWS_MIN, self.max_num_seqs)

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """Token counts that a mixed (prefill and decode) program is compiled for."""
        return self._grow_sizes(TOKEN_BUCKET_MIN, self.max_num_batched_tokens)

    def _grow_sizes(self, first: int, last: int) -> tuple[int, ...]:
        return grow_sizes(last if self.free_padding else min(first, last), last, 2)


def check_kv_cache_dtype(name: str) -> None:
    """Raises ValueError unless it is one of KV_CACHE_DTYPES."""
    if name not in KV_CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(map(repr, KV_CACHE_DTYPES))}, got {name!r}")


def grow_sizes(first: int, last: int, growth: int) -> tuple[int, ...]:
    """first, growth*first, ... up to `last`, both rounded up to a multiple of DECODE_ROWS_MIN."""
    last = -(-last // DECODE_ROWS_MIN) * DECODE_ROWS_MIN
    sizes = []
    size = -(-first // DECODE_ROWS_MIN) * DECODE_ROWS_MIN
    while size < last:
        sizes.append(size)
        size *= growth
    return (*sizes, last)


def cut_to_bucket(buckets: tuple[int, ...], size: int, least: int, most: int) -> int:
    """How large a step may be that would have `size` tokens: `most`, unless it computes mostly padding.

    Then the bucket below, if it holds more than `least`.
    """
    bucket = pick_bucket(buckets, max(size, 1))
    smaller = buckets[max(buckets.index(bucket) - 1, 0)]
    return smaller if size < MIN_BUCKET_FILL * bucket and least < smaller < size else most


def pick_bucket(buckets: tuple[int, ...], size: int) -> int:
    """The smallest bucket that holds `size`."""
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise ValueError(f"{size} is more than the largest bucket {buckets[-1]}")
