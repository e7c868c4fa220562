"""scripts/venv.sh: which Python is taken, and when an environment is installed anew."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Stands for the environment's Python: records what it is asked to do, and fails when told to.
FAKE_PYTHON = """#!/bin/sh
echo "$@" >>calls
case "$*" in *"pip install"*) echo "what pip says"; test ! -e broken ;; esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "setup.py", "pallas_kernels/cpu/src/one.cc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("[project]\n")
    executable(tmp_path / "env" / "bin" / "python", FAKE_PYTHON)
    return tmp_path


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def bash(root: Path, folder: Path, code: str) -> subprocess.CompletedProcess:
    script = f"set -euo pipefail; source {root}/scripts/venv.sh; {code}"
    return subprocess.run([shutil.which("bash"), "-c", script], cwd=folder, capture_output=True, text=True)


def installs(project: Path) -> int:
    """How often pip was asked to install so far."""
    return (project / "calls").read_text().count("pip install")


def test_installs_once_until_what_it_is_made_from_changes(root: Path, project: Path) -> None:
    for _ in range(2):
        assert bash(root, project, "make_env env . none").returncode == 0
    assert installs(project) == 1
    assert bash(root, project, "make_env env '.[test]' none; make_env env . none").returncode == 0
    assert installs(project) == 2, "an extra includes the plain package"
    for times, name in enumerate(("pyproject.toml", "setup.py", "pallas_kernels/cpu/src/one.cc"), start=3):
        (project / name).write_text("another\n")
        assert bash(root, project, "make_env env . none; make_env env . none").returncode == 0
        assert installs(project) == times


def test_failed_installation_is_told_and_tried_again(root: Path, project: Path) -> None:
    (project / "broken").touch()
    done = bash(root, project, "make_env env . none; echo went on")
    assert done.returncode != 0 and "went on" not in done.stdout
    assert "what pip says" in done.stderr and "installation failed" in done.stderr
    (project / "broken").unlink()
    done = bash(root, project, "make_env env . none")
    assert done.returncode == 0 and "what pip says" not in done.stdout
    assert installs(project) == 2


def test_finds_the_first_python_that_will_do(root: Path, tmp_path: Path) -> None:
    old = executable(tmp_path / "old", "#!/bin/sh\nexit 1\n")
    found = bash(root, tmp_path, f"find_python 11 missing {old} {sys.executable} missing")
    assert found.stdout == f"{sys.executable}\n"
    assert bash(root, tmp_path, f"find_python 11 missing {old}").returncode == 1
    assert bash(root, tmp_path, f"find_python 99 {sys.executable}").returncode == 1


def test_says_when_there_is_no_python(root: Path, tmp_path: Path) -> None:
    done = bash(root, tmp_path, "PATH=; python=$(need_python); echo went on")
    assert done.returncode != 0 and "went on" not in done.stdout
    assert "3.11 or newer" in done.stderr
