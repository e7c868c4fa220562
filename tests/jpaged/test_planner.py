"""The capacity planner: its arithmetic, what it refuses, and, where a compiler for a TPU is installed, a whole plan."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import HF_CONFIG

from jpaged.cli import main
from jpaged.planner import Needs, decode_rate, fit, prefill_rate

NEEDS = Needs(weights=1000, state=50, temporaries=150, block=32)  # bytes; blocks of 16 tokens: 2 bytes a token


def test_what_is_left_is_blocks() -> None:
    """One block is the null block, and a sequence takes whole blocks."""
    found = fit(NEEDS, 1200 + 32 * 11 + 31, block_size=16, max_model_len=33)
    assert (found.blocks, found.kv_bytes, found.tokens, found.sequences) == (10, 320, 160, 3)


@pytest.mark.parametrize("memory", [500, 1200, 1200 + 32])
def test_what_does_not_fit_has_no_blocks(memory: int) -> None:
    assert fit(NEEDS, memory, 16, 33) == (0, 0, 0, 0)


def test_rates_are_rooflines() -> None:
    assert decode_rate(NEEDS, 16, sequences=4, context=100, bandwidth=1e6) == 4 * 1e6 / (1000 + 4 * 100 * 2)
    assert prefill_rate(weights=1000, itemsize=2, flops=1e6) == 1e6 / (2 * 500)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "needs the compiler for tpu"),
        (("--memory-fraction", "1.5"), "memory_fraction must be in"),
        (("--model", "no-such-file.json"), "No such file"),
    ],
)
def test_refuses(options: tuple, message: str, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    assert main(["plan", "--model", str(tmp_path), "--target", "v5e", *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the compiler for TPUs is not installed")
def test_a_plan_by_the_compiler(tmp_path: Path) -> None:
    config = {**HF_CONFIG, "vocab_size": 32000, "hidden_size": 512, "num_attention_heads": 4, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    command = [sys.executable, "-m", "jpaged", "plan", "--model", tmp_path, "--target", "v5e", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    plan = json.loads(done.stdout)
    assert plan["kv_bytes_per_token"] == 2 * 2 * 128 * 2 * config["num_hidden_layers"]
    assert plan["kv_gib"] + plan["weights_gib"] + plan["state_gib"] + plan["temporaries_gib"] <= plan["usable_gib"]
    assert plan["kv_blocks"] * 16 == plan["kv_tokens"] > 1_000_000
