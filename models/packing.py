"""Weights as the native CPU kernels read them, chosen once when an engine starts."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import available_backends
from pallas_kernels.cpu.library import require_library
from pallas_kernels.cpu.linear import pack_weight, quantize_weight

from .layers import Linear, is_packed
from .load import LoadedModel
from .params import abstract_decoder

LINEAR_BACKENDS = ("auto", "cpu", "xla")
QUANTIZATIONS = (None, "int8")


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


def check_quantization(name: str | None, linear: str) -> None:
    """Raises ValueError for a name that is not in QUANTIZATIONS, or one that products by ``linear`` do not have."""
    if name not in QUANTIZATIONS:
        raise ValueError(f"quantization {name!r} is not known; allowed: {', '.join(map(repr, QUANTIZATIONS))}")
    if name is not None and linear != "cpu":
        raise ValueError(f"quantization {name!r} needs products by the native CPU kernels, and they are by {linear!r}")


def pack_model(loaded: LoadedModel, *, quantization: str | None = None, consume: bool = False) -> LoadedModel:
    """The same model with every matrix packed for the native CPU kernels; one that is packed is returned as it is.

    ``quantization``: "int8" rounds every matrix, the embedding too, to 8 bits a weight with a scale for each row, and
    has rows of activations rounded likewise when they are multiplied (Dettmers et al., 2022, "LLM.int8()", section 2,
    vector-wise quantisation).
    ``consume``: empty the given model on the way, so that no more than one matrix exists twice at a time.
    Raises ValueError for another quantization, or where one is asked for and the model was packed without it.
    """
    check_quantization(quantization, "cpu")
    if is_packed(loaded.params["embedding"]):
        if quantization not in (None, loaded.quantization):
            raise ValueError(f"quantization {quantization!r} is asked for, but the model was packed without it")
        return loaded
    pack = _packer(quantization)
    decoder = abstract_decoder(loaded.config, loaded.dtype)
    gated = {"embedding": False}
    for path, module in nnx.iter_modules(decoder):
        if isinstance(module, Linear):
            gated[".".join(map(str, (*path, "weight")))] = module.gated
    source = loaded.params if consume else dict(loaded.params)
    packed: dict[str, jax.Array] = {}
    for name in list(source):
        array = source.pop(name)
        packed[name] = jnp.asarray(pack(array, gated=gated[name])) if name in gated else array
    return dataclasses.replace(loaded, params=packed)


def pack_as(loaded: LoadedModel, weight: jax.Array) -> jax.Array:
    """A weight [N, K] of the model's dtype in the layout of the model's own."""
    if not is_packed(loaded.params["embedding"]):
        return weight
    return jnp.asarray(_packer(loaded.quantization)(weight))


def _packer(quantization: str | None) -> Callable[..., np.ndarray]:
    return pack_weight if quantization is None else quantize_weight
