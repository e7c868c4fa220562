"""One server process for the tests of this folder: the tiny model, its characters as tokens."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from ascii_model import ascii_tokenizer
from jpaged_models import GenerationDefaults, Tokenizer, save_checkpoint
from tiny import tiny_model

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}<tool_call>{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
SIZES = ["--max-model-len", "128", "--block-size", "4", "--max-num-seqs", "8", "--max-num-batched-tokens", "32"]
OPTIONS = ["--served-model-name", "tiny", "small", "--max-queue-len", "24", "--embeddings", "mean"]
# Programs run once or twice: what is slow is to compile them. And none of them is to go to the user's cache folder.
QUICK = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}


class ServerProcess:
    """`jpaged serve` as a user starts it."""

    def __init__(self, model: str, root: Path, *options: str) -> None:
        paths = [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jpaged", "serve", model, "--port", "0", *SIZES, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **QUICK, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if found := re.match(r"Serving .* at (http://\S+) ", line):
                self.url = found[1]
                return
        raise AssertionError("the server did not start:\n" + "".join(lines))

    def stop(self) -> int:
        """End it as an operator does. Returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        self.output, _ = self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = Tokenizer(ascii_tokenizer().backend, {"eos_token": "<end>"}, TEMPLATE)
    generation = GenerationDefaults(eos_token_ids=(2,))
    save_checkpoint(folder, dataclasses.replace(tiny_model(), tokenizer=tokenizer, generation=generation))
    return str(folder)


@pytest.fixture(scope="package")
def server(checkpoint: str) -> Iterator[ServerProcess]:
    root = Path(__file__).resolve().parents[3]
    started = ServerProcess(checkpoint, root, *OPTIONS)
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.communicate()


@pytest.fixture(scope="package")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="package")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
