"""The compiled kernels: found beside this file and registered with XLA once, or a reason why they are not there."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.checks import fail

TARGETS = (
    "jpaged_cpu_attention",
    "jpaged_cpu_write_kv",
    "jpaged_cpu_linear",
    "jpaged_cpu_take_rows",
    "jpaged_cpu_zeros",
)
PATTERN = "_native_*.so"  # named after the version of XLA's interface it was built for


def find_library(folder: Path, interface: tuple[int, int]) -> Path | None:
    """The library in `folder` to load where XLA's interface has this version, or None if none fits.

    Several may have been built, by environments that share the folder. XLA takes those for its own interface and for
    older ones, and refuses newer ones: when they are registered, or, if that comes first, when it starts.
    """
    built = {tuple(map(int, file.stem.split("_")[-2:])): file for file in folder.glob(PATTERN)}
    return built.get(max((version for version in built if version <= interface), default=()))


def xla_interface() -> tuple[int, int]:
    """Version of the interface that the installed jaxlib offers, as its headers say."""
    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    major, minor = (int(*re.findall(rf"#define XLA_FFI_API_{part} (\d+)", text)) for part in ("MAJOR", "MINOR"))
    return major, minor


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The library with its targets registered, or None if none fits (no C++ compiler at installation).

    From then on malloc has one arena (glibc): 200 MB less for a server of a small model, and no slower. See also
    `settle_memory`.
    """
    file = find_library(Path(__file__).parent, xla_interface())
    if file is None:
        return None
    library = ctypes.CDLL(str(file))
    library.jpaged_cpu_set.restype = ctypes.c_char_p
    library.jpaged_cpu_keep_memory_for_loading()
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library


def require_library() -> ctypes.CDLL:
    """`load_library`, or a ValueError that says what to do."""
    library = load_library()
    if library is None:
        raise ValueError(
            f"the native CPU kernels are not built for this jaxlib (no {PATTERN} that fits): install a C++17 compiler "
            'and install jpaged again, or use the "xla" backend'
        )
    return library


def make_zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Zeros; with the library on a CPU ones that take memory only as they are written to, in huge pages."""
    if jax.default_backend() != "cpu" or load_library() is None:
        return jnp.zeros(shape, dtype)
    return jax.ffi.ffi_call("jpaged_cpu_zeros", jax.ShapeDtypeStruct(shape, dtype))()


def settle_memory() -> None:
    """When loading and compiling are done: free memory goes back to the system, and what steps free is kept for the
    next. Where the C library is not glibc, or there are no native kernels, nothing happens."""
    library = load_library()
    if library is not None:
        library.jpaged_cpu_keep_memory_for_steps()


def panel_width(instruction_set: str = "") -> int:
    """Outputs in a panel of a packed weight (see `linear`) for one of `instruction_sets()`, or the best ("").

    Raises ValueError for another, or without the library.
    """
    width: int = require_library().jpaged_cpu_panel(instruction_set.encode())
    if not width:
        fail("instruction_set", repr(instruction_set), f"one of {', '.join(instruction_sets())}, or '' for the best")
    return width


def instruction_sets() -> tuple[str, ...]:
    """Instruction sets the kernels were compiled for and this processor has, best first; empty without the library."""
    library = load_library()
    names: list[str] = []
    while library is not None and (name := library.jpaged_cpu_set(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)
