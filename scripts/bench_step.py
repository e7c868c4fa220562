"""A whole decode step with paged KV beside the same decoder with contiguous KV, in turns.

    python scripts/bench_step.py --batch 8 32 --context 256 --dtype float32 bfloat16

Both run the same Flax decoder, head and argmax at SmolLM2-135M's shape with random weights. Contiguous KV is one
[batch, kv_heads, context, head_dim] buffer for K and for V in each layer, exactly as long as the context, so it wastes
nothing and masks nothing but the tail: the best case for it. Paged KV has shuffled tables and the engine's whole
step, allocator and sampling included.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_tools import make_parser, print_table, save_json, take_turns
from jax import lax
from jpaged_models import LoadedModel, merge_params
from random_model import SMOLLM2_135M, random_model

from jpaged import EngineConfig
from jpaged.config import KV_CACHE_DTYPES
from jpaged.memory import make_store
from jpaged.plan import HEADER
from jpaged.runner import Runner
from pallas_kernels import AttentionSpec, rotate


def contiguous_attend(lengths: jax.Array) -> Any:
    """Attention over contiguous K and V [R, Hkv, L, D], one query row a sequence; lengths i32[R] with the new token."""

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, rotary: Any, cache: Any, spec: AttentionSpec, layer: None
    ) -> tuple[jax.Array, Any]:
        q, k = rotate(q, rotary), rotate(k, rotary)
        rows, heads, size, dim = cache[0].shape
        place = jax.vmap(lambda buffer, new, at: lax.dynamic_update_slice(buffer, new[:, None], (0, at, 0)))
        cache = tuple(
            place(buffer, lax.bitcast_convert_type(new, buffer.dtype), lengths - 1)
            for buffer, new in zip(cache, (k, v), strict=True)
        )
        keys, values = (lax.bitcast_convert_type(buffer, k.dtype) for buffer in cache)
        grouped = q.reshape(rows, heads, -1, dim)
        scores = jnp.einsum("rhgd,rhld->rhgl", grouped, keys, preferred_element_type=jnp.float32) * spec.scale
        live = jnp.arange(size) < lengths[:, None, None, None]
        weights = jax.nn.softmax(jnp.where(live, scores, -jnp.inf), axis=-1).astype(values.dtype)
        seen = jnp.einsum("rhgl,rhld->rhgd", weights, values, preferred_element_type=jnp.float32)
        return seen.reshape(q.shape).astype(q.dtype), cache

    return attend


class Contiguous:
    """A greedy decode step over contiguous KV, donated like the engine's."""

    def __init__(self, loaded: LoadedModel, batch: int, context: int, dtype: jnp.dtype) -> None:
        c = loaded.config
        shape = (batch, c.num_kv_heads, context, c.head_dim)
        # bfloat16 as bits, as in the paged pool: XLA:CPU would convert the whole buffer to update it.
        bits = jnp.dtype(jnp.uint16) if dtype == jnp.bfloat16 else dtype
        self.cache = tuple((jnp.zeros(shape, bits), jnp.zeros(shape, bits)) for _ in range(c.num_layers))
        self.tokens = jnp.zeros(batch, jnp.int32)
        self.lengths = jnp.full(batch, context - 1, jnp.int32)
        self.params = loaded.params

        @functools.partial(jax.jit, donate_argnums=1)
        def step(params: dict, cache: Any, tokens: jax.Array, lengths: jax.Array) -> tuple[Any, jax.Array]:
            model = merge_params(loaded.graphdef, params)
            hidden, cache = model(tokens, lengths - 1, cache, contiguous_attend(lengths))
            return cache, jnp.argmax(model.logits(hidden), axis=1)

        self.step = step

    def __call__(self) -> jax.Array:
        self.cache, tokens = self.step(self.params, self.cache, self.tokens, self.lengths)
        return tokens


class Paged:
    """The engine's decode program, one iteration a call, over sequences held at one length."""

    def __init__(self, loaded: LoadedModel, batch: int, context: int, block_size: int, kv_dtype: str) -> None:
        per_seq = -(-context // block_size)
        config = EngineConfig(
            num_blocks=batch * per_seq + 1,
            max_model_len=context,
            block_size=block_size,
            max_num_seqs=batch,
            max_num_batched_tokens=max(batch, 32),
            decode_steps=1,
            kv_cache_dtype=kv_dtype,
        )
        self.runner = Runner(loaded, config, make_store(loaded, config, b""))
        self.layout, self.program = self.runner.programs.decode[config.decode_buckets[-1]]
        ids = np.random.default_rng(0).permutation(np.arange(1, config.num_blocks))
        blocks = jnp.asarray(ids.reshape(batch, per_seq), jnp.int32)
        refcount = jnp.ones(config.num_blocks, jnp.int32).at[0].set(0)
        state = self.runner.state
        self.tables = state.tables._replace(blocks=blocks, length=jnp.full(batch, context - 1, jnp.int32))
        pool = state.pool._replace(num_free=jnp.int32(0), refcount=refcount)
        self.runner.state = state._replace(pool=pool, slots=state.slots._replace(left=jnp.full(batch, 1 << 30)))
        plan = np.zeros(self.layout.size, np.int32)
        plan[:HEADER] = (batch, batch, batch, 1, 0)
        slots_at = self.layout.size - self.layout.rows
        plan[slots_at:] = np.minimum(np.arange(self.layout.rows), batch)
        self.plan = plan

    def __call__(self) -> jax.Array:
        # The tables are put back each time: every call decodes the last position of the same context.
        tables = jax.tree.map(jnp.copy, self.tables)
        state = self.runner.state._replace(tables=tables)
        self.runner.state, result, _ = self.program(self.runner.params, state, self.plan)
        return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32], help="sequences (default: 8 32)")
    parser.add_argument("--context", type=int, nargs="+", default=[256], help="tokens of each (default: 256)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="of the paged KV")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=30, help="layers of the model (default: 30, as SmolLM2-135M)")
    parser.add_argument("--repeats", type=int, default=15, help="turns of four steps each (default: 15)")
    args = parser.parse_args()
    rows = []
    for name in args.dtype:
        dtype = jnp.dtype(name)
        loaded = random_model({**SMOLLM2_135M, "num_hidden_layers": args.layers}, name)
        for batch in args.batch:
            for context in args.context:
                times = take_turns(
                    {
                        "contiguous": Contiguous(loaded, batch, context, dtype),
                        "paged": Paged(loaded, batch, context, args.block_size, args.kv_cache_dtype),
                    },
                    args.repeats,
                    calls=4,
                )
                paged, contiguous = times["paged"] * 1e3, times["contiguous"] * 1e3
                rows.append([name, batch, context, contiguous, paged, paged / contiguous])
    header = ["dtype", "batch", "context", "contiguous ms", "paged ms", "paged / contiguous"]
    print_table(header, rows)
    save_json(args.json, [dict(zip(header, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
