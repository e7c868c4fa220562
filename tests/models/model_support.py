"""What the model tests share: tiny models, and attention over a plain contiguous cache as an oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jpaged_models import ModelConfig, init_cache, merge_params, paged_attend
from jpaged_models.weights import DictSource, load_params, recipes

from pallas_kernels import AttentionSpec, PagedBatch, rotate


def hf_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """The deterministic weights of a model under their Hugging Face names."""
    shapes = {name: shape for recipe in recipes(config).values() for name, shape in recipe.parts.items()}
    return {name: families.tensor(name, shape) for name, shape in shapes.items()}


def tiny_model(hf: dict[str, Any], max_length: int = 64) -> tuple[ModelConfig, Any, dict[str, jax.Array]]:
    """(config, graphdef, params) of a float32 model made in memory, for sequences up to ``max_length``."""
    config = ModelConfig.from_hf(hf).with_max_length(max_length)
    return config, *load_params(config, DictSource(hf_tensors(config)), "float32")


def write_folder(
    folder: Path, family: str = "llama3", dtype: Any = np.float32, shards: int = 1
) -> dict[str, np.ndarray]:
    """A Hugging Face folder of a tiny family without a tokenizer; returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    hf = families.hf_config(family)
    tensors = {name: t.astype(dtype) for name, t in hf_tensors(ModelConfig.from_hf(hf)).items()}
    (folder / "config.json").write_text(json.dumps(hf))
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return tensors
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::shards]}
        safetensors.numpy.save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def contiguous_attend(start: jax.Array) -> Any:
    """Attention of one sequence over a plain cache (k, v: [S, Hkv, D]), writing from ``start`` on."""

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, rotary: Any, cache: Any, spec: AttentionSpec, layer: Any
    ) -> Any:
        q, k = rotate(q, rotary), rotate(k, rotary)
        keys, values = (jax.lax.dynamic_update_slice(c, x, (start, 0, 0)) for c, x in zip(cache, (k, v), strict=True))
        group = q.shape[1] // k.shape[1]
        scores = jnp.einsum("thd,shd->hts", q, jnp.repeat(keys, group, axis=1)) * spec.scale
        key, position = jnp.arange(keys.shape[0]), start + jnp.arange(q.shape[0])[:, None]
        seen = (key <= position) & (key > position - (spec.window or keys.shape[0]))
        weights = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("hts,shd->thd", weights, jnp.repeat(values, group, axis=1)), (keys, values)

    return attend


def contiguous_cache(config: ModelConfig, length: int) -> Any:
    shape = (length, config.num_kv_heads, config.head_dim)
    return tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers))


def contiguous_step(graphdef: Any) -> Any:
    """Jitted (params, tokens [T], start, cache) -> (logits [T, V], cache)."""

    @jax.jit
    def step(params: Any, tokens: jax.Array, start: jax.Array, cache: Any) -> Any:
        decoder = merge_params(graphdef, params)
        positions = start + jnp.arange(tokens.shape[0])
        hidden, cache = decoder(tokens, positions, cache, contiguous_attend(start))
        return decoder.logits(hidden), cache

    return step


def paged_logits(
    config: ModelConfig, graphdef: Any, params: Any, tokens: np.ndarray, kv_dtype: str, block_size: int = 4
) -> np.ndarray:
    """Logits f32[T, V] of tokens i[T], all at once, that see one another through a paged cache of ``kv_dtype``."""
    length = len(tokens)
    blocks = -(-length // block_size)
    positions = np.arange(length, dtype=np.int32)
    batch = PagedBatch(
        block_tables=np.arange(1, blocks + 1, dtype=np.int32)[None],
        kv_lengths=np.array([length], np.int32),
        write_slots=positions + block_size,
        query_starts=np.array([0, length], np.int32),
        num_decode=np.int32(0),
    )

    @jax.jit
    def run(params: Any, tokens: jax.Array, cache: Any, batch: PagedBatch) -> jax.Array:
        decoder = merge_params(graphdef, params)
        hidden, _ = decoder(tokens, positions, cache, paged_attend(batch, len(cache[0].k)))
        return decoder.logits(hidden)

    cache = init_cache(config, blocks + 1, block_size, kv_dtype)
    return np.asarray(run(params, np.asarray(tokens, np.int32), cache, batch))


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest error of any row of logits, relative to that row's largest logit."""
    return float(np.max(np.abs(got - want).max(axis=-1) / np.abs(want).max(axis=-1)))
