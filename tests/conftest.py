"""What all tests share: the smoke mark, the compiled programs of a run, and where the assets are."""

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

# The core of each package, marked 'smoke': scripts/test.sh runs these on the newest JAX too. Of a test with many cases
# at most SMOKE_CASES are.
SMOKE_CASES = 4
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
# Begun first, so that at the end no process is left alone with one of them.
LONGEST = (
    "test_docs.py",
    "jpaged/server/",
    "jpaged/test_engine.py",
    "jpaged/test_beam_search.py",
    "jpaged/test_parallel.py",
    "jpaged/test_real_models.py",
    "pallas_kernels/test_attention.py",
)
# Its files share a server process.
SHARING_FOLDER = "tests/jpaged/server/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.relative_to(ROOT / "tests").as_posix().startswith(LONGEST))
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        file = item.path.relative_to(ROOT / "tests").as_posix()
        if file in SMOKE_FILES:
            tests.setdefault((file, item.name.partition("[")[0]), []).append(item)
    for cases in tests.values():
        for item in pick_cases(cases):
            item.add_marker(pytest.mark.smoke)


def pick_cases(cases: list[pytest.Item]) -> list[pytest.Item]:
    """The first case of each kind, then the last; the kind is the last word of an id: most often the backend."""
    kinds: dict[str, list[pytest.Item]] = {}
    for case in cases:
        kinds.setdefault(case.name.rpartition("-")[2], []).append(case)
    ends = [kind[0] for kind in kinds.values()] + [kind[-1] for kind in kinds.values()]
    return list(dict.fromkeys(ends))[:SMOKE_CASES]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With xdist a file's tests run in one process, and so do all of SHARING_FOLDER."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SHARING_FOLDER if nodeid.startswith(SHARING_FOLDER) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # the order of LONGEST, not that of the numbers of tests
    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which programs are kept for this run, never the user's: files of tests have engines of the same
    sizes, and one finds what another compiled, in whichever process."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return folder / "compiled"


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
