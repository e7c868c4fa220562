"""Hub ids: from huggingface-hub's cache without a network, and a clear refusal without either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import model_support as support
from jpaged_models.hub import is_hub_id

SCRIPT = """
import sys
from jpaged_models import CheckpointError, load_model
try:
    print(load_model(sys.argv[1]).config.num_layers)
except CheckpointError as error:
    print("refused:", error)
"""


def offline(cache: Path, model_id: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SCRIPT, model_id]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_cached_model_loads_offline(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--tiny"
    support.write_folder(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert offline(tmp_path, "someone/tiny") == "2\n"


def test_neither_network_nor_cache(tmp_path: Path) -> None:
    answer = offline(tmp_path, "someone/missing")
    assert answer.startswith("refused: 'someone/missing' is neither a local path, nor in the Hugging Face cache")
    assert "nor to be had from the hub" in answer


def test_what_looks_like_an_id() -> None:
    assert is_hub_id("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert not any(map(is_hub_id, ("model", "/a/b", "a/b/c", "./a/b", "a b/c", "")))
