"""The capacity planner: its arithmetic, what it refuses, and, where a compiler for a TPU is installed, a whole plan."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jpaged_models import ModelConfig
from tiny import HF_CONFIG

from jpaged import EngineConfig, targets
from jpaged.chips import Chip
from jpaged.cli import main
from jpaged.commands.plan import describe
from jpaged.planner import Needs, count, decode_rate, fit, prefill_rate
from jpaged.targets import TARGETS, Target

# In bytes. A block has 16 tokens, so a token takes 2.
NEEDS = Needs(weights=1000, read=900, layers=800, state=50, temporaries=150, block=32)


def test_what_is_left_is_blocks() -> None:
    """One block is the null block, and a sequence takes whole blocks."""
    found = fit(NEEDS, 1200 + 32 * 11 + 31, block_size=16, max_model_len=33)
    assert (found.blocks, found.kv_bytes, found.tokens, found.sequences) == (10, 320, 160, 3)


@pytest.mark.parametrize("memory", [500, 1200, 1200 + 32])
def test_what_does_not_fit_has_no_blocks(memory: int) -> None:
    assert fit(NEEDS, memory, 16, 33) == (0, 0, 0, 0)


def test_rates_are_rooflines() -> None:
    """Of weights in two bytes: what is read decides with few products to do, the products with many."""
    memory = Chip(0, bandwidth=1e6, flops=1e9)
    assert decode_rate(NEEDS, 2, 16, sequences=4, context=100, chip=memory) == 4 * 1e6 / (900 + 4 * 100 * 2)
    products = Chip(0, bandwidth=1e6, flops=1e3)
    assert decode_rate(NEEDS, 2, 16, sequences=4, context=100, chip=products) == 1e3 / (2 * 450)
    assert prefill_rate(NEEDS, 2, memory) == 1e9 / (2 * 400)


@pytest.mark.parametrize(("name", "chips"), [("h200", 1), ("v5e", 1), ("h200x8", 8), ("v6e-4", 4)])
def test_bytes_of_llama_3_8b(name: str, chips: int) -> None:
    """By hand: a layer's four matrices and the vocabulary's two are divided, norms are not. No compiler is needed."""
    width, wide, vocabulary = 4096, 14336, 128256
    hf = {**HF_CONFIG, "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": wide}
    hf |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
    config = EngineConfig(num_blocks=65, max_model_len=1024, tensor_parallel_size=chips)
    needs = count(ModelConfig.from_hf(hf), config, "bfloat16", "bfloat16", TARGETS[name])
    layer = (width * (width + 2 * 1024) + width * width + 3 * width * wide) // chips + 2 * width
    table = vocabulary * width // chips
    assert needs.weights == 2 * (32 * layer + 2 * table + width)
    assert needs.weights - needs.read == 2 * table and needs.read - needs.layers == 2 * table
    assert needs.block == 16 * 32 * 2 * 8 * 128 * 2 // chips


def test_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The whole command, with this machine's processor in the place of a chip that is not here."""
    chip = Target("cpu", "", 1, 1, memory_bytes=1 << 30, bandwidth=1e9, flops=1e12)
    monkeypatch.setitem(TARGETS, "v5e", chip)
    monkeypatch.setitem(targets.NEEDS, "cpu", ("jax", "none"))
    monkeypatch.setattr(targets, "list_devices", lambda target: jax.devices("cpu"))
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    command = ["plan", "--model", str(tmp_path), "--target", "v5e", "--max-num-seqs", "8"]
    command += ["--max-num-batched-tokens", "32", "--max-model-len", "64", "--dtype", "float32"]
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert plan["kv_tokens"] == 16 * plan["kv_blocks"] and plan["sequences_of_max_model_len"] == plan["kv_blocks"] // 4
    used = plan["kv_gib"] + plan["weights_gib"] + plan["state_gib"] + plan["temporaries_gib"]
    assert plan["usable_gib"] == 0.9 and 0.8 < used <= 0.91
    assert list(plan["decode_tokens_per_s_at_most"]) == ["1x64", "8x64"]
    said = describe(plan, 64, 16)
    assert f"{plan['kv_blocks']:,} blocks of 16 tokens, 256 bytes a token" in said
    assert "tokens/s generated for 8 sequences with 64 tokens in the cache each" in said
    assert "The model does not fit" in describe({**plan, "kv_blocks": 0}, 64, 16)
    assert "together" not in said and "bytes are of each" not in said
    several = describe({**plan, "chips": 8}, 64, 16)
    assert "GiB and bytes are of each" in several and "At most, all chips together, by" in several


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
