"""A decoder as a static graph and a flat dict of arrays, the form that is cheap to pass to a jitted step.

Names are dotted paths, for example ``layers.0.attention.qkv.weight``, where 0 is a run of layers (see ``runs``).
Flattening a dict of arrays costs the host far less per step than flattening thousands of nnx variables;
``merge_params`` runs at trace time only.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from .config import ModelConfig
from .decoder import Decoder
from .split import Split


def abstract_decoder(
    config: ModelConfig, dtype: jnp.dtype, runs: Sequence[int] | None = None, split: Split | None = None
) -> Decoder:
    """A decoder whose parameters are ``jax.ShapeDtypeStruct``s: the shapes without the memory."""
    return nnx.eval_shape(lambda: Decoder(config, dtype, runs, split))


def flatten_params(model: Decoder) -> tuple[nnx.GraphDef, dict[str, jax.Array]]:
    """Split into the static graph and {dotted path: array}."""
    graphdef, state = nnx.split(model)
    return graphdef, {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}


def merge_params(graphdef: nnx.GraphDef, params: Mapping[str, jax.Array]) -> Decoder:
    """The inverse of ``flatten_params``; the arrays may be tracers."""
    leaves = [(_path(name), nnx.Param(array)) for name, array in params.items()]
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


def param_shapes(
    config: ModelConfig, dtype: jnp.dtype, split: Split | None = None
) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
    """The graph of a decoder and the shape and dtype of every parameter, without allocating any.

    With ``split``: of one device's part.
    """
    graphdef, state = nnx.split(abstract_decoder(config, dtype, split=split))
    leaves = nnx.to_flat_state(state)
    return graphdef, {".".join(map(str, p)): jax.ShapeDtypeStruct(v.shape, v.dtype) for p, v in leaves}


def _path(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))
