"""Builds the native CPU kernels where a C++ compiler is at hand; all else about the package is in pyproject.toml.

Each instruction set is a compilation of its own of `isa.cc`; which one runs is decided on the machine that runs it, so
that a wheel works on every processor of its architecture. Without a compiler, or without the headers in the jaxlib
wheel, the package is installed without the kernels and says so where it is used (`jpaged version`).
"""

from __future__ import annotations

import importlib.util
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCE = Path("pallas_kernels/cpu/src")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
X86_SETS = {"avx2": AVX2, "avx512": AVX512, "avx512bf16": [*AVX512, "-mavx512vnni", "-mavx512bf16"]}
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-w"]


def include_dir() -> Path:
    """Where the headers are; a folder that does not exist without jaxlib."""
    spec = importlib.util.find_spec("jaxlib")
    return Path(spec.origin).parent / "include" if spec and spec.origin else Path("no-jaxlib")


def ffi_version() -> tuple[int, int]:
    """Major and minor version of the interface in the headers; (0, 0) without them."""
    header = include_dir() / "xla/ffi/api/c_api.h"
    text = header.read_text() if header.exists() else ""
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (int(match[1]) if match else 0 for match in found)
    return major, minor


class BuildKernels(build_ext):
    """One object file an instruction set, all in one library without a Python interface."""

    def get_ext_filename(self, fullname: str) -> str:
        """Named after XLA's interface: a library made for a newer one than runs is refused, and both may lie here."""
        major, minor = ffi_version()
        return f"{Path(*fullname.split('.'))}_{major}_{minor:03}.so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        x86 = platform.machine() in ("x86_64", "AMD64")
        # From the smallest set to the largest: of an inline function that several hold the linker keeps the first,
        # which then runs everywhere.
        jobs = [("ffi", "ffi.cc", ["-DJPAGED_HAVE_X86_SETS"] if x86 else [])]
        sets = {"plain": [], **(X86_SETS if x86 else {})}
        jobs += [(name, "isa.cc", [*flags, f"-DJPAGED_ISA={name}"]) for name, flags in sets.items()]

        def compile_one(job: tuple[str, str, list[str]]) -> str:
            name, file, flags = job
            return self.compiler.compile(
                [str(SOURCE / file)],
                output_dir=str(Path(self.build_temp) / name),
                include_dirs=[str(include_dir())],
                extra_postargs=[*FLAGS, *flags],
            )[0]

        with ThreadPoolExecutor() as pool:
            objects = list(pool.map(compile_one, jobs))
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        strip = ["-Wl,-s"] if platform.system() == "Linux" else []
        self.compiler.link_shared_object(objects, target, extra_postargs=strip, target_lang="c++")


class TagWheel(bdist_wheel):
    """The library has no Python interface: one wheel serves every Python 3 of a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


# optional: an installation goes on without the kernels if they cannot be built.
kernels = Extension("pallas_kernels.cpu._native", [str(SOURCE / "ffi.cc")], language="c++", optional=True)
kernels.depends = [str(path) for path in sorted(SOURCE.iterdir())]
setup(ext_modules=[kernels], cmdclass={"build_ext": BuildKernels, "bdist_wheel": TagWheel})
