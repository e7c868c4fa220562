"""The parts of one step as programs of their own, each over all layers of a model with its real weights and pages.

T query tokens, R sequences, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jpaged_models import Decoder, LoadedModel, init_cache, merge_params
from jpaged_models.decoder import Block
from jpaged_models.layers import Linear, take_rows
from jpaged_models.paged import PagedBatch, read_cache, write_cache
from jpaged_models.rope import rotary_table

from jpaged.config import EngineConfig
from jpaged.control_rows import init_controls
from jpaged.controls import Controls, draw
from jpaged.memory import pick_kv_dtype
from jpaged.sampling import init_sampling


class Part(NamedTuple):
    """One part of a step."""

    run: Callable[[], Any]  # once; the result can be waited for
    bytes: int  # that must be read or written: weights, pages, activations
    flops: int  # a multiplication and an addition each


class StepShape(NamedTuple):
    """Sequences in a step."""

    queries: Sequence[int]  # tokens of each that are computed
    lengths: Sequence[int]  # tokens of each in the cache afterwards

    @property
    def tokens(self) -> int:
        return sum(self.queries)

    @property
    def decodes(self) -> bool:
        return all(count == 1 for count in self.queries)

    def seen(self, window: int | None) -> tuple[int, int]:
        """(tokens in pages that are read, pairs of a query and a key) of a layer with this window, or None."""
        read = pairs = 0
        for count, length in zip(self.queries, self.lengths, strict=True):
            each = [min(length - i, window or length) for i in range(count)]
            pairs += sum(each)
            read += min(length, each[-1] + count - 1)
        return read, pairs


def make_batch(shape: StepShape, block_size: int, *, seed: int = 0) -> tuple[PagedBatch, int]:
    """(batch with block tables in random order, blocks of a pool that holds it)."""
    columns = max(-(-length // block_size) for length in shape.lengths)
    rows = len(shape.lengths)
    ids = np.random.default_rng(seed).permutation(np.arange(1, rows * columns + 1)).reshape(rows, columns)
    owner = np.repeat(np.arange(rows), shape.queries)
    position = np.concatenate([np.arange(n - q, n) for q, n in zip(shape.queries, shape.lengths, strict=True)])
    slots = ids[owner, position // block_size] * block_size + position % block_size
    starts = np.concatenate([[0], np.cumsum(shape.queries)])
    batch = PagedBatch(
        block_tables=jnp.asarray(ids, jnp.int32),
        kv_lengths=jnp.asarray(shape.lengths, jnp.int32),
        write_slots=jnp.asarray(slots, jnp.int32),
        query_starts=None if shape.decodes else jnp.asarray(starts, jnp.int32),
        num_decode=None if shape.decodes else jnp.int32(0),
    )
    return batch, rows * columns + 1


def make_parts(loaded: LoadedModel, config: EngineConfig, shape: StepShape) -> dict[str, Part]:
    """Name -> part, in the order of a step. `loaded` is the engine's own model (packed, if it packs)."""
    c, params, dtype = loaded.config, loaded.params, loaded.dtype
    model = merge_params(loaded.graphdef, params)
    tokens, rows, item = shape.tokens, len(shape.queries), dtype.itemsize
    attended = c.num_heads * c.head_dim
    rng = np.random.default_rng(1)

    def values(*sizes: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(sizes), dtype)

    def program(part: Callable[[Decoder], Any]) -> Callable[[], Any]:
        run = jax.jit(lambda params: part(merge_params(loaded.graphdef, params)))
        return partial(run, params)

    def products(pick: Callable[[Block], list[tuple[Linear, int]]], part: Callable[[Decoder], Any]) -> Part:
        """Of all layers; `pick` gives a block's modules with the width of their inputs."""
        moved = flops = 0
        for block, layers in zip(model.layers, model.runs, strict=True):
            for each, width in pick(block):
                moved += each.weight[...].nbytes + layers * tokens * (each.features + width) * item
                flops += layers * 2 * tokens * each.rows * width
        return Part(program(part), moved, flops)

    x, seen, last = values(tokens, c.hidden_size), values(tokens, attended), values(rows, c.hidden_size)
    ids = jnp.asarray(rng.integers(0, c.vocab_size, tokens), jnp.int32)
    positions = jnp.asarray(np.concatenate([np.arange(n - m, n) for m, n in zip(*shape, strict=True)]), jnp.int32)
    head = model.embedding if model.head is None else model.head.weight

    def embed(model: Decoder) -> Any:
        rows = take_rows(model.embedding[...], ids, c.vocab_size, c.hidden_size, dtype)
        return rows, rotary_table(c.rope, c.head_dim, positions)

    write, attend = _attention_parts(loaded, config, shape, values, rotary_table(c.rope, c.head_dim, positions))
    return {
        "embed": Part(program(embed), 2 * tokens * c.hidden_size * item, 0),
        "qkv": products(
            lambda block: [(block.attention.qkv, c.hidden_size)],
            lambda m: [block.attention.qkv(x, norm=block.attention_norm, layer=at) for block, at in m.blocks()],
        ),
        "write": write,
        "attention": attend,
        "output": products(
            lambda block: [(block.attention.out, attended)],
            lambda m: [block.attention.out(seen, residual=x, layer=at) for block, at in m.blocks()],
        ),
        "mlp": products(
            lambda block: [(block.mlp.gate_up, c.hidden_size), (block.mlp.down, c.intermediate_size)],
            lambda m: [block.mlp(x, block.mlp_norm, None, at) for block, at in m.blocks()],
        ),
        "head": Part(
            program(lambda m: m.logits(m.norm(last))),
            head[...].nbytes + rows * c.vocab_size * 4,
            2 * rows * c.vocab_size * c.hidden_size,
        ),
        "sampling": _sampling_part(c.vocab_size, config, rows),
    }


def _attention_parts(
    loaded: LoadedModel, config: EngineConfig, shape: StepShape, values: Callable[..., jax.Array], rotary: Any
) -> tuple[Part, Part]:
    """Writing keys and values, and reading them, on one set of pages."""
    c, tokens, backend = loaded.config, shape.tokens, config.attention_backend
    batch, num_blocks = make_batch(shape, config.block_size)
    q, k, v = (values(tokens, heads, c.head_dim) for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads))
    specs = [block.attention.spec for block, _ in merge_params(loaded.graphdef, loaded.params).blocks()]
    pages = list(init_cache(c, num_blocks, config.block_size, pick_kv_dtype(loaded, config.kv_cache_dtype)))
    token_bytes = sum(array.nbytes for array in jax.tree.leaves(pages[0])) // (num_blocks * config.block_size)
    store = jax.jit(
        lambda pages: [write_cache(each, q, k, v, rotary, batch, backend) for each in pages], donate_argnums=0
    )
    read = jax.jit(
        lambda pages: [read_cache(each, q, batch, spec, backend) for each, spec in zip(pages, specs, strict=True)]
    )

    def write() -> Any:  # a call gives its pages away and gets others back
        stored = store(list(pages))
        pages[:] = [each for each, _ in stored]
        return stored

    spans = [shape.seen(spec.window) for spec in specs]
    return (
        Part(write, len(specs) * (tokens * token_bytes + 2 * q.nbytes + k.nbytes + v.nbytes), 0),
        Part(
            lambda: read(pages),
            sum(tokens for tokens, _ in spans) * token_bytes + len(specs) * 2 * q.nbytes,
            sum(4 * pairs * c.num_heads * c.head_dim for _, pairs in spans),
        ),
    )


def _sampling_part(vocab: int, config: EngineConfig, rows: int) -> Part:
    """Greedy drawing by the engine's own sampler."""
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((rows, vocab)), jnp.float32)
    controls = jax.tree.map(jnp.asarray, init_controls(vocab, config))
    sampling = init_sampling(rows)

    @jax.jit
    def run(logits: jax.Array, controls: Controls) -> jax.Array:
        none = jnp.zeros(rows, jnp.int32)
        return draw(logits, sampling, none, none, controls, jnp.arange(rows), config.logits_processor)

    return Part(lambda: run(logits, controls), 2 * logits.nbytes, 0)
