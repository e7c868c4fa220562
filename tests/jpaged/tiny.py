"""A tiny random model and tokenizer, and what it generates by a plain contiguous forward pass of one sequence."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jpaged_models import GenerationDefaults, LoadedModel, ModelConfig, Tokenizer, merge_params, param_shapes
from jpaged_models.decoder import Rotary
from jpaged_models.random_weights import TINY

from jpaged import Engine, EngineConfig, SamplingParams
from pallas_kernels import AttentionSpec, rotate

HF_CONFIG = TINY
# Of most tests' engines, so that their programs are the same: what one file has compiled another finds (conftest.py).
SIZES = dict(num_blocks=65, max_model_len=128, block_size=4, max_num_seqs=8, max_num_batched_tokens=32)
TEMPLATE = "{% for m in messages %}w1 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"


@functools.lru_cache
def tiny_model(dtype: str = "float32", seed: int = 0, window: int | None = None, layers: int = 2) -> LoadedModel:
    """Random weights, large enough that greedy outputs vary."""
    kind = "mistral" if window else "llama"
    config = ModelConfig.from_hf(
        {**HF_CONFIG, "model_type": kind, "sliding_window": window, "num_hidden_layers": layers}
    )
    graphdef, shapes = param_shapes(config, jnp.dtype(dtype))
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.ones(shape) if "norm" in name else rng.normal(size=shape) * (2.0 / np.sqrt(shape[-1]))

    params = {name: jnp.asarray(draw(name, s.shape), s.dtype) for name, s in shapes.items()}
    return LoadedModel(config, graphdef, params, None, GenerationDefaults(eos_token_ids=(2,)))


def word_tokenizer() -> Tokenizer:
    """One token a word: "w0" to "w96" are ids 0 to 96; "w2" is special."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["w2"])
    return Tokenizer(backend, {"eos_token": "w2"}, TEMPLATE)


def contiguous_attend(
    q: jax.Array, k: jax.Array, v: jax.Array, rotary: Rotary, cache: None, spec: AttentionSpec, layer: None
) -> tuple[jax.Array, None]:
    """Causal attention over one whole sequence, no cache: q [T,Hq,D], k and v [T,Hkv,D]."""
    q, k = rotate(q, rotary), rotate(k, rotary)
    group = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * spec.scale
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
    if spec.window is not None:
        causal &= ~jnp.tril(causal, -spec.window)
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, v, precision="highest"), None


@functools.lru_cache
def _forward(loaded_key: tuple[str, int, int | None], length: int):
    loaded = tiny_model(*loaded_key)

    def run(params: dict, tokens: jax.Array) -> jax.Array:
        model = merge_params(loaded.graphdef, params)
        hidden, _ = model(tokens, jnp.arange(length), None, contiguous_attend)
        return model.logits(hidden)

    return jax.jit(run)


def greedy_reference(
    prompt: list[int], count: int, *, ignore_eos: bool = True, seed: int = 0, window: int | None = None
) -> list[int]:
    """Greedy continuation computed without a cache, one whole forward pass a token (padded to one length)."""
    loaded, length = tiny_model(seed=seed, window=window), 128
    out: list[int] = []
    while len(out) < count:
        tokens = [*prompt, *out]
        padded = jnp.asarray(tokens + [0] * (length - len(tokens)))
        logits = _forward(("float32", seed, window), length)(loaded.params, padded)
        out.append(int(jnp.argmax(logits[len(tokens) - 1])))
        if out[-1] == 2 and not ignore_eos:
            break
    return out


def tiny_config(**changes) -> EngineConfig:
    return EngineConfig(**{**SIZES, **changes})


def tiny_engine(*, window: int | None = None, **changes) -> Engine:
    return Engine(tiny_model(window=window), tiny_config(window=window, **changes))


def run_all(engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    """Outputs in order; the engine must end empty."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    requests = [engine.add_request(f"r{i}", p, s) for i, (p, s) in enumerate(zip(prompts, each, strict=True))]
    finish(engine)
    return [request.output_token_ids for request in requests]


def finish(engine: Engine, limit: int = 5000) -> None:
    for _ in range(limit):
        if not engine.has_unfinished():
            assert engine.stats().blocks.used == 0
            return
        engine.step()
    raise AssertionError("the engine did not finish")


def make_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 97, int(rng.integers(1, longest + 1))).tolist() for _ in range(count)]


def preempt(engine: Engine, evict: int = 0) -> None:
    """A step before which the last sequence has to go, and as many cached blocks."""
    scheduler = engine.scheduler
    pick = scheduler._pick_decode

    def preempt_and_pick(plan):
        scheduler._preempt_last(plan)
        for _ in range(min(evict, scheduler.index.reclaimable)):
            scheduler.swapping.evict(plan)
        pick(plan)

    scheduler._pick_decode = preempt_and_pick
    try:
        engine.step()
    finally:
        del scheduler._pick_decode
