"""GGUF files of Llama, Qwen2 and Qwen3 models: configuration and weights under their Hugging Face names."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np

from .config import ModelConfig
from .errors import ConfigError
from .generation import GenerationDefaults
from .gguf_file import GgufFile
from .weights import Shape

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


def gguf_config(file: GgufFile) -> ModelConfig:
    """The configuration in a GGUF file's metadata; ``ConfigError`` for what is missing or unknown."""
    meta = file.metadata
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: GGUF architecture {arch!r} is not supported; allowed: {', '.join(ARCHITECTURES)}"
        )

    def need(key: str) -> Any:
        value = meta.get(f"{arch}.{key}")
        if value is None:
            raise ConfigError(f"{file.path}: the metadata lacks {arch}.{key}")
        return value

    heads, hidden = need("attention.head_count"), need("embedding_length")
    if not isinstance(heads, int) or not isinstance(meta.get(f"{arch}.attention.head_count_kv", heads), int):
        raise ConfigError(f"{file.path}: layers with different numbers of heads are not supported")
    head_dim = meta.get(f"{arch}.attention.key_length", hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.get(f"{arch}.{key}", head_dim) != head_dim:
            raise ConfigError(f"{file.path}: {arch}.{key} is {need(key)}, must be {head_dim}")
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path} lacks the tensor token_embd.weight")
    # a float32 in the file; its shortest decimal form is what the original config said
    eps = float(str(np.float32(need("attention.layer_norm_rms_epsilon"))))
    config = ModelConfig.from_hf(
        {
            "model_type": arch,
            "vocab_size": file.tensors["token_embd.weight"].shape[0],
            "hidden_size": hidden,
            "intermediate_size": need("feed_forward_length"),
            "num_hidden_layers": need("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": meta.get(f"{arch}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": need("context_length"),
            "rms_norm_eps": eps,
            "rope_parameters": _rope_parameters(meta, arch, file),
            # llama.cpp's rule: without a head of its own, the model uses the embedding
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
            "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": _eos_ids(meta),
        }
    )
    if _ROPE_FACTORS in file.tensors:  # how Llama 3.1's scaling is written down: a divisor for each frequency
        factors = tuple(float(x) for x in file.read(_ROPE_FACTORS).reshape(-1))
        if len(factors) != head_dim // 2:
            raise ConfigError(f"{file.path}: {_ROPE_FACTORS} has {len(factors)} numbers, not {head_dim // 2}")
        rope = dataclasses.replace(config.rope, kind="factors", factors=factors)
        config = dataclasses.replace(config, rope=rope)
    return config


def gguf_generation(file: GgufFile) -> GenerationDefaults:
    """Stop tokens (end of text and end of turn); GGUF says nothing else."""
    return GenerationDefaults(eos_token_ids=_eos_ids(file.metadata))


def _eos_ids(meta: Mapping[str, Any]) -> tuple[int, ...]:
    ids = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _rope_parameters(meta: Mapping[str, Any], arch: str, file: GgufFile) -> dict[str, Any]:
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    found: dict[str, Any] = {"rope_theta": meta.get(f"{arch}.rope.freq_base", 10_000.0)}
    if kind == "none":
        return found
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{file.path}: rope scaling {kind!r} is not supported; allowed: none, linear, yarn")
    found |= {"rope_type": kind, "factor": meta.get(f"{arch}.rope.scaling.factor")}
    if kind == "yarn":
        found["original_max_position_embeddings"] = meta.get(f"{arch}.rope.scaling.original_context_length")
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            found[ours] = meta.get(f"{arch}.rope.scaling.{theirs}")
        magnitude = meta.get(f"{arch}.rope.scaling.attn_factor")
        if magnitude is not None and found["factor"]:  # llama.cpp multiplies it onto yarn's own
            found["attention_factor"] = magnitude * (1 + 0.1 * math.log(found["factor"]))
    return found


class GgufSource:
    """The tensors of a GGUF file under their Hugging Face names, dequantised one at a time."""

    def __init__(self, file: GgufFile, config: ModelConfig):
        self._file = file
        # convert_hf_to_gguf reorders the rows of Llama's q and k so that neighbours rotate; undo it
        permuted = config.model_type == "llama"
        self._heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if permuted else {}
        self._names = {hf_name(name): name for name in file.tensors if name != _ROPE_FACTORS}

    def shapes(self) -> dict[str, Shape]:
        return {hf: self._file.tensors[name].shape for hf, name in self._names.items()}

    def stored_dtype(self) -> np.dtype:
        largest = max(self._file.tensors.values(), key=lambda stored: math.prod(stored.shape))
        return np.dtype(jnp.float32 if largest.kind == gguf.GGMLQuantizationType.F32 else jnp.bfloat16)

    def read(self, name: str) -> np.ndarray:
        stored_name = self._names[name]
        tensor = self._file.read(stored_name)
        heads = self._heads.get(stored_name.split(".")[-2])
        return tensor if heads is None else unpermute(tensor, heads)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; unknown names stay (and are reported as unexpected)."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER:
        return name
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Put rows 0, D/2, 1, D/2 + 1, … of each head back in order: GGUF rotates neighbours, HF halves."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
