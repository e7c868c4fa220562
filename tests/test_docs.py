"""The documentation holds: its code runs, what it says is printed is printed, and its links lead somewhere.

In every page

    ```python               is run, in order, in one namespace a page
    ```text                 right after it is what it prints, to the letter
    ```python title="FILE"  is an excerpt: it stands in that file so
    <!-- not run: WHY -->   before a block leaves it out (it is compiled)

and "path/to/model" is the demo model; without it, blocks that name it are left out.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fetch_demo_model import cached_demo_model

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "results" not in path.parts)]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```[ ]*$", flags=re.M | re.S)
MODEL = '"path/to/model"'


class Block(NamedTuple):
    """A fenced block: its info string, its text, the line it begins at, and what stands between it and the last one."""

    info: str
    text: str
    line: int
    before: str


def read_blocks(text: str) -> list[Block]:
    blocks, end = [], 0
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start(3))
        blocks.append(Block(match[2].strip(), textwrap.dedent(match[3]), line, text[end : match.start()]))
        end = match.end()
    return blocks


def run_page(page: Path) -> None:
    """Run a page's code, and compare what it prints with what the page shows."""
    namespace: dict[str, Any] = {"__name__": "a_page"}
    printed = None
    for block in read_blocks(page.read_text(encoding="utf-8")):
        if block.info == "text" and printed is not None and not block.before.strip():
            assert printed == block.text, f"{page.name}, line {block.line}: printed was\n{printed}"
        printed = None
        if block.info != "python":
            continue
        source = block.text
        code = compile("\n" * block.line + source, str(page), "exec")
        if "<!-- not run:" in block.before.rpartition("\n\n")[2]:
            continue
        if MODEL in source:
            demo = cached_demo_model()
            if demo is None:
                continue
            few = f'"{demo}", warm_up=False, max_num_seqs=8, max_model_len=96, kv_cache_memory_bytes=32 << 20'
            code = compile("\n" * block.line + source.replace(MODEL, few), str(page), "exec")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, namespace)
        printed = out.getvalue()


@pytest.mark.parametrize("name", [name for name in NAMES if "```python" in (ROOT / name).read_text(encoding="utf-8")])
def test_code_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(ROOT / name)


@pytest.mark.parametrize("name", NAMES)
def test_excerpts_stand_in_the_files(name: str) -> None:
    for block in read_blocks((ROOT / name).read_text(encoding="utf-8")):
        if found := re.fullmatch(r'\w+ title="(.+)"', block.info):
            lines = textwrap.dedent((ROOT / found[1]).read_text(encoding="utf-8")).splitlines()
            stripped = "\n".join(line.strip() for line in lines)
            excerpt = "\n".join(line.strip() for line in block.text.strip().splitlines())
            assert excerpt in stripped, f"{name}, line {block.line}: not in {found[1]}"


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ +(.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("name", NAMES)
def test_files_named_are_there(name: str) -> None:
    """In backticks: a path from the root or from a package, or the name of a Python file anywhere."""
    text = FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    tops = [ROOT / name for name in ("jpaged", "models", "pallas_kernels", "scripts", "tests", "docs")]
    files = {path.name for top in tops for path in top.rglob("*")}
    missing = []
    for named in re.findall(r"`([\w./-]+\.(?:py|sh|md|ipynb|cc|h|png))`", text):
        here = any((folder / named).exists() for folder in (ROOT, *tops))
        if not here and ("/" in named or named not in files):
            missing.append(named)
    assert missing == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / link.partition("#")[0]).resolve() for link in re.findall(r"\]\(([^)\s]+)\)", index.read_text())
    }
    assert {page for page in PAGES if page != index} - linked == set()


# ------------------------------------------------------------------ the notebook and the pictures

NOTEBOOK = ROOT / "docs" / "notebooks" / "functional_state.ipynb"


def printed_by(cell: dict[str, Any]) -> str:
    """What a cell of the stored notebook printed."""
    assert {output["output_type"] for output in cell["outputs"]} <= {"stream"}, cell["outputs"]
    return "".join("".join(output["text"]) for output in cell["outputs"])


def test_the_notebook_runs_and_prints_what_it_shows() -> None:
    """Its code, in order, without Jupyter. Numbers may differ in their last digits, cells tagged "varies" in all."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    namespace: dict[str, Any] = {"__name__": "a_notebook"}
    with np.printoptions():  # the notebook sets its own
        for number, cell in enumerate(cells, 1):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
            if "varies" not in cell["metadata"].get("tags", ()):
                assert_same_text(out.getvalue(), printed_by(cell))


def assert_same_text(got: str, want: str) -> None:
    """Equal but for numbers with a point, which are near each other."""
    number = re.compile(r"-?\d+\.\d*(?:e[-+]\d+)?")
    assert number.sub("#", got).split() == number.sub("#", want).split(), f"printed was\n{got}\nshown is\n{want}"
    pairs = zip(map(float, number.findall(got)), map(float, number.findall(want)), strict=True)
    assert all(abs(one - other) <= 2e-3 + 1e-3 * abs(other) for one, other in pairs), f"{got}\n{want}"


def test_the_pictures_are_of_the_tutorial(tmp_path: Path) -> None:
    """The script finds a state for each picture, and draws as many pictures as the page shows."""
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    import draw_tutorial

    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    pictures: dict[str, list[draw_tutorial.Frame]] = {}
    draw_tutorial.run_page(text.partition("## The same in the engine")[0], pictures)
    assert list(pictures) == re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text) and all(pictures.values())
    name, frames = next(iter(pictures.items()))
    draw_tutorial.draw(frames, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert (ROOT / "docs" / name).stat().st_size > 10_000
