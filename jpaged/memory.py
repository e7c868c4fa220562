"""How many KV blocks an engine gets: from what the user allows, what the device has, and what can be of use.

And where blocks are kept that the device has no room for.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping

import jax
import numpy as np
from jpaged_models import LoadedModel, ModelConfig, init_cache, repeat_kv_heads

from jpaged.config import EngineConfig, check_kv_cache_dtype
from jpaged.control_rows import counts_dtype
from jpaged.tiers import HostStore, open_disk_store

CPU_KV_BYTES = 4 << 30  # unless asked for more: a laptop has other things to do with its memory


def pick_kv_dtype(loaded: LoadedModel, kv_cache_dtype: str) -> str:
    """What keys and values are stored in; "auto" is the model's dtype. Raises ValueError for an unknown name."""
    check_kv_cache_dtype(kv_cache_dtype)
    return loaded.dtype.name if kv_cache_dtype == "auto" else kv_cache_dtype


def block_bytes(model: ModelConfig, block_size: int, kv_dtype: str, devices: int = 1) -> int:
    """Bytes of one block over all layers, keys and values, with their scales if they are quantised.

    devices: among which KV heads are divided; the bytes are those of all of them together.
    """
    block = jax.eval_shape(lambda: init_cache(repeat_kv_heads(model, devices), 1, block_size, kv_dtype))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(block))


def make_store(loaded: LoadedModel, config: EngineConfig, model_key: bytes) -> HostStore:
    """What keeps blocks off the device, as the configuration says. Raises ValueError for a folder that is unusable."""
    kv_dtype = pick_kv_dtype(loaded, config.kv_cache_dtype)
    size = block_bytes(loaded.config, config.block_size, kv_dtype, config.tensor_parallel_size)
    disk = None
    if config.prefix_cache_dir is not None:
        stored = jax.eval_shape(lambda: init_cache(loaded.config, 1, config.block_size, kv_dtype))[0].k.dtype
        identity = {
            "model": hashlib.sha256(model_key + fingerprint(loaded.params)).hexdigest(),
            "kv_cache_dtype": kv_dtype,
            "stored_as": stored.name,
            "block_size": config.block_size,
            "block_bytes": size,
            "byte_order": sys.byteorder,
        }
        disk = open_disk_store(config.prefix_cache_dir, identity, size, config.prefix_cache_disk_bytes)
    swap_bytes = 0 if config.preemption == "recompute" else config.swap_space_bytes
    return HostStore(size, swap_bytes, config.prefix_cache_host_bytes, disk)


def fingerprint(params: Mapping[str, jax.Array]) -> bytes:
    """What tells checkpoints of one architecture apart: a hash of up to 64 numbers of every weight."""
    digest = hashlib.sha256()
    for name, value in sorted(params.items()):
        digest.update(repr((name, value.shape, value.dtype.name)).encode())
        some = np.linspace(0, value.size - 1, min(64, value.size), dtype=np.int64)
        at = tuple(each.astype(np.int32) for each in np.unravel_index(some, value.shape)) if value.shape else ()
        digest.update(np.asarray(value.at[at].get(mode="clip")).tobytes())
    return digest.digest()


def find_window(model: ModelConfig) -> int | None:
    """Tokens that a layer sees at most, itself included; None if any layer sees all."""
    windows = [window for window in model.windows if window is not None]
    return max(windows) if windows and len(windows) == len(model.windows) else None


def pick_num_blocks(
    model: ModelConfig,
    kv_dtype: str,
    *,
    block_size: int,
    max_model_len: int | None,
    max_num_seqs: int,
    num_blocks: int | None,
    kv_cache_memory_bytes: int | None,
    memory_fraction: float,
    devices: int = 1,
) -> tuple[int, int]:
    """(num_blocks, max_model_len).

    num_blocks: as given, else what kv_cache_memory_bytes holds, else what is left of memory_fraction of the device's
    memory (the weights are on it already), but never more than max_num_seqs sequences of max_model_len can fill.
    max_model_len: as given, else the model's limit, or what the pool holds where that is less.
    devices: among which the model is divided; memory is that of each.
    Raises ValueError for values out of range.
    """
    if not 0.0 < memory_fraction <= 1.0:
        raise ValueError(f"memory_fraction must be in (0, 1], got {memory_fraction!r}")
    for name, value in (
        ("block_size", block_size),
        ("max_num_seqs", max_num_seqs),
        ("num_blocks", num_blocks),
        ("max_model_len", max_model_len),
        ("kv_cache_memory_bytes", kv_cache_memory_bytes),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value!r}")
    limit = model.max_position_embeddings
    if max_model_len is not None and max_model_len > limit:
        raise ValueError(f"max_model_len={max_model_len} is more than the {limit} positions the model was made for")
    per_block = block_bytes(model, block_size, kv_dtype, devices) // devices
    if num_blocks is None:
        useful = max_num_seqs * -(-(max_model_len or limit) // block_size) + 1
        if kv_cache_memory_bytes is not None:
            affordable = kv_cache_memory_bytes // per_block
        else:
            # Besides KV, the engine keeps a count for each token of the vocabulary in each slot (see `Controls`).
            counts = max_num_seqs * model.vocab_size * counts_dtype(max_model_len or limit).itemsize
            affordable = (_free_bytes(memory_fraction, devices) - counts) // per_block
        num_blocks = int(min(useful, max(affordable, 0)))
        if num_blocks < 2:
            raise ValueError(
                f"no room for KV blocks: one takes {per_block} bytes and at least two are needed; "
                "raise kv_cache_memory_bytes or memory_fraction, or use a smaller model"
            )
    capacity = (num_blocks - 1) * block_size
    return num_blocks, max_model_len or min(limit, capacity)


def _free_bytes(memory_fraction: float, devices: int) -> int:
    """Bytes that may still be taken on the first device; a CPU that is several has one memory for all."""
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return max(0, int(stats["bytes_limit"] * memory_fraction) - stats["bytes_in_use"])
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(available * memory_fraction), CPU_KV_BYTES) // devices
