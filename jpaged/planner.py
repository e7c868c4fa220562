"""What fits on a machine that is not here, and how fast it can be at best: from a compiled step, not from a formula.

Weights and KV are counted from their shapes; what a step needs besides is what the machine's own compiler says of it. A
step of two layers is compiled, for layers use each other's temporaries. Speed is a roofline (Williams et al., 2009): a
decode step cannot end before its weights and the keys and values of its sequences have been read once, nor before its
products are done, attention's left out. A model that is divided among chips is counted by what each of them has; the
time that they wait for one another is not.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jpaged_models import (
    ModelConfig,
    cache_shapes,
    check_split,
    param_shapes,
    repeat_kv_heads,
    split_of,
    whole_shapes,
)
from jpaged_models.split import AXIS, Split

from jpaged.chips import Chip
from jpaged.config import EngineConfig
from jpaged.parallel import state_shardings
from jpaged.runner import Programs, build_programs
from jpaged.state import EngineState, init_state
from jpaged.targets import Target, find_mesh, lower_for

LAYERS = 2  # of the model that is compiled


class Needs(NamedTuple):
    """Bytes on one chip."""

    weights: int
    read: int  # of the weights by a decode step: an embedding that is not the head too gives it a few rows only
    layers: int  # of the weights, those of layers: what every token of a prompt is multiplied with
    state: int  # all of the engine's besides KV
    temporaries: int  # of the largest step
    block: int  # one KV block over all layers


class Fit(NamedTuple):
    """What the memory left over holds."""

    kv_bytes: int
    blocks: int  # 0: the model does not fit
    tokens: int
    sequences: int  # of the greatest length


def describe_engine(
    model: ModelConfig, config: EngineConfig, dtype: str, kv_dtype: str, target: Target
) -> tuple[Programs, dict[str, jax.ShapeDtypeStruct], EngineState]:
    """The programs of an engine on the target, and the shapes of its weights and its state, placed on its chips."""
    mesh, whole = find_mesh(target), repeat_kv_heads(model, target.chips)
    graphdef, params = param_shapes(model, jnp.dtype(dtype), split_of(mesh))
    state = jax.eval_shape(lambda: init_state(whole, config, kv_dtype))
    # As the target stores them; init_state speaks of the machine that this runs on.
    state = state._replace(cache=cache_shapes(whole, config.num_blocks, config.block_size, kv_dtype, target.platform))
    if mesh is not None:
        params = whole_shapes(params, mesh)
        shardings = state_shardings(mesh, state)
        state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
    return build_programs(graphdef, config, model.vocab_size, mesh), params, state


def measure(model: ModelConfig, config: EngineConfig, dtype: str, kv_dtype: str, target: Target) -> Needs:
    """Compiles the largest steps for the target. Raises ValueError for what its kernels do not support, and for a model
    that cannot be divided among its chips.

    config: `num_blocks` is only what a step is compiled with.
    """
    check_split(model, target.chips)
    layers = min(LAYERS, model.num_layers)
    small = dataclasses.replace(model, num_layers=layers, windows=model.windows[:layers])
    programs, params, state = describe_engine(small, config, dtype, kv_dtype, target)
    temporaries = 0
    for layout, program in (programs.decode[config.decode_buckets[-1]], programs.mixed[config.token_buckets[-1]]):
        plan = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        memory: Any = lower_for(target, program, params, state, plan).compile().memory_analysis()
        temporaries = max(temporaries, memory.temp_size_in_bytes)
    return count(model, config, dtype, kv_dtype, target)._replace(
        state=byte_size(state._replace(cache=())), temporaries=temporaries
    )


def count(model: ModelConfig, config: EngineConfig, dtype: str, kv_dtype: str, target: Target) -> Needs:
    """What follows from shapes alone; nothing is compiled, and `state` and `temporaries` are 0."""
    split = Split(AXIS, target.chips) if target.chips > 1 else None
    weights = param_shapes(model, jnp.dtype(dtype), split)[1]
    embedding = byte_size(weights["embedding"])
    heads = [byte_size(x) for name, x in weights.items() if name.startswith("head.")]
    whole = repeat_kv_heads(model, target.chips)
    return Needs(
        weights=byte_size(weights),
        read=byte_size(weights) - (embedding if heads else 0),
        layers=byte_size(weights) - embedding - sum(heads),
        state=0,
        temporaries=0,
        block=byte_size(cache_shapes(whole, 1, config.block_size, kv_dtype, target.platform)) // target.chips,
    )


def fit(needs: Needs, memory_bytes: int, block_size: int, max_model_len: int) -> Fit:
    """What `memory_bytes` of a chip's memory hold besides the model; one block is the null block."""
    left = memory_bytes - needs.weights - needs.state - needs.temporaries
    blocks = max(left // needs.block - 1, 0)
    return Fit(blocks * needs.block, blocks, blocks * block_size, blocks // -(-max_model_len // block_size))


def decode_rate(
    needs: Needs, itemsize: int, block_size: int, sequences: int, context: int, chip: Chip | Target
) -> float:
    """The most tokens/s of so many sequences with so many tokens in the cache each: reading what must be read, or two
    operations for each weight and sequence, whatever takes longer.

    itemsize: bytes of a weight.
    """
    read = needs.read + sequences * context * needs.block / block_size
    operations = 2 * sequences * needs.read / itemsize
    return sequences / max(read / chip.bandwidth, operations / chip.flops)


def prefill_rate(needs: Needs, itemsize: int, chip: Chip | Target) -> float:
    """The most prompt tokens/s, by two operations for each weight of the layers and token (the head sees one token of a
    prompt)."""
    return chip.flops / (2 * needs.layers / itemsize)


def byte_size(tree: Any) -> int:
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
