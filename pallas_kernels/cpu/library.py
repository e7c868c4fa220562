"""The compiled kernels: found beside this file and registered with XLA once, or a reason why they are not there."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterable
from pathlib import Path

import jax

log = logging.getLogger(__name__)
TARGETS = ("jpaged_cpu_attention", "jpaged_cpu_write_kv", "jpaged_cpu_linear", "jpaged_cpu_take_rows")
PATTERN = "_native_*.so"  # named after the version of XLA's interface it was built for


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The library with its targets registered, or None if none fits (no C++ compiler at installation).

    Several may have been built, by environments that share this folder. XLA takes those for its own interface and for
    older ones, and refuses newer ones.
    """
    refused = []
    for file in sorted(Path(__file__).parent.glob(PATTERN), reverse=True):
        library = ctypes.CDLL(str(file))
        library.jpaged_cpu_set.restype = ctypes.c_char_p
        try:
            for name in TARGETS:
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
        except jax.errors.JaxRuntimeError as error:
            refused.append(f"{file.name}: {error}")
            continue
        return library
    if refused:
        log.warning("no native CPU kernels for this jaxlib, install jpaged again to build them: %s", "; ".join(refused))
    return None


def require_library() -> ctypes.CDLL:
    """`load_library`, or a ValueError that says what to do."""
    library = load_library()
    if library is None:
        raise ValueError(
            f"the native CPU kernels are not built for this jaxlib (no {PATTERN} that fits): install a C++17 compiler "
            'and install jpaged again, or use the "xla" backend'
        )
    return library


def prefer_huge_pages(arrays: Iterable[jax.Array]) -> None:
    """Ask the system to keep these arrays in huge pages of its memory. It may not follow; elsewhere nothing happens."""
    library = load_library() if jax.default_backend() == "cpu" else None
    if library is None:
        return
    for array in arrays:
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
