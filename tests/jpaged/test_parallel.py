"""Tensor parallelism: the same tokens on several devices as on one, and what cannot be divided is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jpaged_models import ModelConfig, check_split
from jpaged_models.split import DIVIDED, order_rows, repeat_kv_heads
from tiny import HF_CONFIG, tiny_config, tiny_model

from jpaged import LLM, EngineConfig
from jpaged.memory import block_bytes

LLAMA = ModelConfig.from_hf({**HF_CONFIG, "num_attention_heads": 8, "head_dim": 8})  # two KV heads, 48 wide, 97 tokens


@pytest.fixture(scope="module")
def answers(quick_flags: str) -> dict[str, dict]:
    """Of engines in a process with eight virtual devices."""
    here = Path(__file__).parent
    paths = [str(here), *filter(None, sys.path)]
    environment = {**os.environ, "XLA_FLAGS": quick_flags, "PYTHONPATH": os.pathsep.join(paths)}
    script = [sys.executable, str(here / "parallel_engines.py")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_same_tokens_as_on_one_device(answers: dict[str, dict], devices: int) -> None:
    """With int8 pages, windows, prefixes shared, blocks copied on write, beams, swapping; eight share four KV heads."""
    one, several = answers["1"], answers[str(devices)]
    for what in ("greedy", "samples", "beams"):
        assert several[what] == one[what], what
    assert several["hits"] and several["restored"] and several["shared"], several
    assert several["stats"] == [devices, "xla"] and one["stats"] == [1, "xla"]


def test_programs_of_several_devices(answers: dict[str, dict]) -> None:
    """After warm-up nothing compiles, and every device updates its part of the pool where it lies."""
    four = answers["4"]
    assert four["compiled"] == []
    assert (four["moved"], four["devices"]) == (0, 4)
    assert four["part"] == [24, 1, 4, 8]


def test_fp8_pages_from_the_host_and_from_files(answers: dict[str, dict]) -> None:
    """Each device has half of every block, and the host all of it: the same tokens with blocks that were away."""
    one, two = (answers[n]["tiers"] for n in "12")
    assert one["stored as"] == two["stored as"] == "uint8"  # the bits of float8_e4m3fn
    for found in (one, two):
        assert found["tokens"] == [one["tokens"][0]] * 3
        first, second, by_files = found["restored"]
        assert first < second and by_files == 4 * found["full blocks"]
        assert found["on the host"] == 12 and found["read"] > 0 and found["files"] >= found["full blocks"]


def test_embeddings_of_several_devices(answers: dict[str, dict]) -> None:
    one, four = (np.array(answers[n]["embedding"]) for n in "14")
    assert np.linalg.norm(four - one) < 1e-5


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_every_device_gets_its_rows(devices: int) -> None:
    """Rows are numbered: a device's part holds its query heads, then the KV heads that those read."""
    size, queries = LLAMA.head_dim, 8 // devices
    rows = np.arange(12 * size, dtype=np.float32)[:, None]  # eight query heads, two of k, two of v
    parts = np.split(order_rows("layers.0.attention.qkv.weight", rows, LLAMA, devices)[:, 0], devices)
    for device, part in enumerate(parts):
        heads = (part.reshape(-1, size)[:, 0] / size).astype(int).tolist()
        own = list(range(device * queries, (device + 1) * queries))
        read = sorted({head // 4 for head in own})  # of two KV heads, each has four query heads
        assert heads == [*own, *(8 + head for head in read), *(10 + head for head in read)]
        assert np.array_equal(part, np.concatenate([np.arange(head * size, (head + 1) * size) for head in heads]))
    wide = order_rows("layers.0.mlp.gate_up.bias", np.arange(96), LLAMA, devices)
    for device, part in enumerate(np.split(wide, devices)):
        own = np.arange(device * 48 // devices, (device + 1) * 48 // devices)
        assert np.array_equal(part, [*own, *(48 + own)])
    table = order_rows("embedding", np.ones((97, 3)), LLAMA, devices)
    assert len(table) % devices == 0 and table.sum() == 97 * 3
    untouched = np.ones((4, 4))
    assert order_rows("layers.0.mlp.down.weight", untouched, LLAMA, devices) is untouched


def test_every_parameter_that_is_divided_is_known() -> None:
    """No matrix is kept whole by every device for want of an entry."""
    names = {name for name, array in tiny_model().params.items() if array.ndim == 2}
    assert {".".join(name.split(".")[-2:]) for name in names} <= set(DIVIDED)


def test_kv_heads_are_repeated_in_the_pool_too() -> None:
    one = block_bytes(LLAMA, 4, "float32")
    assert [block_bytes(LLAMA, 4, "float32", n) // one for n in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert repeat_kv_heads(LLAMA, 8).num_kv_heads == 8


def test_refusals() -> None:
    sizes = dict(max_model_len=64, num_blocks=32, warm_up=False)
    heads = "tensor_parallel_size=3 does not divide this model: its 4 attention heads and feed-forward size 48 must"
    with pytest.raises(
        ValueError, match=f"{heads} be .* its 2 key/value heads a multiple or a divisor; allowed: 1, 2, 4"
    ):
        LLM(tiny_model(), tensor_parallel_size=3, **sizes)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2 needs as many devices, and there are 1 of .*'cpu'"):
        LLM(tiny_model(), tensor_parallel_size=2, **sizes)
    for wrong in (0, True, "2"):
        with pytest.raises(ValueError, match="tensor_parallel_size must be an integer of at least 1"):
            tiny_config(tensor_parallel_size=wrong)
        with pytest.raises(ValueError, match="tensor_parallel_size must be an integer of at least 1"):
            LLM(tiny_model(), tensor_parallel_size=wrong, **sizes)
    with pytest.raises(ValueError, match=r"linear_backend 'cpu' cannot divide a model among 2 devices"):
        LLM(tiny_model(), tensor_parallel_size=2, linear_backend="cpu", **sizes)
    with pytest.raises(ValueError, match="quantization 'int8' needs products by the native CPU kernels"):
        LLM(tiny_model(), tensor_parallel_size=2, quantization="int8", **sizes)
    three = ModelConfig.from_hf({**HF_CONFIG, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8})
    with pytest.raises(ValueError, match="allowed: 1, 3, 6, 12"):
        check_split(three, 4)
    assert EngineConfig(num_blocks=33, max_model_len=128, block_size=4).tensor_parallel_size == 1
