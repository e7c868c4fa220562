"""jpaged as one engine of a side-by-side benchmark: `.version`, and `.run(requests)` -> [(token ids, first token s)].

    python peers.py scripts/peers_adapter.py:Engine --model DIR --workload FILE.jsonl --dtype bfloat16

The harness passes its parsed arguments (model, dtype, max_batch, max_len, kv_tokens) and requests as dicts with
prompt_token_ids, max_tokens and ignore_eos; all are submitted at once.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import jax

from jpaged import LLM, SamplingParams


class Engine:
    """Greedy decoding of token-id prompts, at most args.max_batch sequences at once."""

    def __init__(self, args: argparse.Namespace) -> None:
        block_size = 16
        self.version = f"jpaged 0.1.0, jax {jax.__version__}"
        self.ids = itertools.count()
        self.llm = LLM(
            args.model,
            dtype=args.dtype,
            max_model_len=args.max_len,
            max_num_seqs=args.max_batch,
            max_num_batched_tokens=512,
            block_size=block_size,
            num_blocks=args.kv_tokens // block_size + 1,
            progress=False,
        )

    def run(self, requests: list[dict[str, Any]]) -> list[tuple[list[int], float | None]]:
        engine, start, first = self.llm.engine, time.perf_counter(), {}
        added = []
        for each in requests:
            params = SamplingParams(temperature=0.0, max_tokens=each["max_tokens"], ignore_eos=each["ignore_eos"])
            added.append(engine.add_request(str(next(self.ids)), each["prompt_token_ids"], params))
        while engine.has_unfinished():
            for request in engine.step():
                first.setdefault(request.request_id, time.perf_counter() - start)
        return [(request.output_token_ids, first.get(request.request_id)) for request in added]
