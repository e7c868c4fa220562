"""Weights as the native CPU kernels read them, chosen once when an engine starts."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.cpu.linear import pack_weight

from .layers import Linear, is_packed
from .load import LoadedModel
from .params import abstract_decoder


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
