"""Hugging Face folders: what loads, and what each kind of damage is called."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import jax.numpy as jnp
import model_support as support
import numpy as np
import pytest
import safetensors.numpy
from jpaged_models import CheckpointError, ConfigError, load_model


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_folder_one_file_or_shards(tmp_path: Path) -> None:
    _, _, params = support.tiny_model(families.hf_config("llama3"))
    support.write_folder(tmp_path / "one")
    support.write_folder(tmp_path / "three", shards=3)
    one, three = load_model(tmp_path / "one"), load_model(str(tmp_path / "three"))
    assert same(one.params, params) and same(three.params, params)
    assert one.tokenizer is None
    assert one.generation.eos_token_ids == (2, 5, 7)
    assert one.params["embedding"].dtype == jnp.float32


def test_weights_land_where_they_belong(tmp_path: Path) -> None:
    """Fused: outputs of qkv are q, then k, then v."""
    tensors = support.write_folder(tmp_path)
    params = load_model(tmp_path).params
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    q, k, v = (tensors[f"{attention}{n}_proj.weight"] for n in "qkv")
    np.testing.assert_array_equal(params["layers.1.attention.qkv.weight"], np.concatenate([q, k, v]))
    gate, up = (tensors[f"{mlp}{n}_proj.weight"] for n in ("gate", "up"))
    np.testing.assert_array_equal(params["layers.1.mlp.gate_up.weight"], np.concatenate([gate, up]))
    np.testing.assert_array_equal(params["head.weight"], tensors["lm_head.weight"])
    np.testing.assert_array_equal(params["embedding"], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("stored", "asked", "got"),
    [
        (np.float16, "auto", jnp.bfloat16),
        (jnp.bfloat16, "auto", jnp.bfloat16),
        (jnp.bfloat16, "float32", jnp.float32),
        (np.float32, "bfloat16", jnp.bfloat16),
    ],
)
def test_dtypes(tmp_path: Path, stored: Any, asked: str, got: Any) -> None:
    tensors = support.write_folder(tmp_path, dtype=stored)
    params = load_model(tmp_path, asked).params
    assert {x.dtype for x in params.values()} == {np.dtype(got)}
    np.testing.assert_array_equal(params["norm.weight"], tensors["model.norm.weight"].astype(got))


def test_the_config_has_the_say_over_auto(tmp_path: Path) -> None:
    support.write_folder(tmp_path)
    edit_config(tmp_path, torch_dtype="float16")
    assert load_model(tmp_path).params["embedding"].dtype == jnp.bfloat16


def test_harmless_extras(tmp_path: Path) -> None:
    tensors = support.write_folder(tmp_path, "smollm")
    extra = {
        **tensors,
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
    }
    want = load_model(tmp_path).params
    safetensors.numpy.save_file(extra, tmp_path / "model.safetensors")
    assert same(load_model(tmp_path).params, want)


def test_a_head_that_is_tied_and_is_not(tmp_path: Path) -> None:
    tensors = support.write_folder(tmp_path, "smollm")
    head = tensors["model.embed_tokens.weight"] + 1
    safetensors.numpy.save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight that differs"):
        load_model(tmp_path)


def test_generation_config(tmp_path: Path) -> None:
    support.write_folder(tmp_path)
    recommended = {"eos_token_id": [9, 10], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    generation = load_model(tmp_path).generation
    assert generation.eos_token_ids == (9, 10)
    assert (generation.temperature, generation.top_p, generation.top_k) == (0.6, 0.9, None)


def test_another_tokenizer(tmp_path: Path, shared: Path) -> None:
    support.write_folder(tmp_path)
    by_path = load_model(tmp_path, tokenizer=shared / "models" / "stories260k").tokenizer
    assert by_path is not None and by_path.vocab_size == 512
    assert load_model(tmp_path, tokenizer=by_path).tokenizer is by_path
    with pytest.raises(CheckpointError, match=r"holds no tokenizer.json"):
        load_model(tmp_path, tokenizer=tmp_path)


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in {**config, **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    edit(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def edit_header(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + raw[8 + length :])


def truncate(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])


def misfit(tensors: dict[str, np.ndarray]) -> None:
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros(4, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:5].copy()


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "misfit": (
        lambda f: edit_tensors(f, misfit),
        r"missing: model.norm.weight, model.layers.1.mlp.up_proj.weight; "
        r"unexpected: model.layers.0.self_attn.q_norm.weight; "
        r"misshaped: lm_head.weight \(5, 64\) \(should be \(160, 64\)\)",
    ),
    "no data": (lambda f: truncate(f, 3), "truncated: 3 bytes, not even a header length"),
    "half a header": (lambda f: truncate(f, 100), "its header should take .* bytes, the file has 100"),
    "half the data": (lambda f: truncate(f, 200_000), "truncated: its tensors need .* has 200000"),
    "no JSON": (
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"spam"),
        "header of .* is damaged",
    ),
    "another kind of file": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x80\x02}q\x00(X\x05" * 9),
        "truncated or no safetensors file",
    ),
    "a list": (
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]"),
        "expected a JSON object, got list",
    ),
    "no shape": (
        lambda f: edit_header(f, lambda h: h["model.norm.weight"].pop("shape")),
        "entry of tensor 'model.norm.weight' is damaged",
    ),
    "another shape": (
        lambda f: edit_header(f, lambda h: h["model.norm.weight"].update(shape=[65])),
        r"tensor 'model.norm.weight' of shape \[65\]",
    ),
    "negative shape": (
        lambda f: edit_header(f, lambda h: h["model.norm.weight"].update(shape=[-1, -64])),
        "tensor 'model.norm.weight'",
    ),
    "integers": (
        lambda f: edit_header(f, lambda h: h["model.norm.weight"].update(dtype="I32")),
        "dtype 'I32'; allowed: F64, F32, F16, BF16",
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        "holds no weights: expected model.safetensors",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "config cut short": (
        lambda f: (f / "config.json").write_text('{"model_type": "lla'),
        "config.json is damaged",
    ),
    "config without a key": (lambda f: edit_config(f, hidden_size=None), "needs 'hidden_size'"),
    "unknown model": (lambda f: edit_config(f, model_type="mamba"), "model_type 'mamba' .* allowed: llama"),
    "other sizes": (
        lambda f: edit_config(f, num_hidden_layers=3),
        "missing: model.layers.2.input_layernorm.weight",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    support.write_folder(tmp_path)
    inflict, message = DAMAGE[damage]
    inflict(tmp_path)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load_model(tmp_path)


def test_damaged_shards_are_named(tmp_path: Path) -> None:
    support.write_folder(tmp_path, shards=2)
    first = tmp_path / "model-00001-of-00002.safetensors"
    whole = first.read_bytes()
    first.unlink()
    with pytest.raises(CheckpointError, match=r"files that are not there: model-00001-of-00002.safetensors"):
        load_model(tmp_path)
    safetensors.numpy.save_file({"stranger": np.zeros(2, np.float32)}, first)
    with pytest.raises(CheckpointError, match=r"00001-of-00002.safetensors lacks tensors"):
        load_model(tmp_path)
    first.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"00001-of-00002.safetensors is truncated"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    with pytest.raises(CheckpointError, match="'weight_map' must map"):
        load_model(tmp_path)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype 'float16' is not supported; allowed: auto, float32, bfloat16"):
        load_model(tmp_path, "float16")
    with pytest.raises(ValueError, match="there is no model at '/no/such/folder'"):
        load_model("/no/such/folder")
    (tmp_path / "model.txt").write_text("hello, this is not a model at all")
    with pytest.raises(ValueError, match="not a GGUF file: it starts with b'hell'"):
        load_model(tmp_path / "model.txt")
