"""The compiled kernels: found beside this file and registered with XLA once, or a reason why they are not there."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from pathlib import Path

import jax

TARGETS = ("jpaged_cpu_attention", "jpaged_cpu_write_kv", "jpaged_cpu_linear", "jpaged_cpu_take_rows")
FILE = Path(__file__).parent / "_native.so"


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The library with its targets registered, or None if it was not built (no C++ compiler at installation)."""
    if not FILE.exists():
        return None
    library = ctypes.CDLL(str(FILE))
    library.jpaged_cpu_set.restype = ctypes.c_char_p
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library


def require_library() -> ctypes.CDLL:
    """`load_library`, or a ValueError that says what to do."""
    library = load_library()
    if library is None:
        raise ValueError(
            f"the native CPU kernels are not built ({FILE.name} is missing): install a C++17 compiler and install "
            'jpaged again, or use the "xla" backend'
        )
    return library


def prefer_huge_pages(arrays: Iterable[jax.Array]) -> None:
    """Ask the system to keep these arrays in huge pages of its memory. It may not follow; elsewhere nothing happens."""
    library = load_library() if jax.default_backend() == "cpu" else None
    for array in arrays if library is not None else ():
        library.jpaged_cpu_prefer_huge_pages(
            ctypes.c_void_p(array.unsafe_buffer_pointer()), ctypes.c_size_t(array.nbytes)
        )


def instruction_sets() -> tuple[str, ...]:
    """Instruction sets the kernels were compiled for and this processor has, best first; empty without the library."""
    library = load_library()
    names: list[str] = []
    while library is not None and (name := library.jpaged_cpu_set(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)
