"""What all tests share: the smoke mark, programs that are not kept, and where the assets are."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from fetch_demo_model import cached_demo_model

# XLA:CPU compiles in half the time when it does not optimise, and compiling is most of what these tests do. It reads
# the flags once, when it starts. Tests that run a process of their own (the demo, the server, the command, the wheel)
# have programs as users have them.
_flags = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):  # newer ones do not know it, and end the process
    _flags += " --xla_cpu_use_fusion_emitters=false"
_given = os.environ.get("XLA_FLAGS")
os.environ["XLA_FLAGS"] = f"{_given or ''} {_flags}"
jax.devices()
if _given is None:
    del os.environ["XLA_FLAGS"]
else:
    os.environ["XLA_FLAGS"] = _given

ROOT = Path(__file__).resolve().parent.parent

# Marked 'smoke' as a whole: the core of each package. scripts/test.sh runs these on the newest JAX too.
SMOKE_FILES = {
    "jpaged/test_allocator.py",
    "jpaged/test_backends.py",
    "jpaged/test_scheduler.py",
    "models/test_decoder.py",
    "models/test_logits.py",
    "pallas_kernels/test_attention.py",
    "pallas_kernels/test_cpu_kernels.py",
    "pallas_kernels/test_no_copies.py",
    "pallas_kernels/test_pages.py",
}
# Its files share a server process.
SHARING_FOLDER = "tests/jpaged/server/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(ROOT / "tests").as_posix() in SMOKE_FILES:
            item.add_marker(pytest.mark.smoke)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With xdist a file's tests run in one process, and so do all of SHARING_FOLDER."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SHARING_FOLDER if nodeid.startswith(SHARING_FOLDER) else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def no_compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Programs are not kept, least of all in the user's cache folder: nothing here would read them again."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Programs of a file of tests are dropped after it: each takes memory maps, of which a process has 65,530, and a
    compiler that gets no more of them crashes."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def quick_flags() -> str:
    """XLA_FLAGS for a process of a test's own that is to compile as the tests do."""
    return _flags


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of assets laid beside the repository: models, traces, benchmark workloads."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the assets folder {folder}")
    return folder


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    path = cached_demo_model()
    if path is None:
        pytest.skip("needs the demo model: python scripts/fetch_demo_model.py")
    return path
