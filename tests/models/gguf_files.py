"""GGUF files of the tiny families, written the way llama.cpp's convert_hf_to_gguf does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import families
import gguf
import model_support as support
import numpy as np
from jpaged_models import ModelConfig

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Verbatim from convert_hf_to_gguf (LlamaModel.permute)."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def llama3_factors(hf: dict[str, Any], head_dim: int) -> np.ndarray:
    """Verbatim from convert_hf_to_gguf (LlamaModel.generate_extra_tensors): the tensor rope_freqs.weight."""
    scaling, base = hf["rope_scaling"], hf["rope_theta"]
    freqs = 1.0 / (base ** (np.arange(0, head_dim, 2) / head_dim))
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    old = scaling["original_max_position_embeddings"]
    factors = []
    for freq in freqs:
        wavelength = 2 * math.pi / freq
        if wavelength < old / high:
            factors.append(1)
        elif wavelength > old / low:
            factors.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def write(
    path: Path,
    family: str,
    *,
    quantize: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Write ``family``; returns its config and HF tensors. ``metadata`` adds keys, ``drop`` leaves some out."""
    hf = families.hf_config(family)
    config = ModelConfig.from_hf(hf)
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    tensors = support.hf_tensors(config)
    w = gguf.GGUFWriter(path, arch)
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope.theta),
        **(metadata or {}),
    }
    for key, value in values.items():
        if key not in drop:
            add = {int: w.add_uint32, float: w.add_float32, str: w.add_string}[type(value)]
            add(key if key.startswith("tokenizer.") else f"{arch}.{key}", value)
    for name, tensor in tensors.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = permute(tensor, config.num_heads if "q_proj" in name else config.num_kv_heads)
        if gguf_name(name) in drop:
            continue
        # quantised types come in blocks of 32
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0 and quantize != gguf.GGMLQuantizationType.F32:
            w.add_tensor(gguf_name(name), gguf.quants.quantize(tensor, quantize), raw_dtype=quantize)
        else:
            w.add_tensor(gguf_name(name), np.ascontiguousarray(tensor))
    if config.rope.kind == "llama3":
        w.add_tensor("rope_freqs.weight", llama3_factors(hf, config.head_dim))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return config, tensors
