"""The directory of a GGUF file: its metadata and where each tensor lies.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian: "GGUF", version, tensor
and key counts; typed key/value pairs; name, shape, type and offset of each tensor; aligned data. The ``gguf``
package has a reader too, which takes 2.6 s for a vocabulary of 49,152 tokens (this one: 0.1 s) and answers a
truncated file with whatever numpy says first. Its knowledge of the quantised types is used here.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf.quants import dequantize

from .errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VALUES_AT_ONCE = 1 << 17  # less than the C library takes from the system each time


class StoredTensor(NamedTuple):
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # row-major, as in numpy (the file lists it the other way round)
    offset: int  # from the start of the file
    num_bytes: int


class GgufFile:
    """``metadata`` {key: value} (arrays as lists or numpy arrays) and ``tensors`` {name: StoredTensor}.

    Raises ``CheckpointError`` if the file is truncated, damaged, of another version, or one part of several.
    """

    def __init__(self, path: Path):
        self.path = path
        size = path.stat().st_size
        if size < 24:
            raise CheckpointError(f"{path} is truncated: {size} bytes, less than a GGUF header")
        with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as view:
            try:
                self.metadata, self.tensors = _Cursor(view).directory()
            except (struct.error, IndexError, MemoryError, OverflowError) as error:
                raise CheckpointError(f"{path} is truncated or damaged in its metadata: {error}") from error
            except ValueError as error:
                raise CheckpointError(f"{path}: {error}") from error
        end = max((t.offset + t.num_bytes for t in self.tensors.values()), default=0)
        if end > size:
            raise CheckpointError(f"{path} is truncated: its tensors need {end} bytes, the file has {size}")
        if self.metadata.get("split.count", 0) > 1:
            raise CheckpointError(f"{path} is one of several parts; merge them with llama-gguf-split")

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised: float32 (float16 if it is stored so)."""
        stored = self.tensors[name]
        raw = np.fromfile(self.path, np.uint8, stored.num_bytes, offset=stored.offset)
        if stored.kind == gguf.GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(stored.shape)
        if stored.kind == gguf.GGMLQuantizationType.F16:
            return raw.view(np.float16).reshape(stored.shape)
        try:
            return _dequantize(raw.reshape(math.prod(stored.shape[:-1]), -1), stored).reshape(stored.shape)
        except NotImplementedError as error:
            raise CheckpointError(f"{self.path}: {name!r} has type {stored.kind.name}: {error}") from error


def _dequantize(raw: np.ndarray, stored: StoredTensor) -> np.ndarray:
    """f32[R, C] of raw u8[R, bytes of a row].

    ``dequantize`` goes by 16 rows, where numpy spends its time on calls; as many rows as here, given as one, take a
    fifth of the time.
    """
    values = np.empty((len(raw), stored.shape[-1]), np.float32)
    at_once = max(1, _VALUES_AT_ONCE // stored.shape[-1])
    for start in range(0, len(raw), at_once):
        rows = slice(start, start + at_once)
        values[rows] = dequantize(raw[rows].reshape(1, -1), stored.kind).reshape(-1, stored.shape[-1])
    return values


class _Cursor:
    """Reads values one after the other from the start of a file."""

    def __init__(self, view: mmap.mmap):
        self.view, self.at = view, 0

    def directory(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        magic = self.take(4)
        if magic != b"GGUF":
            raise ValueError(f"not a GGUF file: it starts with {magic!r}")
        version = self.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported; allowed: 2, 3 (little-endian)")
        num_tensors, num_keys = self.scalar("Q"), self.scalar("Q")
        metadata = {self.string(): self.value(self.scalar("I")) for _ in range(num_keys)}
        entries = [self.tensor_entry() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT))
        if alignment < 1:
            raise ValueError(f"general.alignment is {alignment}, must be positive")
        base = -(-self.at // alignment) * alignment
        return metadata, {name: stored._replace(offset=base + stored.offset) for name, stored in entries}

    def tensor_entry(self) -> tuple[str, StoredTensor]:
        name = self.string()
        shape = tuple(reversed([self.scalar("Q") for _ in range(self.scalar("I"))]))
        code, offset = self.scalar("I"), self.scalar("Q")
        try:
            kind = gguf.GGMLQuantizationType(code)
        except ValueError as error:
            raise ValueError(f"tensor {name!r} has the unknown type {code}") from error
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ValueError(f"tensor {name!r} of shape {shape} cannot be of type {kind.name}")
        return name, StoredTensor(kind, shape, offset, math.prod(shape) // block * block_bytes)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.scalar("I"), self.scalar("Q"))
        return self.scalar(self.scalar_code(kind))

    def array(self, kind: int, count: int) -> Any:
        if count > len(self.view):  # each element takes a byte at least
            raise IndexError(f"an array of {count} values in a file of {len(self.view)} bytes")
        if kind in (_STRING, _ARRAY):
            return [self.value(kind) for _ in range(count)]
        dtype = np.dtype(self.scalar_code(kind)).newbyteorder("<")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    @staticmethod
    def scalar_code(kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"the metadata holds a value of the unknown type {kind}; the file is damaged")
        return _SCALARS[kind]

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.view, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "replace")

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.view):
            raise IndexError(f"{count} bytes wanted at byte {self.at} of {len(self.view)}")
        raw = self.view[self.at : self.at + count]
        self.at += count
        return raw
