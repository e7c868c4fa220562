"""The demo: its options without a model, and a short run on the real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import demo
import fetch_demo_model
import pytest


def test_help_needs_nothing_installed(root: Path) -> None:
    # -S leaves out site-packages: only the standard library is there.
    done = subprocess.run(
        [sys.executable, "-S", str(root / "scripts" / "demo.py"), "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "--max-tokens" in done.stdout, done.stderr


def test_the_model_cannot_be_had(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def fail() -> Path:
        raise fetch_demo_model.FetchError("no network")

    monkeypatch.setattr(demo, "cached_demo_model", lambda: None)
    monkeypatch.setattr(demo, "fetch_demo_model", fail)
    assert demo.main([]) == 1
    assert "error: no network" in capsys.readouterr().err


def test_bad_options_are_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture) -> None:
    for option in (["--max-tokens", "0"], ["--temperature", "-1"], ["--model", "no/such/folder"]):
        assert demo.main(["--model", "unused", *option]) == 1
        assert capsys.readouterr().err.startswith("error: ")


def test_answers_eight_prompts(demo_model: Path, capsys: pytest.CaptureFixture) -> None:
    options = ["--max-tokens", "12", "--max-model-len", "512", "--max-num-batched-tokens", "32"]
    assert demo.main(options) == 0  # few programs to compile, and prompts prefilled in chunks
    printed = capsys.readouterr().out
    assert printed.count(">>> ") == len(demo.PROMPTS) == 8
    assert "symbol for gold is Au" in printed
    assert "tokens/s" in printed
    for word in ("used", "cached", "shared", "free", "utilisation"):
        assert word in printed


def test_answers_are_cut_to_a_few_lines(capsys: pytest.CaptureFixture) -> None:
    demo.show("Count", "\n".join(f"line {i}" for i in range(9)), "stop", full=False)
    printed = capsys.readouterr().out
    assert "line 4" in printed and "line 5" not in printed and "4 more lines" in printed
    demo.show("Count", "\n".join(f"line {i}" for i in range(9)), "stop", full=True)
    assert "line 8" in capsys.readouterr().out
