"""From named Hugging Face tensors, wherever they are read from, to this decoder's parameters.

Each parameter is assembled in a host buffer of its own (q/k/v and gate/up fused, ``[out, in]`` as stored), a few at a
time, put on the device and dropped. So the peak of host memory is the parameters plus a few tensors, not two copies of
the model.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from .ahead import map_ahead
from .config import ModelConfig
from .errors import CheckpointError
from .params import param_shapes
from .split import check_split, placer, split_of

DTYPES = ("auto", "float32", "bfloat16")
Shape = tuple[int, ...]


class TensorSource(Protocol):
    """Named tensors under their Hugging Face names, which several threads may read."""

    def shapes(self) -> dict[str, Shape]: ...

    def stored_dtype(self) -> np.dtype:
        """What most of the weights are stored in (bfloat16 for quantised ones)."""
        ...

    def read(self, name: str) -> np.ndarray:
        """A floating point array that nobody else keeps."""
        ...


class DictSource:
    """Tensors already in memory (tests, conversions)."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self._tensors = tensors

    def shapes(self) -> dict[str, Shape]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def stored_dtype(self) -> np.dtype:
        return next(iter(self._tensors.values())).dtype

    def read(self, name: str) -> np.ndarray:
        return self._tensors[name].copy()  # a device array may share its memory


class Recipe(NamedTuple):
    """How one parameter is made: these tensors one after the other along their output axis, the first."""

    parts: dict[str, Shape]


def recipes(c: ModelConfig) -> dict[str, Recipe]:
    """{parameter: recipe} over all parameters of a decoder."""
    hidden, wide = c.hidden_size, c.intermediate_size
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    made = {
        "embedding": Recipe({"model.embed_tokens.weight": (c.vocab_size, hidden)}),
        "norm.weight": Recipe({"model.norm.weight": (hidden,)}),
    }
    if not c.tie_word_embeddings:
        made["head.weight"] = Recipe({"lm_head.weight": (c.vocab_size, hidden)})

    def linear(name: str, parts: dict[str, int], features_in: int, bias: bool) -> None:
        weights: dict[str, Shape] = {f"{part}.weight": (out, features_in) for part, out in parts.items()}
        made[f"{name}.weight"] = Recipe(weights)
        if bias:
            made[f"{name}.bias"] = Recipe({f"{part}.bias": (out,) for part, out in parts.items()})

    for i in range(c.num_layers):
        us, hf = f"layers.{i}", f"model.layers.{i}"
        attention = f"{hf}.self_attn"
        made[f"{us}.attention_norm.weight"] = Recipe({f"{hf}.input_layernorm.weight": (hidden,)})
        made[f"{us}.mlp_norm.weight"] = Recipe({f"{hf}.post_attention_layernorm.weight": (hidden,)})
        qkv = {f"{attention}.q_proj": q, f"{attention}.k_proj": kv, f"{attention}.v_proj": kv}
        linear(f"{us}.attention.qkv", qkv, hidden, c.qkv_bias)
        linear(f"{us}.attention.out", {f"{attention}.o_proj": hidden}, q, c.attention_out_bias)
        if c.qk_norm:
            for which in ("q_norm", "k_norm"):
                made[f"{us}.attention.{which}.weight"] = Recipe({f"{attention}.{which}.weight": (c.head_dim,)})
        gate_up = {f"{hf}.mlp.gate_proj": wide, f"{hf}.mlp.up_proj": wide}
        linear(f"{us}.mlp.gate_up", gate_up, hidden, c.mlp_bias)
        linear(f"{us}.mlp.down", {f"{hf}.mlp.down_proj": hidden}, wide, c.mlp_bias)
    return made


def resolve_dtype(dtype: str, stored: np.dtype | str | None) -> np.dtype:
    """The dtype to compute in: as asked, or for "auto" as stored, but float16 as bfloat16."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; allowed: {', '.join(DTYPES)}")
    if dtype == "auto":
        return np.dtype(jnp.float32 if str(stored) in ("float32", "float64") else jnp.bfloat16)
    return np.dtype(dtype)


def load_params(
    config: ModelConfig,
    source: TensorSource,
    dtype: str = "auto",
    mesh: Mesh | None = None,
) -> tuple[nnx.GraphDef, dict[str, jax.Array]]:
    """The graph and parameters of the decoder ``config`` describes, with the weights in ``source``.

    ``mesh``: the devices among which the model is divided (default: all on the default device). Raises
    ``CheckpointError`` naming every missing, unexpected or misshaped tensor, before any of them is read.
    """
    if mesh is not None:
        check_split(config, mesh.size)
    target = resolve_dtype(dtype, config.dtype or source.stored_dtype())
    made = recipes(config)
    check_tensors(config, made, source)
    graphdef, shapes = param_shapes(config, target)
    place = placer(config, mesh)
    params = {}
    arrays = map_ahead(lambda name: _assemble(made[name], source, shapes[name].shape, target), shapes)
    for name, host in zip(shapes, arrays, strict=True):
        params[name] = place(name, host)
        params[name].block_until_ready()  # or the host buffers of many parameters would pile up
        del host
    return graphdef if mesh is None else param_shapes(config, target, split_of(mesh))[0], params


def check_tensors(config: ModelConfig, made: Mapping[str, Recipe], source: TensorSource) -> None:
    """Compare what the config asks for with what the source has; ``CheckpointError`` on any difference."""
    wanted = {name: shape for recipe in made.values() for name, shape in recipe.parts.items()}
    found = {name: tuple(shape) for name, shape in source.shapes().items() if not name.endswith("rotary_emb.inv_freq")}
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    misshaped = [
        f"{name} {found[name]} (should be {shape})"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if config.tie_word_embeddings and "lm_head.weight" in extra and not misshaped and not missing:
        extra.remove("lm_head.weight")  # some tools write the tied head out once more
        if not np.array_equal(source.read("lm_head.weight"), source.read("model.embed_tokens.weight")):
            raise CheckpointError(
                "the config ties the head to the embedding (tie_word_embeddings), but the checkpoint has a "
                "lm_head.weight that differs from model.embed_tokens.weight"
            )
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (("missing", missing), ("unexpected", extra), ("misshaped", misshaped))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the tensors do not fit the config of this {config.model_type!r} model: " + "; ".join(problems)
        )


def _assemble(recipe: Recipe, source: TensorSource, shape: Shape, dtype: np.dtype) -> np.ndarray:
    if len(recipe.parts) == 1:
        (name,) = recipe.parts
        return np.ascontiguousarray(source.read(name), dtype)
    host = np.empty(shape, dtype)
    start = 0
    for name in recipe.parts:
        part = source.read(name)
        host[start : start + part.shape[0]] = part
        start += part.shape[0]
        del part  # before the next one is read
    return host
