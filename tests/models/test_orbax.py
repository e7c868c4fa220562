"""Our own checkpoint: round trip, other dtypes, sharded restore, and damage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import model_support as support
import numpy as np
import pytest
from jpaged_models import CheckpointError, LoadedModel, load_model, save_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("hf")
    support.write_folder(folder, "qwen3")
    return load_model(folder)


@pytest.fixture
def saved(original: LoadedModel, tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "ours", original)
    return tmp_path / "ours"


def test_round_trip(original: LoadedModel, saved: Path) -> None:
    again = load_model(saved)
    assert (again.config, again.generation, again.graphdef) == (
        original.config,
        original.generation,
        original.graphdef,
    )
    assert again.params.keys() == original.params.keys()
    for name, array in again.params.items():
        assert array.dtype == original.params[name].dtype
        np.testing.assert_array_equal(array, original.params[name])
    rounded = load_model(saved, "bfloat16").params
    for name, array in rounded.items():
        np.testing.assert_array_equal(array, original.params[name].astype(jnp.bfloat16))


def test_tokenizer_travels_along(shared: Path, tmp_path: Path) -> None:
    loaded = load_model(shared / "models" / "stories260k", "bfloat16")
    save_checkpoint(tmp_path / "ours", loaded)
    again = load_model(tmp_path / "ours")
    assert again.params["embedding"].dtype == jnp.bfloat16
    assert again.tokenizer is not None and loaded.tokenizer is not None
    text = "Once upon a time, Zoë\nsaw 12 cats."
    assert again.tokenizer.encode(text) == loaded.tokenizer.encode(text)
    assert again.tokenizer.special_tokens == loaded.tokenizer.special_tokens
    assert again.tokenizer.eos_token_ids == (2,)


def test_refusals(original: LoadedModel, saved: Path) -> None:
    with pytest.raises(ValueError, match="already exists"):
        save_checkpoint(saved, original)
    manifest = saved / "jpaged.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"format": 1', '"format": 99'))
    with pytest.raises(CheckpointError, match="format 99 is not supported; allowed: 1"):
        load_model(saved)
    manifest.write_text(json.dumps({k: v for k, v in json.loads(text).items() if k != "config"}))
    with pytest.raises(CheckpointError, match=r"jpaged.json is damaged: 'config'"):
        load_model(saved)
    deeper = json.loads(text)
    deeper["config"] |= {"num_layers": 3, "vocab_size": 161}
    manifest.write_text(json.dumps(deeper))
    with pytest.raises(CheckpointError, match=r"missing: layers.2.*misshaped: embedding"):
        load_model(saved)


DAMAGED = """
import sys
from pathlib import Path
from jpaged_models import CheckpointError, load_model
data = sorted(Path(sys.argv[1]).joinpath("params").rglob("d/*"), key=lambda file: file.stat().st_size)
for some in (data[-1:], data[:-1]):
    for file in some:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    try:
        load_model(sys.argv[1])
    except CheckpointError as error:
        print(" ".join(str(error).split()))
"""


def test_damaged_arrays(saved: Path) -> None:
    # In a process of its own: when one array cannot be read, Orbax closes its event loop while it still reads others,
    # and these complain of it whenever they are done, in some other test.
    done = subprocess.run([sys.executable, "-c", DAMAGED, str(saved)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    array, every = done.stdout.splitlines()
    assert f"{saved / 'params'} is damaged: " in array and "read" in array
    assert every == f"{saved / 'params'} is damaged or not there: the list of arrays cannot be read"


SPLIT = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
from jpaged_models import load_model, save_checkpoint
hf, ours = sys.argv[1:]
plain = load_model(hf)
save_checkpoint(ours, plain)
expected = plain.split(2)
for path in (hf, ours):
    loaded = load_model(path, tensor_parallel_size=2)
    assert loaded.graphdef == expected.graphdef and loaded.split(2) is loaded
    for name, x in loaded.params.items():
        assert x.sharding == expected.params[name].sharding, (path, name, x.sharding)
        np.testing.assert_array_equal(x, expected.params[name])
    shard = loaded.params["layers.0.mlp.gate_up.weight"].addressable_shards[1].data
    assert shard.shape == (2 * 112 // 2, 64)
try:
    save_checkpoint(ours + "2", loaded)
except ValueError as error:
    print(error)
"""


def test_a_model_is_loaded_in_parts(tmp_path: Path) -> None:
    support.write_folder(tmp_path / "hf")
    arguments = [sys.executable, "-c", SPLIT, str(tmp_path / "hf"), str(tmp_path / "ours")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "a model that is divided among devices cannot be saved: load it on one\n"
