#!/usr/bin/env python3
"""Make tests/goldens/logprobs_NAME.json: log-probabilities that Hugging Face transformers gives a text's tokens.

In an environment with torch, transformers and numpy:

    python scripts/make_logprob_goldens.py --name stories260k --model ../shared/models/stories260k
    python scripts/make_logprob_goldens.py --name smollm2 --model FOLDER

FOLDER as in make_goldens.py. Each entry is a prompt and a greedy continuation of it, with, for every token but the
first, its own log-probability, its rank and the TOP likeliest tokens, in float64 from float32 logits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"
PROMPTS = {
    "stories260k": ["Once upon a time, there was a", "Tim had a toy car."],
    "smollm2": ["The capital of France is", "def add(a, b):\n    return"],
}
NEW_TOKENS = 16
TOP = 5


@torch.no_grad()
def describe(model: Any, prompt: list[int]) -> dict[str, Any]:
    """One entry: tokens, where the prompt ends, and the numbers of each token after the first."""
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), dim=-1)
    own = logprobs.gather(1, torch.tensor(ids[1:])[:, None])
    top = logprobs.topk(TOP, dim=1)
    return {
        "token_ids": ids,
        "prompt_length": len(prompt),
        "logprobs": [round(value, 6) for value in own[:, 0].tolist()],
        "ranks": (1 + (logprobs > own).sum(dim=1)).tolist(),
        "top_ids": top.indices.tolist(),
        "top_logprobs": [[round(value, 6) for value in row] for row in top.values.tolist()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--name", choices=tuple(PROMPTS), required=True)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    entries = [describe(model, tokenizer(text).input_ids) for text in PROMPTS[args.name]]
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    (GOLDENS / f"logprobs_{args.name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{args.name}: {sum(len(entry['ranks']) for entry in entries)} tokens")


if __name__ == "__main__":
    main()
