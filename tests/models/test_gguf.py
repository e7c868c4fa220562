"""GGUF files: the same model as its Hugging Face folder; our reader against the gguf package's; damage."""

from __future__ import annotations

import dataclasses
import importlib.util
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import gguf
import gguf_files
import jax.numpy as jnp
import model_support as support
import numpy as np
import pytest
from jpaged_models import CheckpointError, ConfigError, load_model
from jpaged_models.gguf_file import GgufFile
from jpaged_models.rope import inverse_frequencies

Q = gguf.GGMLQuantizationType


def compared(config: Any) -> Any:
    """What a GGUF file keeps of a config."""
    return dataclasses.replace(config, bos_token_id=None, eos_token_ids=(), dtype=None, model_type="")


@pytest.mark.parametrize("family", ["llama2", "smollm", "tinyllama", "mistral", "llama_bias", "qwen2", "qwen3"])
def test_same_model_as_the_folder(tmp_path: Path, family: str) -> None:
    config, _ = gguf_files.write(tmp_path / "model.gguf", family)
    loaded = load_model(tmp_path / "model.gguf")
    assert compared(loaded.config) == compared(config)
    assert loaded.tokenizer is None
    _, _, params = support.tiny_model(families.hf_config(family))
    assert loaded.params.keys() == params.keys()
    for name, array in loaded.params.items():
        np.testing.assert_array_equal(array, params[name], err_msg=name)


def test_llama3_scaling_is_a_table_of_divisors(tmp_path: Path) -> None:
    config, _ = gguf_files.write(tmp_path / "model.gguf", "llama3")
    loaded = load_model(tmp_path / "model.gguf")
    assert loaded.config.rope.kind == "factors"
    got, want = (inverse_frequencies(c.rope, c.head_dim) for c in (loaded.config, config))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("family", "metadata"),
    [
        ("linear", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        (
            "yarn",
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
        ),
    ],
)
def test_scalings_in_the_metadata(tmp_path: Path, family: str, metadata: dict[str, Any]) -> None:
    config, _ = gguf_files.write(tmp_path / "model.gguf", family, metadata=metadata)
    assert load_model(tmp_path / "model.gguf").config.rope == config.rope


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        (Q.F32, jnp.float32, 0),
        (Q.F16, jnp.bfloat16, 5e-3),
        (Q.BF16, jnp.bfloat16, 5e-3),
        (Q.Q8_0, jnp.bfloat16, 0.02),
    ],
)
def test_stored_types(tmp_path: Path, kind: Q, dtype: Any, tolerance: float) -> None:
    gguf_files.write(tmp_path / "model.gguf", "smollm", quantize=kind)
    loaded = load_model(tmp_path / "model.gguf")
    assert {x.dtype for x in loaded.params.values()} == {np.dtype(dtype)}
    _, _, params = support.tiny_model(families.hf_config("smollm"))
    for name, array in loaded.params.items():
        error = np.abs(np.asarray(array, np.float32) - params[name]).max() / np.abs(params[name]).max()
        assert error <= tolerance, name


def test_our_reader_against_the_package(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "model.gguf", "qwen3", quantize=Q.Q8_0)
    ours, theirs = GgufFile(tmp_path / "model.gguf"), gguf.GGUFReader(tmp_path / "model.gguf")
    keys = {key for key in theirs.fields if not key.startswith("GGUF.")}
    assert ours.metadata == {key: theirs.fields[key].contents() for key in keys}
    assert [*ours.tensors] == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.read(tensor.name), want)


def test_demo_model_equals_its_hugging_face_folder(demo_model: Path, shared: Path, tmp_path: Path) -> None:
    """One real file, converted by a tool that shares no code with this project."""
    specification = importlib.util.spec_from_file_location("convert", shared / "tools" / "fetch_real_models.py")
    assert specification is not None and specification.loader is not None
    tool = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(tool)
    tool.convert_gguf(str(demo_model), str(tmp_path), "bfloat16", {})
    ours, theirs = load_model(demo_model), load_model(tmp_path)
    assert ours.config == dataclasses.replace(theirs.config, dtype=None)
    assert ours.generation.eos_token_ids == theirs.generation.eos_token_ids == (2,)
    assert ours.params.keys() == theirs.params.keys()
    for name, array in ours.params.items():
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(array, theirs.params[name], err_msg=name)
    assert ours.tokenizer is not None and theirs.tokenizer is not None
    assert ours.tokenizer.special_tokens == theirs.tokenizer.special_tokens
    assert ours.tokenizer.chat_template == theirs.tokenizer.chat_template
    assert ours.tokenizer.backend.get_vocab() == theirs.tokenizer.backend.get_vocab()


def cut(keep: float) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


def patch(at: int, raw: bytes) -> Callable[[Path], Any]:
    def inflict(path: Path) -> None:
        whole = bytearray(path.read_bytes())
        whole[at : at + len(raw)] = raw
        path.write_bytes(whole)

    return inflict


@pytest.mark.parametrize(
    ("inflict", "message"),
    [
        (lambda path: path.write_bytes(b"GGUF"), "truncated: 4 bytes"),
        (cut(0.002), "truncated or damaged in its metadata"),
        (cut(0.5), "truncated: its tensors need"),
        (cut(0.999), "truncated: its tensors need"),
        (patch(0, b"PK\3\4"), "not a GGUF file: it starts with b'PK"),
        (patch(4, struct.pack("<I", 1)), "GGUF version 1 is not supported; allowed: 2, 3"),
        (patch(4, struct.pack(">I", 3)), "GGUF version"),
        (patch(16, struct.pack("<Q", 10**15)), "truncated or damaged"),
        (patch(24, struct.pack("<Q", 2**62)), "truncated or damaged"),
        (patch(24 + 8 + len("general.architecture"), struct.pack("<I", 77)), "unknown type 77"),
    ],
)
def test_damage_is_named(tmp_path: Path, inflict: Callable[[Path], Any], message: str) -> None:
    path = tmp_path / "model.gguf"
    gguf_files.write(path, "smollm")
    inflict(path)
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": ("block_count",)}, "lacks llama.block_count"),
        ({"drop": ("token_embd.weight",)}, "lacks the tensor token_embd.weight"),
        ({"drop": ("blk.1.ffn_up.weight",)}, "missing: model.layers.1.mlp.up_proj.weight"),
        ({"metadata": {"block_count": 1}}, "unexpected: model.layers.1.input_layernorm.weight"),
        ({"metadata": {"rope.dimension_count": 8}}, "rope.dimension_count is 8, must be 16"),
        (
            {"metadata": {"rope.scaling.type": "longrope"}},
            "'longrope' is not supported; allowed: none, linear",
        ),
        ({"metadata": {"rope.scaling.type": "linear"}}, "'linear' needs 'factor'"),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, "'bert' is not supported; allowed: gpt2, llama"),
    ],
)
def test_misfits_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    gguf_files.write(tmp_path / "model.gguf", "smollm", **options)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load_model(tmp_path / "model.gguf")


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    w = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with pytest.raises(ConfigError, match="architecture 'mamba' is not supported; allowed: llama, qwen2, qwen3"):
        load_model(tmp_path / "model.gguf")
