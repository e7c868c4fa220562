"""What the compiler says of the step programs: the KV pool is updated in place, no copy of it or of a weight."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jpaged_models import ModelConfig, param_shapes
from optimised import compile_optimised
from tiny import HF_CONFIG

from jpaged import EngineConfig
from jpaged.block_copies import COPIED_AT_ONCE, content_shapes, load_blocks, save_blocks
from jpaged.memory import block_bytes
from jpaged.runner import build_programs
from jpaged.state import init_state

LARGE = {**HF_CONFIG, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
GIGABYTE = 1 << 30


def compile_step(kind: str, dtype: str, kv_dtype: str) -> tuple[jax.stages.Compiled, int, list[tuple[int, ...]]]:
    """(compiled program with a pool of 1 GB, bytes of the pool, shapes of the pool's and the weights' arrays).

    The embedding alone is over 6 % of the pool: a copy of it shows in the temporaries too.
    """
    model = ModelConfig.from_hf({**LARGE, "vocab_size": 1 << 17})
    config = EngineConfig(
        num_blocks=GIGABYTE // block_bytes(model, 16, kv_dtype),
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        decode_steps=4,
    )
    graphdef, params = param_shapes(model, jnp.dtype(dtype))
    state = jax.eval_shape(lambda: init_state(model, config, kv_dtype))
    programs = build_programs(graphdef, config, model.vocab_size)
    layout, program = (programs.decode if kind == "decode" else programs.mixed)[8 if kind == "decode" else 32]
    compiled = compile_optimised(program.lower(params, state, jax.ShapeDtypeStruct((layout.size,), np.int32)))
    pool = jax.tree.leaves(state.cache)
    pool_shapes = list({leaf.shape for leaf in pool})  # K and V, and their scales
    weights = [leaf.shape for leaf in params.values() if leaf.ndim == 2]
    return compiled, sum(leaf.size * leaf.dtype.itemsize for leaf in pool), [*pool_shapes, *weights]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_copies_to_and_from_the_host_touch_only_what_they_copy(kv_dtype):
    model = ModelConfig.from_hf(LARGE)
    config = EngineConfig(num_blocks=GIGABYTE // block_bytes(model, 16, kv_dtype), max_model_len=512)
    state = jax.eval_shape(lambda: init_state(model, config, kv_dtype))
    most = 3 * COPIED_AT_ONCE * block_bytes(model, 16, kv_dtype)
    places = jax.ShapeDtypeStruct((3, COPIED_AT_ONCE), np.int32)
    names = jax.ShapeDtypeStruct((COPIED_AT_ONCE,), np.int32)
    save = jax.jit(save_blocks).lower(state.cache, state.tables, state.named, places)
    saving = compile_optimised(save).memory_analysis()
    assert saving.output_size_in_bytes < most and saving.temp_size_in_bytes < most
    content = content_shapes(state.cache, config.num_blocks)
    load = jax.jit(load_blocks, donate_argnums=(0, 1, 2)).lower(state.cache, state.pool, state.named, names, content)
    loading = compile_optimised(load).memory_analysis()
    assert loading.alias_size_in_bytes > 0.99 * GIGABYTE and loading.temp_size_in_bytes < most


@pytest.mark.parametrize(
    ("kind", "dtype", "kv_dtype"),
    [
        ("decode", "float32", "float32"),
        ("mixed", "float32", "float32"),
        ("decode", "bfloat16", "bfloat16"),
        ("mixed", "bfloat16", "bfloat16"),
        ("decode", "bfloat16", "fp8"),
        ("mixed", "float32", "int8"),
    ],
)
def test_pool_is_aliased_and_nothing_is_copied(kind, dtype, kv_dtype):
    compiled, pool_bytes, shapes = compile_step(kind, dtype, kv_dtype)
    memory = compiled.memory_analysis()
    assert pool_bytes > 0.99 * GIGABYTE
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 0.06 * pool_bytes
    text = compiled.as_text()
    for shape in shapes:
        dims = ",".join(map(str, shape))
        moved = re.findall(rf"= \w+\[{dims}\]\S* (?:copy|convert|transpose|copy-start)\(.*", text)
        assert not moved, moved[0]
    counts = re.findall(r"= s16\[8,131072\]\S* (?:copy|copy-start)\(.*", text)  # of tokens, for penalties
    assert "s16[8,131072]" in text and not counts, counts[0]
