"""`jpaged bench step`: parts of a step, what they move and compute, and the report."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jpaged_models import pack_model
from tiny import tiny_config, tiny_model

from jpaged import LLM, cli
from jpaged.bench import step
from jpaged.bench.parts import StepShape, make_batch, make_parts
from jpaged.bench.step import format_steps, measure_limits, time_decode, time_parts
from pallas_kernels import available_backends
from pallas_kernels.batch import check_batch

SHAPE = StepShape([1, 1, 1], [9, 30, 17])
PREFILL = StepShape([11, 5], [20, 5])


def test_what_a_shape_reads() -> None:
    for shape in (SHAPE, PREFILL):
        for window in (None, 4, 100):
            keys: list[set[tuple[int, int]]] = []
            for sequence, (count, length) in enumerate(zip(*shape, strict=True)):
                for position in range(length - count, length):
                    first = 0 if window is None else max(0, position - window + 1)
                    keys.append({(sequence, key) for key in range(first, position + 1)})
            assert shape.seen(window) == (len(set().union(*keys)), sum(map(len, keys)))


def test_batches_are_in_order() -> None:
    for shape in (SHAPE, PREFILL):
        batch, blocks = make_batch(shape, 4)
        check_batch(batch, blocks, 4)
        assert (batch.query_starts is None) == (shape is SHAPE)


def test_parts_cover_the_weights_and_run() -> None:
    loaded = pack_model(tiny_model()) if "cpu" in available_backends() else tiny_model()
    parts = make_parts(loaded, tiny_config(), SHAPE)
    c, rows, layers = loaded.config, 3, loaded.config.num_layers
    names = ["embed", "qkv", "write", "attention", "output", "mlp", "head", "sampling"]
    assert list(parts) == names
    matrices = sum(array.nbytes for name, array in loaded.params.items() if "norm" not in name)
    products = sum(parts[name].bytes for name in ("qkv", "output", "mlp", "head"))
    activations = (
        4
        * rows
        * (layers * (c.hidden_size + 64 + 32 + c.hidden_size + 32 + c.intermediate_size + c.intermediate_size + 32))
    )
    assert products == matrices + activations + 4 * rows * c.vocab_size
    assert parts["attention"].flops == layers * 4 * sum(SHAPE.lengths) * c.num_heads * c.head_dim
    assert parts["qkv"].flops == layers * 2 * rows * c.hidden_size * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    found = {"decode_seconds": 1.0, "prefill_seconds": 2.0, "host_seconds": 0.001, "decode_parts": time_parts(parts, 1)}
    options = argparse.Namespace(batch_size=3, context_len=20, input_len=16)
    report = format_steps(found | measure_limits(loaded, 1 << 20), options).splitlines()
    assert [line.split()[0] for line in report[2:10]] == names
    assert report[0] == "decode step, 3 sequences of 20 tokens: 1000.00 ms"
    assert report[11] == "prefill step, 16 tokens: 2000.00 ms"
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(parts["attention"].run()))


def test_a_decode_step_is_timed_where_all_decode() -> None:
    llm = LLM(tiny_model(), max_model_len=96, max_num_seqs=4, num_blocks=33, warm_up=False, progress=False)
    assert 0 < time_decode(llm, [[5, 6, 7]] * 4) < 60
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize("limit", ["--max-num-batched-tokens", "--max-num-seqs", "--max-model-len"])
def test_steps_larger_than_the_engine_takes_are_refused(limit: str, monkeypatch, capsys) -> None:
    """What the user says counts; nothing is raised behind his back."""

    def make(model: str, **given: int) -> SimpleNamespace:
        del given["enable_prefix_caching"]
        return SimpleNamespace(config=SimpleNamespace(**given))

    monkeypatch.setattr(step, "LLM", make)
    sizes = ["--batch-size", "40", "--context-len", "100", "--input-len", "64"]
    assert cli.main(["bench", "step", "--model", "m", *sizes, limit, "39"]) == 1
    assert f"{limit[2:].replace('-', '_')} 39" in capsys.readouterr().err.replace("is 39", "39")
