"""Greedy text of real models equals transformers', token for token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import model_support as support
import numpy as np
import pytest
from jpaged_models import load_model

# A smaller gap between the two best logits than this could be decided by rounding
DECIDED = 1e-3


def compare(loaded: Any, prompts: list[dict[str, Any]], tokens: int) -> None:
    """Feed each golden continuation in one prefill; see what would have been chosen at each step."""
    step = support.contiguous_step(loaded.graphdef)
    length = max(len(p["prompt_token_ids"]) for p in prompts) + tokens
    checked = 0
    for prompt in prompts:
        start, golden = len(prompt["prompt_token_ids"]), prompt["token_ids"][:tokens]
        ids = (prompt["prompt_token_ids"] + golden)[:-1]
        padded = jnp.asarray(ids + [0] * (length - len(ids)))  # padding follows, so nothing sees it
        logits, _ = step(loaded.params, padded, jnp.int32(0), support.contiguous_cache(loaded.config, length))
        chosen = np.asarray(logits[start - 1 : start - 1 + tokens].argmax(-1))
        decided = np.asarray(prompt["gaps"][:tokens]) > DECIDED
        np.testing.assert_array_equal(chosen[decided], np.asarray(golden)[decided], err_msg=prompt["prompt"])
        checked += int(decided.sum())
    assert checked > 0.99 * tokens * len(prompts)


def test_stories260k(root: Path, shared: Path) -> None:
    loaded = load_model(shared / "models" / "stories260k")
    assert loaded.params["embedding"].dtype == jnp.float32
    prompts = json.loads((root / "tests/goldens/greedy_stories260k.json").read_text())["prompts"]
    assert loaded.tokenizer is not None
    for prompt in prompts:
        assert loaded.tokenizer.encode(prompt["prompt"]) == prompt["prompt_token_ids"]
    compare(loaded, prompts, 128)


@pytest.mark.parametrize(("kv_dtype", "bound", "most"), [("int8", 0.03, 0.05), ("fp8", 0.06, 0.1)])
def test_stories260k_with_a_quantised_cache(kv_dtype: str, bound: float, most: float, root: Path, shared: Path) -> None:
    """Logits of forced tokens: their error, and the share of tokens where another one now wins, by little."""
    loaded = load_model(shared / "models" / "stories260k")
    prompts = json.loads((root / "tests/goldens/greedy_stories260k.json").read_text())["prompts"][:2]
    for prompt in prompts:
        ids, start = prompt["prompt_token_ids"] + prompt["token_ids"][:-1], len(prompt["prompt_token_ids"])
        made = loaded.config, loaded.graphdef, loaded.params
        exact, rounded = (
            support.paged_logits(*made, np.asarray(ids), d, 16)[start - 1 :] for d in ("float32", kv_dtype)
        )
        assert 0.05 * bound < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < bound
        np.testing.assert_array_equal(exact.argmax(axis=1), prompt["token_ids"])
        other = rounded.argmax(axis=1) != prompt["token_ids"]
        assert other.mean() <= most and np.asarray(prompt["gaps"])[other].max(initial=0) < 1.0


def test_smollm2_from_gguf(root: Path, demo_model: Path) -> None:
    loaded = load_model(demo_model, "float32")
    prompts = json.loads((root / "tests/goldens/greedy_smollm2.json").read_text())["prompts"]
    assert loaded.tokenizer is not None
    for prompt in prompts:
        assert loaded.tokenizer.encode(prompt["prompt"]) == prompt["prompt_token_ids"]
    compare(loaded, prompts[:2], 128)


def test_logits_in_bfloat16_are_close(shared: Path) -> None:
    """bfloat16 is not exact, but must not be wrong: the same best token where float32 is sure of it."""
    exact, rounded = (load_model(shared / "models" / "stories260k", d) for d in ("float32", "bfloat16"))
    assert rounded.params["embedding"].dtype == jnp.bfloat16
    tokens = jnp.asarray([1, 403, 407, 261, 378, 286, 261, 376])

    def run(loaded: Any, dtype: Any) -> np.ndarray:
        cache = jax.tree.map(lambda x: x.astype(dtype), support.contiguous_cache(loaded.config, 16))
        logits, _ = support.contiguous_step(loaded.graphdef)(loaded.params, tokens, jnp.int32(0), cache)
        assert logits.dtype == jnp.float32
        return np.asarray(logits)

    want, got = run(exact, jnp.float32), run(rounded, jnp.bfloat16)
    assert support.relative_error(got, want) < 0.05
