"""Time what happens to a step's logits, for each kind of request, beside XLA's argmax over the same logits.

    python scripts/bench_sampling.py [--rows 64] [--vocab 49152] [--hidden 576] [--repeats 30] [--only TEXT] [--json F]

Every row of the batch asks for the same. Logits follow a power law over the ranks, like a language model's, from
peaked to nearly flat. The last lines are what a decode loop does after its layers, the product with the head (random
hidden states of the given size) and the drawing, STEPS times in one program: greedy by a program that can do nothing
else, and by the one that can do all of this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_tools import make_parser, print_table, save_json, take_turns
from jax import lax
from jpaged_models import pick_linear_backend
from jpaged_models.layers import multiply_head

from jpaged import EngineConfig, SamplingParams
from jpaged.control_rows import find_features, make_row
from jpaged.controls import Controls, draw
from jpaged.features import Feature
from jpaged.logprobs import record_size, record_tokens
from jpaged.request import Request
from jpaged.sampling import SamplingState, sample, seed_words
from pallas_kernels.cpu.linear import pack_weight

STEPS = 8  # of the decode loop
BIASED = dict.fromkeys(range(100, 400), 0.5)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "greedy, logit_bias of 300": {"temperature": 0.0, "logit_bias": BIASED},
    "greedy, min_tokens": {"temperature": 0.0, "min_tokens": 1000, "max_tokens": None},
    "greedy, allowed_token_ids": {"temperature": 0.0, "allowed_token_ids": tuple(range(1000))},
    "greedy, bad_words": {"temperature": 0.0, "bad_words": ("word",)},
    "greedy, logprobs 0 to 20": {"temperature": 0.0, "logprobs": 20},
    "all of these, top_k 50": {
        "top_k": 50,
        "repetition_penalty": 1.2,
        "logit_bias": BIASED,
        "allowed_token_ids": tuple(range(20_000)),
        "bad_words": ("word",),
        "logprobs": 20,
    },
}
WORDS = [(5, 6), (7, 8, 9), (10,)]
PROMPT, OUTPUT = list(range(200)), list(range(150, 350))


def make_logits(rows: int, vocab: int) -> jax.Array:
    rng = np.random.default_rng(0)
    slope = np.linspace(0.9, 3.0, rows)[:, None]
    logits = -slope * np.log(np.arange(vocab) + 2.0) + rng.normal(size=(rows, vocab)) * 0.5
    return jnp.asarray(rng.permuted(logits, axis=1), jnp.float32)


def make_batch(params: SamplingParams, rows: int, vocab: int, config: EngineConfig) -> tuple[Any, ...]:
    """(sampling state, features, position, controls, slots) of rows that all ask for `params`."""
    words = WORDS if params.bad_words else []
    request = Request("r", PROMPT, params, 1000, 0, frozenset({2}), bad_word_ids=words, output_token_ids=OUTPUT)
    request.features = find_features(request)
    controls = Controls(*(jnp.stack([jnp.asarray(each)] * rows) for each in make_row(request, vocab, config)))
    sampling = SamplingState(
        temperature=jnp.full(rows, params.temperature, jnp.float32),
        top_k=jnp.full(rows, params.top_k, jnp.int32),
        top_p=jnp.full(rows, params.top_p, jnp.float32),
        min_p=jnp.full(rows, params.min_p, jnp.float32),
        seed=jnp.asarray(np.stack([seed_words(seed) for seed in range(rows)])),
    )
    position = jnp.full(rows, len(PROMPT) + len(OUTPUT), jnp.int32)
    return sampling, jnp.full(rows, request.features, jnp.int32), position, controls, jnp.arange(rows)


def finish_step(
    logits: jax.Array,
    sampling: SamplingState,
    features: jax.Array,
    position: jax.Array,
    controls: Controls,
    slots: jax.Array,
    *,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Tokens and records of log-probabilities: what a step does with its logits."""
    tokens = draw(logits, sampling, features, position, controls, slots, None)
    records = jnp.zeros((1, logits.shape[0], size), jnp.int32)
    return tokens, record_tokens(records, jnp.int32(0), (features & Feature.LOGPROBS) != 0, logits, tokens)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", default="", metavar="TEXT", help="lines with this in their name, and greedy")
    args = parser.parse_args()

    config = EngineConfig(num_blocks=200, max_model_len=2048, max_num_seqs=args.rows)
    logits = make_logits(args.rows, args.vocab)
    finish = functools.partial(finish_step, size=record_size(config.max_logprobs, args.vocab))
    run = jax.jit(finish)

    def argmax(logits: jax.Array) -> jax.Array:
        return jnp.argmax(logits, axis=1)

    batches = {
        kind: make_batch(SamplingParams(**params), args.rows, args.vocab, config) for kind, params in KINDS.items()
    }
    runs = {"argmax alone": functools.partial(jax.jit(argmax), logits)}
    runs |= {kind: functools.partial(run, logits, *batch) for kind, batch in batches.items()}
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(args.rows, args.hidden)), jnp.bfloat16)
    head = np.asarray(rng.normal(size=(args.vocab, args.hidden)) * 0.05, jnp.bfloat16)
    weight = jnp.asarray(pack_weight(head) if pick_linear_backend("auto") == "cpu" else head)

    def loop(draw_tokens: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """A program of STEPS heads and drawings, each of the hidden states of other rows."""

        def iterate(hidden: jax.Array, head: jax.Array, *batch: jax.Array) -> jax.Array:
            def step(i: jax.Array, tokens: jax.Array) -> jax.Array:
                logits = multiply_head(jnp.roll(hidden, i, axis=0), head, args.vocab, None)
                return tokens + draw_tokens(logits, *batch)

            return lax.fori_loop(0, STEPS, step, jnp.zeros(args.rows, jnp.int32))

        return jax.jit(iterate)

    def draw_any(logits: jax.Array, *batch: jax.Array) -> jax.Array:
        tokens, records = finish(logits, *batch)
        return tokens + records.sum()

    sampling, _, position, *_ = greedy = batches["greedy"]
    runs["head, greedy, nothing else possible"] = functools.partial(loop(sample), hidden, weight, sampling, position)
    runs["head, greedy"] = functools.partial(loop(draw_any), hidden, weight, *greedy)
    chosen = {name: run for name, run in runs.items() if args.only in name or name == "greedy"}
    times = take_turns(chosen, args.repeats)
    times = {name: seconds / (STEPS if name.startswith("head") else 1) for name, seconds in times.items()}
    table = [(kind, 1e3 * seconds, 1e3 * (seconds - times["greedy"])) for kind, seconds in times.items()]
    print(f"{args.rows} rows x {args.vocab} logits, on {jax.default_backend()}")
    header = ("every row asks for", "ms", "ms over greedy")
    print_table(header, table)
    save_json(args.json, [dict(zip(header, row, strict=True)) for row in table])


if __name__ == "__main__":
    main()
