"""Weights as the native CPU kernels read them, chosen once when an engine starts."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import available_backends
from pallas_kernels.cpu.library import require_library
from pallas_kernels.cpu.linear import pack_weight

from .layers import Linear, is_packed
from .load import LoadedModel
from .params import abstract_decoder

LINEAR_BACKENDS = ("auto", "cpu", "xla")


def pick_linear_backend(name: str) -> str:
    """What "auto" is here: "cpu" (packed weights and the native kernels) where those are at hand, else "xla".

    Raises ValueError for another name, or for "cpu" without the kernels.
    """
    if name not in LINEAR_BACKENDS:
        raise ValueError(f"linear_backend {name!r} is not known; allowed: {', '.join(LINEAR_BACKENDS)}")
    if name == "auto":
        return "cpu" if "cpu" in available_backends() else "xla"
    if name == "cpu":
        require_library()
    return name


def pack_model(loaded: LoadedModel, *, consume: bool = False) -> LoadedModel:
    """The same model with every matrix packed for the native CPU kernels; one that is packed is returned as it is.

    ``consume``: empty the given model on the way, so that no more than one matrix exists twice at a time.
    """
    if is_packed(loaded.params["embedding"]):
        return loaded
    dtype = next(iter(loaded.params.values())).dtype
    decoder = abstract_decoder(loaded.config, dtype)
    gated = {"embedding": False}
    for path, module in nnx.iter_modules(decoder):
        if isinstance(module, Linear):
            gated[".".join(map(str, (*path, "weight")))] = module.gated
    source = loaded.params if consume else dict(loaded.params)
    packed: dict[str, jax.Array] = {}
    for name in list(source):
        array = source.pop(name)
        packed[name] = jnp.asarray(pack_weight(array, gated=gated[name])) if name in gated else array
    return dataclasses.replace(loaded, params=packed)
