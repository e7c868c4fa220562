#!/usr/bin/env python3
"""Generate JSON for many random schemas with a real model, and count how many outputs are valid.

    python scripts/check_structured.py [--model FOLDER_OR_GGUF] [--schemas 200] [--json FILE]

Without --model it takes the demo's (scripts/fetch_demo_model.py). Needs the extra "structured". The schemas and the
check of what comes out are those of the tests, the check being no part of the library that makes the grammars.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from bench_tools import make_parser, print_table, save_json
from fetch_demo_model import cached_demo_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "jpaged"))
from json_schemas import conforms, make_schema

from jpaged import LLM, SamplingParams


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=150)
    args = parser.parse_args()
    model = args.model or cached_demo_model()
    if model is None:
        parser.error("no --model, and the demo's is not there: python scripts/fetch_demo_model.py")

    rng = random.Random(5)
    schemas = [make_schema(rng) for _ in range(args.schemas)]
    params = [
        SamplingParams(
            temperature=0.7,
            seed=i,
            max_tokens=args.max_tokens,
            structured_outputs={"json": schema, "disable_any_whitespace": i % 2 == 0},
        )
        for i, schema in enumerate(schemas)
    ]
    llm = LLM(model, max_model_len=256, max_num_seqs=32, max_num_batched_tokens=256)
    prompt = [{"role": "user", "content": "Describe something as a JSON object."}]
    start = time.perf_counter()
    outputs = [output.outputs[0] for output in llm.chat([prompt] * len(schemas), params)]
    seconds = time.perf_counter() - start
    finished = [(output, schema) for output, schema in zip(outputs, schemas, strict=True) if is_finished(output)]
    valid = sum(conforms(json.loads(output.text), schema) for output, schema in finished)
    tokens = sum(len(output.token_ids) for output in outputs)
    header = ("schemas", "finished", "valid", "tokens", "tokens/s")
    row = (len(schemas), len(finished), valid, tokens, tokens / seconds)
    print_table(header, [row])
    save_json(args.json, [dict(zip(header, row, strict=True))])
    if valid < len(finished):
        sys.exit(1)


def is_finished(output) -> bool:
    """Ended by its grammar, not by a limit."""
    return output.finish_reason == "stop"


if __name__ == "__main__":
    main()
