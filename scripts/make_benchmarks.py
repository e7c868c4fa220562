"""Write docs/benchmarks.md from the measurements in docs/results/benchmarks and the text around them.

    python scripts/make_benchmarks.py            # --check: only say whether the page is up to date

A measurement is a file docs/results/benchmarks/NAME.json, as every benchmark here writes it with --json FILE:

    {
     "command": "python scripts/bench_step.py --batch 8 32",      one, or several with newlines between
     "date": "2026-11-29",
     "machine": {"cpu": "AMD EPYC", "cores": 2, "jax": "0.10.2"},  whatever tells it from others
     "rows": [{"dtype": "float32", "batch": 8, "paged ms": 46.4}], column -> number or text, in order
     "note": "..."                                                 optional: a sentence under the table
    }

The text is page.md beside them. In it

    {{table NAME}}                        is the command, the table, the machine and the date,
    {{table NAME | dtype | paged ms = ms}}  the same with these columns only, the last under another heading,
    {{table NAME + OTHER}}                rows of both files in one table,
    {{NAME: column}}                      a value within a sentence, from a file of one row,
    {{machines}}                          the list of machines that the tables name by letters.

So a new measurement in place of an old one: run the benchmark with --json docs/results/benchmarks/NAME.json, then this
script. A new file that page.md does not name gets a section of its own at the page's end, until it has a better place.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markdown_table import make_table, show

DOCS = Path(__file__).resolve().parent.parent / "docs"
MADE = "<!-- Made by scripts/make_benchmarks.py from docs/results/benchmarks: change those, then run it. -->\n"
NAMES = {"jax": "JAX", "numpy": "NumPy", "python": "Python"}  # as people write them
PLAIN = ("cpu", "device")  # of a machine: the value says it all


class Page:
    """Measurements by name, which of them are on the page so far, and the letters of their machines."""

    def __init__(self, results: Mapping[str, dict[str, Any]]) -> None:
        self.results = results
        self.used: set[str] = set()
        self.machines: list[dict[str, Any]] = []

    def make(self, text: str) -> str:
        """The page for a text with {{...}} in it. Raises ValueError for a name or a column that is not there."""
        text = re.sub(r"^\{\{table ([^}]+)\}\}$", lambda found: self._make_table(found[1]), text, flags=re.M)
        text = re.sub(r"\{\{(\w+): ([^}]+)\}\}", lambda found: self._take_value(found[1], found[2]), text)
        others = sorted(set(self.results) - self.used)
        text += "".join(f"\n## {name.replace('_', ' ').capitalize()}\n\n{self._make_table(name)}\n" for name in others)
        return MADE + text.replace("{{machines}}", "\n".join(map(describe, "ABCDEFGHIJKLMNOPQ", self.machines)))

    def _make_table(self, order: str) -> str:
        names, *columns = (part.strip() for part in order.split("|"))
        files = [self._get(name.strip()) for name in names.split("+")]
        rows = [row for file in files for row in file["rows"]]
        shown = dict(column.rsplit(" = ", 1) if " = " in column else (column, column) for column in columns)
        shown = shown or {column: column for row in rows for column in row}
        for column in shown:
            if not any(column in row for row in rows):
                known = ", ".join(dict.fromkeys(column for row in rows for column in row))
                raise ValueError(f"{names} has no column {column!r}; it has {known}")
        table = make_table(list(shown.values()), [[row.get(column) for column in shown] for row in rows])
        commands = "\n".join(dict.fromkeys(file["command"] for file in files))
        made = ", ".join(dict.fromkeys(f"machine {self._letter(file['machine'])}, {file['date']}" for file in files))
        notes = [file["note"] for file in files if "note" in file]
        below = " ".join([made[0].upper() + made[1:] + ".", *notes])
        return f"```\n{commands}\n```\n\n{table}\n\n{below}"

    def _take_value(self, name: str, column: str) -> str:
        rows = self._get(name)["rows"]
        if len(rows) != 1 or column not in rows[0]:
            raise ValueError(f"{name} must have one row with a column {column!r} to be named in a sentence")
        return show(rows[0][column])

    def _get(self, name: str) -> dict[str, Any]:
        if name not in self.results:
            raise ValueError(f"there is no docs/results/benchmarks/{name}.json")
        self.used.add(name)
        return self.results[name]

    def _letter(self, machine: dict[str, Any]) -> str:
        if machine not in self.machines:
            self.machines.append(machine)
        return "ABCDEFGHIJKLMNOPQ"[self.machines.index(machine)]


def describe(letter: str, machine: Mapping[str, Any]) -> str:
    """A line of the list of machines."""
    words = {"cores": "{} cores", "memory_gb": "{} GB", "kernels": "native kernels for {}"}
    parts = [
        str(value) if key in PLAIN else words.get(key, f"{NAMES.get(key, key)} {{}}").format(value)
        for key, value in machine.items()
    ]
    return f"- **{letter}**: {', '.join(parts)}"


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Measurements by name. Raises ValueError, naming the file, for one that lacks something."""
    results = {}
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        kinds = {"command": str, "date": str, "machine": dict, "rows": list}
        for key, kind in kinds.items():
            if not isinstance(found, dict) or not isinstance(found.get(key), kind) or not found[key]:
                raise ValueError(f"{path.name} must have {', '.join(kinds)}, none empty; look at {key!r}")
        if not all(isinstance(row, dict) for row in found["rows"]):
            raise ValueError(f"{path.name}: each of rows must map columns to values")
        results[path.stem] = found
    return results


def make_page(folder: Path) -> str:
    """The page for the measurements and the text in a folder."""
    return Page(read_results(folder)).make((folder / "page.md").read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with status 1 if the page is old")
    args = parser.parse_args()
    page, target = make_page(DOCS / "results" / "benchmarks"), DOCS / "benchmarks.md"
    if not args.check:
        target.write_text(page, encoding="utf-8")
    elif target.read_text(encoding="utf-8") != page:
        sys.exit("docs/benchmarks.md is not what docs/results/benchmarks says: run python scripts/make_benchmarks.py")


if __name__ == "__main__":
    main()
