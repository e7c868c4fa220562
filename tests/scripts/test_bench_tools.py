"""What the benchmarks share, and that each of them still starts."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import bench_tools
import pytest

from jpaged.bench import timing

SCRIPTS = Path(bench_tools.__file__).parent


def test_each_call_gets_arguments_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 0.0, 1.0, 5.0, 7.0, 10.0, 13.0])  # the first call compiles and does not count
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    made = iter(range(10))
    given: list[int] = []
    assert bench_tools.time_calls(given.append, 3, lambda: (next(made),)) == [1.0, 2.0, 3.0]
    assert given == [0, 1, 2, 3]


def test_medians_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    order = ""

    def work(name: str, seconds: list[float]) -> None:
        nonlocal now, order
        now, order = now + seconds.pop(0), order + name

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    a, b = [50.0, 1.0, 9.0, 2.0], [50.0, 4.0, 5.0, 6.0]
    runs = {"a": lambda: work("a", a), "b": lambda: work("b", b)}
    assert bench_tools.take_turns(runs, 3) == {"a": 2.0, "b": 5.0} and order == "ab" * 4


def test_json_names_the_command_and_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["scripts/bench.py", "--json", "rows.json", "--rows", "3"])
    bench_tools.save_json(str(tmp_path / "new" / "rows.json"), [{"ms": 1.5}])
    saved = json.loads((tmp_path / "new" / "rows.json").read_text())
    assert saved["command"] == "python scripts/bench.py --rows 3" and saved["rows"] == [{"ms": 1.5}]
    assert saved["machine"]["jax"] and saved["machine"]["device"]


@pytest.mark.parametrize("name", sorted(path.name for path in SCRIPTS.glob("bench_*.py") if path.stem != "bench_tools"))
def test_each_benchmark_says_what_it_does(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    assert "--json FILE" in capsys.readouterr().out
