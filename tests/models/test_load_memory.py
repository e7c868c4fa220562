"""Loading holds one copy of the weights, not two: measured in a fresh process, on a sparse 300 MB file."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from jpaged_models import ModelConfig
from jpaged_models.weights import recipes

CONFIG = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}
MEASURE = """
import sys
import jax, jax.numpy as jnp
from jpaged_models import load_model

def kilobytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

jnp.zeros(8).block_until_ready()
before = kilobytes("VmRSS")
params = load_model(sys.argv[1]).params
assert {str(x.dtype) for x in params.values()} == {"bfloat16"}
print(sum(x.nbytes for x in params.values()) // 1024, kilobytes("VmHWM") - before)
"""


def write_sparse_safetensors(folder: Path) -> Path:
    """The header of a whole checkpoint over a hole: reads as zeros, takes no disk."""
    header, at = {}, 0
    for recipe in recipes(ModelConfig.from_hf(CONFIG)).values():
        for name, shape in recipe.parts.items():
            size = 2
            for n in shape:
                size *= n
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + at)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write_sparse_gguf(folder: Path) -> Path:
    """The same model with 8-bit weights."""
    path = folder / "model.gguf"
    hidden, wide, layers, vocab = 1024, 4096, 8, 8192
    w = gguf.GGUFWriter(path, "llama")
    w.add_embedding_length(hidden)
    w.add_feed_forward_length(wide)
    w.add_block_count(layers)
    w.add_head_count(16)
    w.add_context_length(64)
    w.add_layer_norm_rms_eps(1e-5)
    matrices = {"token_embd.weight": (vocab, hidden)}
    norms = ["output_norm.weight"]
    for i in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrices[f"blk.{i}.{name}.weight"] = (hidden, hidden)
        matrices |= {f"blk.{i}.{name}.weight": (wide, hidden) for name in ("ffn_gate", "ffn_up")}
        matrices[f"blk.{i}.ffn_down.weight"] = (hidden, wide)
        norms += [f"blk.{i}.{name}.weight" for name in ("attn_norm", "ffn_norm")]
    end = 0
    for name, (rows, columns) in matrices.items():
        stored = columns // 32 * 34  # a block of 32 weights: 32 bytes and a float16 scale
        w.add_tensor_info(name, (rows, stored), np.dtype(np.uint8), rows * stored, gguf.GGMLQuantizationType.Q8_0)
        end += rows * stored
    for name in norms:
        w.add_tensor_info(name, (hidden,), np.dtype(np.float32), hidden * 4)
        end += hidden * 4
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    w.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + end + 64)
    return path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to measure memory")
@pytest.mark.parametrize("write", [write_sparse_safetensors, write_sparse_gguf])
def test_peak_is_near_one_copy(tmp_path: Path, write) -> None:  # type: ignore[no-untyped-def]
    path = write(tmp_path)
    command = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    weights, peak = map(int, done.stdout.split())
    assert weights > 270 * 1024
    # the rest: one tensor as stored or as float32 (32 MB at most), code run meanwhile
    assert peak < 1.4 * weights, f"{peak / weights:.2f} copies of the weights"
    print(f"{peak / weights:.2f} copies")
