"""What engines of several virtual CPU devices answer: printed as JSON by a process of its own, for test_parallel.py.

JAX counts its devices once, when it is first used, and all other tests are to have one.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jpaged_models import GenerationDefaults, LoadedModel, ModelConfig, param_shapes
from tiny import HF_CONFIG, make_prompts

from jpaged import BeamSearchParams, Engine, EngineConfig, SamplingParams
from jpaged.embedding import Embedder
from jpaged.memory import block_bytes

# All that a model can have that is divided in a way of its own: four KV heads, biases, a head beside the embedding, a
# vocabulary (97) that no number of devices divides. The memory is too short for the prompts: sequences are swapped.
HF = {**HF_CONFIG, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": False}
HF |= {"attention_bias": True, "mlp_bias": True}
WINDOW = 24
SIZES = dict(num_blocks=24, max_model_len=128, block_size=4, max_num_seqs=8, max_num_batched_tokens=32)
SIZES |= dict(watermark=0.0, preemption="swap", linear_backend="xla", kv_cache_dtype="int8", window=WINDOW)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
# Cached blocks that the device has no room for go to host memory, and from there to files.
TIERS = SIZES | dict(num_blocks=34, preemption="recompute", kv_cache_dtype="fp8", window=None)
HOST_BLOCKS = 12
THREE = SamplingParams(temperature=1.0, top_k=20, max_tokens=9, ignore_eos=True, n=3, seed=5, logprobs=2)


def make_model(window: int | None = WINDOW) -> LoadedModel:
    config = dataclasses.replace(ModelConfig.from_hf(HF), windows=(window, window))
    graphdef, shapes = param_shapes(config, jnp.dtype("float32"))
    rng = np.random.default_rng(0)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.ones(shape) if "norm" in name else rng.normal(size=shape) * (2.0 / np.sqrt(shape[-1]))

    params = {name: jnp.asarray(draw(name, s.shape), s.dtype) for name, s in shapes.items()}
    return LoadedModel(config, graphdef, params, None, GenerationDefaults(eos_token_ids=(2,)))


def answer(engine: Engine) -> dict[str, Any]:
    """Outputs of prompts that begin alike, of three samples each, and of beams; and what the engine did for them."""
    prompts = make_prompts(8, 40)
    prompts[3:6] = [list(range(40, 62)) + prompt[:5] for prompt in prompts[3:6]]
    plain = [engine.add_request(f"p{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    samples = [engine.add_request(f"s{i}", prompt[:9], THREE) for i, prompt in enumerate(prompts[:2])]
    beams = BeamSearchParams(beam_width=3, max_tokens=8)
    searched = [engine.add_request("b", prompts[6][:10], beams=beams)]
    while engine.has_unfinished():
        engine.step()
    engine.audit()
    stats = engine.stats()
    assert stats.blocks.used == 0
    return {
        "greedy": [request.output_token_ids for request in plain],
        "samples": [[each.output_token_ids for each in request.group] for request in samples],
        "beams": [[each.beam.tokens() for each in request.beams.finished] for request in searched],
        "hits": stats.prefix_cache.hit_tokens > 0,
        "restored": stats.swap.restored_blocks > 0,
        "shared": stats.sharing_saving > 0,
        "stats": [stats.tensor_parallel_size, stats.linear_backend],
    }


def observe(engine: Engine, count: list[str]) -> dict[str, Any]:
    """`answer`, with what must hold of the device: nothing compiled, and the pool still where it was."""

    def places() -> list[int]:
        pools = jax.tree.leaves(engine.runner.state.cache)
        return [shard.data.unsafe_buffer_pointer() for pool in pools for shard in pool.addressable_shards]

    engine.runner.warm_up()
    before, compiled = places(), len(count)
    found = answer(engine)
    pool = engine.runner.state.cache[0].k
    return {
        **found,
        "compiled": count[compiled:],
        "moved": sum(a != b for a, b in zip(before, places(), strict=True)),
        "part": list(pool.addressable_shards[0].data.shape),
        "devices": len(pool.sharding.device_set),
    }


def use_tiers(model: LoadedModel, devices: int, folder: str) -> dict[str, Any]:
    """Outputs of prompts that are asked for twice, the second time with blocks from host memory and files; then by an
    engine of its own, which finds nothing but the files."""
    block = block_bytes(model.config, TIERS["block_size"], "fp8", devices)
    sizes = dict(TIERS, tensor_parallel_size=devices, prefix_cache_dir=folder)
    prompts = make_prompts(6, 40)
    found: dict[str, Any] = {"tokens": [], "restored": []}

    def ask(engine: Engine) -> None:
        requests = [engine.add_request(f"p{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
        while engine.has_unfinished():
            engine.step()
        engine.audit()
        found["tokens"].append([request.output_token_ids for request in requests])
        found["restored"].append(engine.stats().prefix_cache.restored_tokens)

    engine = Engine(model, EngineConfig(**sizes, prefix_cache_host_bytes=HOST_BLOCKS * block))
    ask(engine)
    ask(engine)
    stats = engine.stats()
    found["on the host"] = stats.swap.host_blocks
    found["files"] = engine.save_prefix_cache()
    found["stored as"] = str(engine.runner.state.cache[0].k.dtype)
    again = Engine(model, EngineConfig(**sizes))
    ask(again)
    found["read"] = again.stats().prefix_cache.disk_reads
    found["full blocks"] = sum((len(prompt) - 1) // TIERS["block_size"] for prompt in prompts)
    return found


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_compilation_cache", False)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
    )
    found: dict[str, Any] = {}
    model = make_model()
    for devices in (1, 2, 4, 8):
        engine = Engine(model, EngineConfig(**SIZES, tensor_parallel_size=devices))
        found[str(devices)] = observe(engine, compiled) if devices == 4 else answer(engine)
        if devices in (1, 4):
            found[str(devices)]["embedding"] = Embedder(engine, "mean").embed(list(range(3, 40))).tolist()
    whole = make_model(window=None)
    for devices in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            found[str(devices)]["tiers"] = use_tiers(whole, devices, folder)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
