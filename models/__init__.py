"""Flax decoders, checkpoint loading and tokenizers (installed as jpaged_models)."""

from pallas_kernels import available_backends, describe_backend, settle_memory

from .cache_blocks import copy_cache_blocks, read_cache_blocks, read_sequence, write_cache_blocks
from .config import ModelConfig
from .contiguous import TILE as CONTIGUOUS_TILE
from .contiguous import contiguous_attend
from .decoder import Attend, Decoder
from .errors import CheckpointError, ConfigError
from .generation import GenerationDefaults
from .load import LoadedModel, load_model, load_tokenizer
from .orbax_checkpoint import save_checkpoint
from .packing import LINEAR_BACKENDS, QUANTIZATIONS, check_quantization, pack_model, pick_linear_backend
from .paged import KVPages, cache_shapes, init_cache, paged_attend
from .params import flatten_params, merge_params, param_shapes
from .random_weights import random_model
from .split import (
    check_split,
    make_mesh,
    param_spec,
    repeat_kv_heads,
    split_of,
    whole_shapes,
)
from .tokenizer import Tokenizer

__all__ = [
    "CONTIGUOUS_TILE",
    "LINEAR_BACKENDS",
    "QUANTIZATIONS",
    "Attend",
    "CheckpointError",
    "ConfigError",
    "Decoder",
    "GenerationDefaults",
    "KVPages",
    "LoadedModel",
    "ModelConfig",
    "Tokenizer",
    "available_backends",
    "cache_shapes",
    "check_quantization",
    "check_split",
    "contiguous_attend",
    "copy_cache_blocks",
    "describe_backend",
    "flatten_params",
    "init_cache",
    "load_model",
    "load_tokenizer",
    "make_mesh",
    "merge_params",
    "pack_model",
    "paged_attend",
    "param_shapes",
    "param_spec",
    "pick_linear_backend",
    "random_model",
    "read_cache_blocks",
    "read_sequence",
    "repeat_kv_heads",
    "save_checkpoint",
    "settle_memory",
    "split_of",
    "whole_shapes",
    "write_cache_blocks",
]
