"""Time the sampler on its own, for each kind of request, beside XLA's argmax over the same logits.

    python scripts/bench_sampling.py [--rows 32] [--vocab 49152] [--repeats 50] [--json FILE]

Logits follow a power law over the ranks, like a language model's: "peaked" ones whose top-p 0.9 set has a few
to a few dozen tokens, and "mixed" ones where some rows need thousands.
"""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
import numpy as np
from bench_tools import make_parser, print_table, save_json, time_calls

from jpaged.sampling import SamplingState, filtered_weights, sample, seed_words

KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "random": {},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "top_k 500": {"top_k": 500},
}
SLOPES = {"peaked": (1.6, 3.0), "mixed": (0.9, 2.5)}


def make_logits(rows: int, vocab: int, slopes: tuple[float, float]) -> jax.Array:
    rng = np.random.default_rng(0)
    slope = np.linspace(*slopes, rows)[:, None]
    logits = -slope * np.log(np.arange(vocab) + 2.0) + rng.normal(size=(rows, vocab)) * 0.5
    return jnp.asarray(rng.permuted(logits, axis=1), jnp.float32)


def make_state(rows: int, *, temperature: float = 1.0, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0):
    return SamplingState(
        temperature=jnp.full(rows, temperature, jnp.float32),
        top_k=jnp.full(rows, int(top_k), jnp.int32),
        top_p=jnp.full(rows, top_p, jnp.float32),
        min_p=jnp.full(rows, min_p, jnp.float32),
        seed=jnp.asarray(np.stack([seed_words(seed) for seed in range(rows)])),
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()

    position = jnp.arange(args.rows, dtype=jnp.int32)
    argmax, run = jax.jit(lambda logits, *_: jnp.argmax(logits, axis=1)), jax.jit(sample)
    rows = []
    print(f"{args.rows} rows x {args.vocab} logits, on {jax.default_backend()}")
    for shape, slopes in SLOPES.items():
        logits = make_logits(args.rows, args.vocab, slopes)
        kept = (filtered_weights(logits, make_state(args.rows, top_p=0.9)) > 0).sum(axis=1)
        print(f"{shape}: the top-p 0.9 set has {int(kept.min())} to {int(kept.max())} tokens")
        for kind, params in {"argmax": {}, **KINDS}.items():
            program, state = argmax if kind == "argmax" else run, make_state(args.rows, **params)
            times = time_calls(program, args.repeats, lambda logits=logits, state=state: (logits, state, position))
            rows.append((shape, kind, 1e3 * statistics.median(times), 1e3 * min(times)))
    header = ("logits", "kind", "median ms", "least ms")
    print_table(header, rows)
    save_json(args.json, [dict(zip(header, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
