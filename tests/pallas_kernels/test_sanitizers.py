"""The native kernels under the compiler's sanitizers: no race between their threads, no misuse of memory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = "pallas_kernels/cpu/src"
FLAGS = ["-std=c++17", "-Og", "-g1", "-w", "-pthread", "-fno-sanitize-recover=all", "-DJPAGED_ISA=plain"]


@pytest.mark.parametrize("sanitizer, lanes", [("thread", 4), ("address,undefined", 4), ("address,undefined", 16)])
def test_kernels_are_clean(root: Path, tmp_path: Path, sanitizer: str, lanes: int) -> None:
    """16 lanes: the tiles and panels of AVX-512, on any processor."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs g++ or clang++")
    program, empty = tmp_path / "sanitize", tmp_path / "empty.cc"
    empty.write_text("int main() {}\n")
    build = [compiler, *FLAGS, f"-fsanitize={sanitizer}", "-I", str(root / SOURCES), "-o", str(program)]
    try:
        for command in ([*build, str(empty)], [str(program)]):
            subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the {sanitizer} sanitizer does not work here: {error.stderr[-200:]}")
    build.append(f"-DJPAGED_LANES={lanes}")
    sources = [str(root / SOURCES / "isa.cc"), str(Path(__file__).with_name("sanitize.cc"))]
    subprocess.run([*build, *sources], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stdout + done.stderr[-4000:]
