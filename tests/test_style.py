"""The structure that the design promises, read off the source: who imports whom, sizes, no stray paths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER_OF = {"jpaged": "jpaged", "pallas_kernels": "pallas_kernels", "jpaged_models": "models"}

# What a package may import of this project besides itself: imports go down only.
MAY_IMPORT = {"jpaged": {"jpaged_models"}, "jpaged_models": {"pallas_kernels"}, "pallas_kernels": set()}
OF_NO_LAYER = {"pallas_kernels.indexing"}  # how any of them indexes arrays

MAX_LINES = 500


def modules() -> dict[str, Path]:
    """Every module of the three packages: dotted import name -> file."""
    found = {}
    for package, folder in FOLDER_OF.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = (package, *path.relative_to(ROOT / folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str) -> set[str]:
    """Dotted names that the module imports, anywhere in it; `from a import b` gives a.b if it is a module."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join(above + ([base] if base else []))
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in MODULES else base)
    return found


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down_only(name: str) -> None:
    package = name.partition(".")[0]
    ours = {top for target in imports(name) - OF_NO_LAYER if (top := target.partition(".")[0]) in FOLDER_OF}
    assert ours <= MAY_IMPORT[package] | {package}, f"{name} imports {ours}"


def runtime_dependencies() -> set[str]:
    """Import names of what pyproject.toml requires, and of what extras for users add."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [
        each for name, packages in project["optional-dependencies"].items() if name != "test" for each in packages
    ]
    dependencies = [*project["dependencies"], *extras]
    names = {re.match(r"[\w-]+", dependency)[0].replace("-", "_") for dependency in dependencies}
    return names - {"orbax_checkpoint"} | {"orbax", "ml_dtypes"}  # jax itself requires ml_dtypes


def test_only_runtime_dependencies_are_imported() -> None:
    allowed = runtime_dependencies() | set(FOLDER_OF) | set(sys.stdlib_module_names)
    strays = {
        f"{name} imports {target}"
        for name in MODULES
        for target in imports(name)
        if target.partition(".")[0] not in allowed
    }
    assert not strays


def closure(name: str) -> Iterator[str]:
    """Everything the module imports, directly or through other modules of its own package."""
    seen, waiting = {name}, [name]
    while waiting:
        for target in imports(waiting.pop()) - seen:
            seen.add(target)
            yield target
            if target in MODULES and target.partition(".")[0] == name.partition(".")[0]:
                waiting.append(target)


def test_the_scheduler_knows_nothing_of_jax() -> None:
    assert "jpaged.scheduler" in MODULES
    tops = {target.partition(".")[0] for target in closure("jpaged.scheduler")}
    assert not tops & {"jax", "jaxlib", "flax", "jpaged_models", "pallas_kernels"}, tops


def test_files_are_short() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in tracked_files()
        if path.suffix in {".py", ".sh"}
    }
    assert {name: count for name, count in lengths.items() if count > MAX_LINES} == {}


def test_no_path_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.}/~-])/(?:work|root|home|Users)/\w")
    strays = [
        f"{path.relative_to(ROOT)}: {line.strip()[:120]}"
        for path in tracked_files()
        if path.suffix in {".py", ".sh", ".md", ".toml", ".json", ""}
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if pattern.search(line)
    ]
    assert strays == []


def test_readme_names_only_what_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:scripts|docs|tests)/[\w./-]+\w", text))
    named |= {link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link}
    assert {name for name in named if not (ROOT / name).exists()} == set()
    for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S):
        compile(block, "README.md", "exec")
