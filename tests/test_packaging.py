"""The wheel: complete, and at home in an empty folder or beside a user's own folder called models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

FOLDER_OF = {"jpaged": "jpaged", "pallas_kernels": "pallas_kernels", "jpaged_models": "models"}


def run(command: list[str], **options) -> str:
    """Runs the command and returns what it printed; fails the test, with that, if it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy: a build folder in the tree could leak old files into it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    return build_wheel(root, source, out, os.environ)


def build_wheel(root: Path, source: Path, out: Path, environment: Mapping[str, str]) -> Path:
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    for folder in FOLDER_OF.values():
        shutil.copytree(root / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out)]
    run([sys.executable, *build, str(source)], env=environment)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it, to be put on PYTHONPATH before this environment's packages."""
    folder = tmp_path_factory.mktemp("site")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    run([sys.executable, *install, str(wheel)])
    return folder


def python(site: Path, folder: Path, code: str) -> str:
    """Runs code in the folder, with the installed wheel, and with a cache folder of its own."""
    environment = os.environ | {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(folder / ".cache")}
    return run([sys.executable, "-c", code], cwd=folder, env=environment)


def test_wheel_holds_every_module_and_nothing_else(root: Path, wheel: Path) -> None:
    wanted = {
        f"{package}/{path.relative_to(root / folder).as_posix()}"
        for package, folder in FOLDER_OF.items()
        for path in (root / folder).rglob("*")
        if path.is_file() and not {"__pycache__", "src"} & set(path.parts) and path.suffix != ".so"
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    held = {name for name in names if ".dist-info/" not in name}
    libraries = {name for name in held if name.endswith(".so")}
    assert held - libraries == wanted
    assert len(libraries) == (1 if shutil.which("c++") else 0)
    assert {f"{package}/py.typed" for package in FOLDER_OF} <= held
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


PRINT_FOLDERS = """
import pathlib, jpaged, jpaged_models, pallas_kernels
for module in (jpaged, jpaged_models, pallas_kernels):
    print(pathlib.Path(module.__file__).parent)
"""


def test_imports_in_an_empty_folder(site: Path, tmp_path: Path) -> None:
    folders = python(site, tmp_path, PRINT_FOLDERS).split()
    assert folders == [str(site / name) for name in ("jpaged", "jpaged_models", "pallas_kernels")]


def test_imports_beside_a_users_own_models_folder(site: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("mine = True\n")
    printed = python(site, tmp_path, "import models\nassert models.mine" + PRINT_FOLDERS).split()
    assert printed[1] == str(site / "jpaged_models")


GENERATE = """
import json, pathlib
import numpy as np
from safetensors.numpy import save_file

hidden, inner, heads, kv_heads, size, layers, vocab = 16, 32, 4, 2, 8, 2, 40
rng = np.random.default_rng(0)
shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
for i in range(layers):
    at = f"model.layers.{i}."
    shapes |= {
        at + "input_layernorm.weight": (hidden,),
        at + "post_attention_layernorm.weight": (hidden,),
        at + "self_attn.q_proj.weight": (heads * size, hidden),
        at + "self_attn.k_proj.weight": (kv_heads * size, hidden),
        at + "self_attn.v_proj.weight": (kv_heads * size, hidden),
        at + "self_attn.o_proj.weight": (hidden, heads * size),
        at + "mlp.gate_proj.weight": (inner, hidden),
        at + "mlp.up_proj.weight": (inner, hidden),
        at + "mlp.down_proj.weight": (hidden, inner),
    }
folder = pathlib.Path("tiny")
folder.mkdir()
save_file({k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}, folder / "model.safetensors")
(folder / "config.json").write_text(json.dumps({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
    "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
    "head_dim": size, "num_hidden_layers": layers, "vocab_size": vocab, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}))

from jpaged import LLM, SamplingParams

llm = LLM(folder, max_model_len=64, max_num_seqs=4, num_blocks=32, warm_up=False)
sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
first, second = llm.generate([[3, 4, 5], [7] * 20], sampling, use_tqdm=False)
assert first.prompt_token_ids == [3, 4, 5] and second.prompt_token_ids == [7] * 20
assert all(0 <= token < vocab for token in first.outputs[0].token_ids)
print(len(first.outputs[0].token_ids), len(second.outputs[0].token_ids), llm.stats().blocks.used)
"""


def test_generates_in_an_empty_folder(site: Path, tmp_path: Path) -> None:
    assert python(site, tmp_path, GENERATE).split() == ["5", "5", "0"]


def test_the_command_is_installed(root: Path, site: Path, tmp_path: Path) -> None:
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    environment = os.environ | {"PYTHONPATH": str(site)}
    for command in ([str(site / "bin" / "jpaged")], [sys.executable, "-m", "jpaged"]):
        assert run([*command, "version"], cwd=tmp_path, env=environment).split()[:2] == ["jpaged", version]


SAY_BACKENDS = """
import pallas_kernels
from pallas_kernels.cpu.library import require_library
print(pallas_kernels.available_backends(), pallas_kernels.describe_backend())
try:
    require_library()
except ValueError as error:
    print(error)
"""


def test_installs_and_runs_without_a_compiler(root: Path, tmp_path: Path) -> None:
    """The package goes without its native kernels, says so, and answers as before."""
    folders = [tmp_path / name for name in ("source", "out", "empty", "site", "home")]
    for folder in folders:
        folder.mkdir()
    source, out, empty, site, home = folders
    hidden = {"PATH": str(empty), "CC": "no-compiler-here", "CXX": "no-compiler-here"}
    wheel = build_wheel(root, source, out, os.environ | hidden)
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    run([sys.executable, *install, str(wheel)])
    said = python(site, home, SAY_BACKENDS)
    assert "('xla',) xla (cpu)" in said and "install a C++17 compiler" in said
    assert python(site, home, GENERATE).split() == ["5", "5", "0"]
