"""Weights as the native CPU kernels read them, chosen once when an engine starts."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import available_backends
from pallas_kernels.cpu.library import require_library
from pallas_kernels.cpu.linear import pack_weight, quantize_weight

from .ahead import map_ahead
from .layers import Linear, is_packed
from .load import LoadedModel
from .params import abstract_decoder
from .runs import find_runs

LINEAR_BACKENDS = ("auto", "cpu", "xla")
QUANTIZATIONS = (None, "int8")
ALIGNMENT = 64  # bytes; what XLA:CPU asks of memory that it is to use as it is


def pick_linear_backend(name: str, devices: int = 1) -> str:
    """What "auto" is here: "cpu" (packed weights and the native kernels) where those are at hand, else "xla".

    ``devices``: among how many the model is divided; packed weights are not.
    Raises ValueError for another name, or for "cpu" without the kernels or on several devices.
    """
    if name not in LINEAR_BACKENDS:
        raise ValueError(f"linear_backend {name!r} is not known; allowed: {', '.join(LINEAR_BACKENDS)}")
    if name == "auto":
        return "cpu" if devices == 1 and "cpu" in available_backends() else "xla"
    if name == "cpu" and devices > 1:
        raise ValueError(
            f"linear_backend 'cpu' cannot divide a model among {devices} devices (tensor_parallel_size); allowed: "
            "'auto', 'xla'"
        )
    if name == "cpu":
        require_library()
    return name


def check_quantization(name: str | None, linear: str) -> None:
    """Raises ValueError for a name that is not in QUANTIZATIONS, or one that products by ``linear`` do not have."""
    if name not in QUANTIZATIONS:
        raise ValueError(f"quantization {name!r} is not known; allowed: {', '.join(map(repr, QUANTIZATIONS))}")
    if name is not None and linear != "cpu":
        raise ValueError(f"quantization {name!r} needs products by the native CPU kernels, and they are by {linear!r}")


def pack_model(
    loaded: LoadedModel, *, quantization: str | None = None, stacked: bool = True, consume: bool = False
) -> LoadedModel:
    """The same model with every matrix packed for the native CPU kernels; one that is packed is returned as it is.

    ``quantization``: "int8" rounds every matrix, the embedding too, to 8 bits a weight with a scale for each row, and
    has rows of activations rounded likewise when they are multiplied (Dettmers et al., 2022, "LLM.int8()", section 2,
    vector-wise quantisation).
    ``stacked``: put equal neighbours among the layers in runs (see runs.py).
    ``consume``: empty the given model on the way, so that no more than a few matrices exist twice at a time.
    Raises ValueError for another quantization, or where one is asked for and the model was packed without it.
    """
    check_quantization(quantization, "cpu")
    if is_packed(loaded.params["embedding"]):
        if quantization not in (None, loaded.quantization):
            raise ValueError(f"quantization {quantization!r} is asked for, but the model was packed without it")
        return loaded
    pack = _packer(quantization)
    runs = find_runs(loaded.config, stacked)
    decoder = abstract_decoder(loaded.config, loaded.dtype, runs)
    gated = {"embedding": False}
    for path, module in nnx.iter_modules(decoder):
        if isinstance(module, Linear):
            gated[".".join(map(str, (*path, "weight")))] = module.gated
    source = loaded.params if consume else dict(loaded.params)

    def take(name: str, part: str) -> np.ndarray:
        array = source.pop(part)
        return pack(array, gated=gated[name]) if name in gated else np.asarray(array)

    packed = {}
    for name, parts in _names_in_runs(list(source), runs).items():
        packed[name] = jax.device_put(_stack(partial(take, name), parts), may_alias=True)
    return dataclasses.replace(loaded, graphdef=nnx.graphdef(decoder), params=packed, runs=runs)


def _names_in_runs(names: Sequence[str], runs: Sequence[int]) -> dict[str, list[str]]:
    """The name of each parameter of a decoder of ``runs``: those of all its layers, in order."""
    run_of = np.repeat(np.arange(len(runs)), runs)
    made: dict[str, list[str]] = {}
    for name in names:
        path = name.split(".")
        if path[0] == "layers":
            path[1] = str(run_of[int(path[1])])
        made.setdefault(".".join(path), []).append(name)
    return {name: sorted(parts, key=_layer_of) for name, parts in made.items()}


def _layer_of(name: str) -> int:
    path = name.split(".")
    return int(path[1]) if path[0] == "layers" else 0


def _stack(take: Callable[[str], np.ndarray], names: Sequence[str]) -> np.ndarray:
    """What ``take`` gives for each name, in one array that a device can have without another copy."""
    arrays = map_ahead(take, names)
    first = next(arrays)
    shape = first.shape if len(names) == 1 else (len(names), *first.shape)
    memory = np.empty(math.prod(shape) * first.dtype.itemsize + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    stacked = memory[start : len(memory) - ALIGNMENT + start].view(first.dtype).reshape(len(names), *first.shape)
    stacked[0] = first
    del first
    for place, array in enumerate(arrays, 1):
        stacked[place] = array
    return stacked.reshape(shape)


def pack_as(loaded: LoadedModel, weight: jax.Array) -> jax.Array:
    """A weight [N, K] of the model's dtype in the layout of the model's own."""
    if not is_packed(loaded.params["embedding"]):
        return weight
    return jnp.asarray(_packer(loaded.quantization)(weight))


def _packer(quantization: str | None) -> Callable[..., np.ndarray]:
    return pack_weight if quantization is None else quantize_weight
