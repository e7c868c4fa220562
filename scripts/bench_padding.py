"""What padding costs: a step with few rows or tokens, in a program just large enough and in one made for many more.

    python scripts/bench_padding.py --dtype float32 bfloat16

SmolLM2-135M's shape with random weights, packed for the native CPU kernels; whole steps, with allocator and sampling.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from bench_tools import make_parser, print_table, save_json, take_turns
from jpaged_models import LoadedModel
from random_model import SMOLLM2_135M, random_model

from jpaged import EngineConfig, SamplingParams
from jpaged.memory import make_store
from jpaged.plan import pack_plan
from jpaged.request import Request
from jpaged.runner import Runner
from jpaged.schedule import PrefillChunk, Schedule

CONTEXT = 256  # tokens of a sequence that decodes
MOST_ROWS, MOST_TOKENS = 32, 512  # of the larger programs


def make_prompt(length: int) -> list[int]:
    return [3 + at % 64 for at in range(length)]


class Step:
    """The same step again and again: decoding so many sequences, or so many tokens of a prompt."""

    def __init__(self, loaded: LoadedModel, kind: str, count: int, rows: int, tokens: int) -> None:
        config = EngineConfig(
            num_blocks=1024,
            max_model_len=1024,
            block_size=16,
            max_num_seqs=rows,
            max_num_batched_tokens=tokens,
            decode_steps=1,
            free_padding=True,
        )
        self.runner = Runner(loaded, config, make_store(loaded, config, b""))
        requests = [
            Request(f"{slot}", make_prompt(CONTEXT), SamplingParams(temperature=0.0), 512, seed=0, slot=slot)
            for slot in range(count if kind == "decode" else 1)
        ]
        if kind == "decode":
            self._compute(requests, tokens)
            schedule = Schedule(decode=requests, decode_slots=np.arange(count, dtype=np.int32))
        else:
            one = Request("0", make_prompt(count + 1), SamplingParams(temperature=0.0), 512, seed=0, slot=0)
            schedule = Schedule(admit=[one], prefill=[PrefillChunk(one, 0, 0, count, last=True)])
        layout, self.program = self.runner.programs.pick(schedule)
        self.plan = pack_plan(schedule, layout)
        state = self.runner.state
        self.before = jax.tree.map(jnp.copy, (state.pool, state.tables, state.slots))

    def _compute(self, requests: list[Request], tokens: int) -> None:
        """Their prompts, a chunk a step."""
        for request in requests:
            for start in range(0, CONTEXT, tokens):
                size = min(tokens, CONTEXT - start)
                chunk = PrefillChunk(request, request.slot, start, size, last=start + size == CONTEXT)
                self.runner.dispatch(Schedule(admit=[] if start else [request], prefill=[chunk]))

    def __call__(self) -> jax.Array:
        pool, tables, slots = jax.tree.map(jnp.copy, self.before)
        state = self.runner.state._replace(pool=pool, tables=tables, slots=slots)
        self.runner.state, result, _ = self.program(self.runner.params, state, self.plan)
        return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--decode", type=int, nargs="+", default=[1, 8], help="sequences that decode (default: 1 8)")
    parser.add_argument("--mixed", type=int, nargs="+", default=[8, 32, 128], help="prompt tokens (default: 8 32 128)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=15, help="turns of two steps each (default: 15)")
    args = parser.parse_args()
    work = [("decode", count) for count in args.decode] + [("mixed", count) for count in args.mixed]
    rows = []
    for dtype in args.dtype:
        loaded = random_model(SMOLLM2_135M, dtype)
        for kind, count in work:
            fitting = (min(-(-count // 8) * 8, MOST_ROWS), max(-(-count // 8) * 8, 32))
            sizes = {"fitting": fitting, "large": (MOST_ROWS, MOST_TOKENS)}
            steps = {name: Step(loaded, kind, count, *size) for name, size in sizes.items()}
            times = take_turns(steps, args.repeats, calls=2)
            fits, large = (times[name] * 1e3 for name in sizes)
            at = 0 if kind == "decode" else 1  # what the program's size is counted in
            rows.append([kind, dtype, count, *(size[at] for size in sizes.values()), fits, large, large / fits])
    header = ["step", "dtype", "rows or tokens", "program for", "large one for", "ms", "large ms", "ratio"]
    print_table(header, rows)
    save_json(args.json, [dict(zip(header, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
