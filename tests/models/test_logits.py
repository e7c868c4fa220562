"""Logits against Hugging Face transformers' (goldens), prefill and every decode step, through both caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import jax
import jax.numpy as jnp
import model_support as support
import numpy as np
import pytest
from jpaged_models import ModelConfig, init_cache, merge_params, paged_attend

from pallas_kernels import PagedBatch

BAR = 1e-4
BLOCK = 4


@pytest.fixture(scope="module")
def goldens(root: Path) -> Path:
    return root / "tests" / "goldens"


def load(goldens: Path, family: str) -> dict[str, Any]:
    with np.load(goldens / f"logits_{family}.npz") as file:
        return {key: file[key] for key in file.files}


@pytest.mark.parametrize("family", families.FAMILIES)
def test_logits_equal_transformers(goldens: Path, family: str) -> None:
    golden = load(goldens, family)
    config, graphdef, params = support.tiny_model(json.loads(str(golden["config"])), max_length=64)
    tokens, prompt = jnp.asarray(golden["tokens"]), int(golden["prompt_length"])
    step = support.contiguous_step(graphdef)
    logits, cache = step(params, tokens[:prompt], jnp.int32(0), support.contiguous_cache(config, 64))
    assert logits.dtype == jnp.float32
    assert support.relative_error(np.asarray(logits), golden["logits"][:prompt]) < BAR
    for i in range(prompt, len(tokens)):
        logits, cache = step(params, tokens[i : i + 1], jnp.int32(i), cache)
        assert support.relative_error(np.asarray(logits), golden["logits"][i : i + 1]) < BAR, f"step {i - prompt}"


@pytest.mark.parametrize("family", families.FAMILIES)
def test_both_forms_of_the_config_agree(goldens: Path, family: str) -> None:
    """rope_theta and rope_scaling (transformers 4), or rope_parameters with all defaults (transformers 5)."""
    golden = load(goldens, family)
    old, new = (ModelConfig.from_hf(json.loads(str(golden[key]))) for key in ("config", "saved_config"))
    assert new.rope == old.rope
    assert {**new.to_dict(), "dtype": None} == {**old.to_dict(), "dtype": None}


@pytest.mark.parametrize("family", ["qwen3", "smollm", "qwen2_window"])
def test_paged_cache_gives_the_same_logits(goldens: Path, family: str) -> None:
    """Blocks in any order, a prompt in two chunks, then decode beside an empty row."""
    golden = load(goldens, family)
    config, graphdef, params = support.tiny_model(json.loads(str(golden["config"])))
    tokens, prompt = golden["tokens"], int(golden["prompt_length"])
    blocks = np.random.RandomState(0).permutation(np.arange(1, 13))[: -(-len(tokens) // BLOCK)]

    @jax.jit
    def step(params: Any, tokens: jax.Array, positions: jax.Array, cache: Any, batch: PagedBatch) -> Any:
        decoder = merge_params(graphdef, params)
        hidden, cache = decoder(tokens, positions, cache, paged_attend(batch, len(cache[0].k)))
        return decoder.logits(hidden), cache

    def slots(positions: np.ndarray) -> np.ndarray:
        return blocks[positions // BLOCK] * BLOCK + positions % BLOCK

    table = np.zeros((2, len(blocks)), np.int32)
    table[0] = blocks
    cache = init_cache(config, 13, BLOCK, jnp.float32)
    rows = []
    half = prompt // 2
    for start in (0, half):
        positions = np.arange(start, start + half, dtype=np.int32)
        starts, lengths = np.array([0, half, half], np.int32), np.array([start + half, 0], np.int32)
        batch = PagedBatch(table, lengths, slots(positions), starts, np.int32(0))
        logits, cache = step(params, tokens[positions], positions, cache, batch)
        rows.append(logits)
    for i in range(prompt, len(tokens)):
        positions = np.array([i, 0], np.int32)
        write = np.array([slots(positions[:1])[0], 0], np.int32)
        batch = PagedBatch(table, np.array([i + 1, 0], np.int32), write, None, None)
        logits, cache = step(params, tokens[positions * [1, 0]], positions, cache, batch)
        rows.append(logits[:1])
    assert support.relative_error(np.concatenate(rows), golden["logits"]) < BAR


ROUNDING = {"bfloat16": 0.012, "float16": 0.0015, "int8": 0.03, "fp8": 0.13}  # about twice what was measured


@pytest.mark.parametrize("family", ["qwen3", "mistral_window"])
@pytest.mark.parametrize("kv_dtype", list(ROUNDING))
def test_a_rounded_cache_costs_what_rounding_costs(goldens: Path, family: str, kv_dtype: str) -> None:
    """Relative error of all logits. Not less than a few per cent of the bound either: K and V were rounded."""
    golden = load(goldens, family)
    made = support.tiny_model(json.loads(str(golden["config"])))
    got, want = support.paged_logits(*made, golden["tokens"], kv_dtype), golden["logits"]
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 0.05 * ROUNDING[kv_dtype] < error < ROUNDING[kv_dtype]


def test_the_window_matters(goldens: Path) -> None:
    """Without it the same weights give other logits from the first position on that it hides something from."""
    golden = load(goldens, "mistral_window")
    hf = json.loads(str(golden["config"]))
    config, graphdef, params = support.tiny_model({**hf, "sliding_window": None})
    logits, _ = support.contiguous_step(graphdef)(
        params, jnp.asarray(golden["tokens"]), jnp.int32(0), support.contiguous_cache(config, 64)
    )
    window = hf["sliding_window"]
    assert support.relative_error(logits[:window], golden["logits"][:window]) < BAR
    assert support.relative_error(logits[window : window + 1], golden["logits"][window : window + 1]) > 100 * BAR
