"""Safetensors files, one or sharded, read one tensor at a time.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header
``{name: {"dtype", "shape", "data_offsets"}}``, then the data. Tensors are read with plain reads, not through
a memory map: mapped pages once touched would count as a second copy of the weights in the process's memory.
"""

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .errors import CheckpointError
from .jsonfile import parse_object, read_object
from .weights import Shape

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}


class _Stored(NamedTuple):
    file: Path
    dtype: np.dtype
    shape: Shape
    offset: int  # from the start of the file


class SafetensorsSource:
    """The tensors of a folder: ``model.safetensors``, or the shards its index lists."""

    def __init__(self, folder: Path):
        self._tensors: dict[str, _Stored] = {}
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.is_file():
            self._tensors = read_header(single)
        elif index.is_file():
            self._add_shards(folder, index)
        else:
            raise CheckpointError(
                f"{folder} holds no weights: expected model.safetensors or model.safetensors.index.json "
                f"(PyTorch .bin files are not read; convert them to safetensors)"
            )

    def _add_shards(self, folder: Path, index: Path) -> None:
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError(f"{index}: 'weight_map' must map tensor names to file names")
        files = sorted(set(weight_map.values()))
        absent = [name for name in files if not (folder / name).is_file()]
        if absent:
            raise CheckpointError(f"{index} lists files that are not there: {', '.join(absent)}")
        for name in files:
            held = read_header(folder / name)
            lost = [t for t, where in weight_map.items() if where == name and t not in held]
            if lost:
                raise CheckpointError(f"{folder / name} lacks tensors that {index.name} places there: {lost}")
            self._tensors.update(held)

    def shapes(self) -> dict[str, Shape]:
        return {name: stored.shape for name, stored in self._tensors.items()}

    def stored_dtype(self) -> np.dtype:
        return max(self._tensors.values(), key=lambda stored: math.prod(stored.shape)).dtype

    def read(self, name: str) -> np.ndarray:
        stored = self._tensors[name]
        count = math.prod(stored.shape)
        return np.fromfile(stored.file, stored.dtype, count, offset=stored.offset).reshape(stored.shape)


def read_header(file: Path) -> dict[str, _Stored]:
    """Where each tensor of ``file`` lies, checked against the file's length. Raises ``CheckpointError``."""
    size = file.stat().st_size
    with file.open("rb") as f:
        prefix = f.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{file} is truncated: {size} bytes, not even a header length")
        (length,) = struct.unpack("<Q", prefix)
        if 8 + length > size:
            raise CheckpointError(
                f"{file} is truncated or no safetensors file: its header should take {length} bytes, "
                f"the file has {size}"
            )
        header = parse_object(f.read(length), f"the header of {file}")
    tensors = {}
    end = 8 + length
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = stored = _entry(file, name, entry, 8 + length)
            end = max(end, stored.offset + stored.dtype.itemsize * math.prod(stored.shape))
    if end > size:
        raise CheckpointError(f"{file} is truncated: its tensors need {end} bytes, the file has {size}")
    return tensors


def _entry(file: Path, name: str, entry: Any, base: int) -> _Stored:
    try:
        tag, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: the header entry of tensor {name!r} is damaged: {entry!r}") from error
    if tag not in _DTYPES:
        raise CheckpointError(f"{file}: tensor {name!r} has dtype {tag!r}; allowed: {', '.join(_DTYPES)}")
    dtype = np.dtype(_DTYPES[tag])
    if not sound or stop - start != dtype.itemsize * math.prod(shape):
        raise CheckpointError(
            f"{file}: the header is damaged: tensor {name!r} of shape {list(shape)} and dtype {tag} "
            f"cannot lie at bytes [{start}, {stop})"
        )
    return _Stored(file, dtype, shape, base + start)
