"""The page of measurements: up to date, and made of what the files say and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_tools import save_json
from make_benchmarks import make_page
from markdown_table import make_table, show

ONE = {"command": "python a.py", "date": "2026-01-02", "machine": {"cpu": "X", "cores": 2, "jax": "1"}}


def write(folder: Path, page: str, **files: dict[str, Any]) -> str:
    for name, found in files.items():
        (folder / f"{name}.json").write_text(json.dumps(found))
    (folder / "page.md").write_text(page)
    return make_page(folder)


def test_the_page_is_up_to_date(root: Path) -> None:
    page = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert page == make_page(root / "docs" / "results" / "benchmarks"), "run python scripts/make_benchmarks.py"


def test_tables_values_and_machines(tmp_path: Path) -> None:
    a = ONE | {"rows": [{"x": 1.23456, "y": 12345}, {"x": "1 to 2"}], "note": "A note."}
    b = ONE | {"rows": [{"x": 0.5}], "machine": {"cpu": "Y", "memory_gb": 8}}
    page = write(tmp_path, "{{machines}}\n{{table a + b | y = why | x}}\nIt is {{b: x}}.\n", a=a, b=b)
    assert "- **A**: X, 2 cores, JAX 1\n- **B**: Y, 8 GB\n" in page
    assert "```\npython a.py\n```\n\n| why | x |\n|---|---|\n| 12,345 | 1.23 |\n|  | 1 to 2 |\n|  | 0.5 |\n" in page
    assert "\nMachine A, 2026-01-02, machine B, 2026-01-02. A note.\n" in page and "It is 0.5." in page


def test_a_file_without_a_place_gets_a_section(tmp_path: Path) -> None:
    page = write(tmp_path, "Text.\n", new_one=ONE | {"rows": [{"x": 1}]})
    section = "## New one\n\n```\npython a.py\n```\n\n| x |\n|---|\n| 1 |\n\nMachine A, 2026-01-02.\n"
    assert page.endswith("Text.\n\n" + section)


@pytest.mark.parametrize(
    ("page", "found", "word"),
    [
        ("{{table other}}\n", ONE | {"rows": [{"x": 1}]}, "no docs/results/benchmarks/other.json"),
        ("{{table a | y}}\n", ONE | {"rows": [{"x": 1}]}, "no column 'y'; it has x"),
        ("{{a: x}}\n", ONE | {"rows": [{"x": 1}, {"x": 2}]}, "must have one row"),
        ("", ONE, "a.json must have command, date, machine, rows"),
        ("", ONE | {"rows": []}, "'rows'"),
        ("", ONE | {"rows": [1]}, "must map columns"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, page: str, found: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        write(tmp_path, page, a=found)


def test_what_a_benchmark_writes_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["elsewhere/bench_x.py", str(tmp_path / "model"), "--repeats", "3"])
    save_json(str(tmp_path / "x.json"), [{"ms": 1.5}])
    page = write(tmp_path, "{{table x}}\n")
    assert "python scripts/bench_x.py model --repeats 3\n" in page and "| 1.5 |" in page


def test_numbers() -> None:
    assert [show(value) for value in (1.0, 0.92, 116.0, 0.0123456, 4096.4, 0.0, 7, 12345, True, None, "-")] == [
        "1.0", "0.92", "116", "0.0123", "4,096", "0.0", "7", "12,345", "True", "", "-"
    ]  # fmt: skip
    assert make_table(["a", "b"], [[1, 2.5]]) == "| a | b |\n|---|---|\n| 1 | 2.5 |"
