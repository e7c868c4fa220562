#!/usr/bin/env python3
"""Make the golden files the tests compare with, using Hugging Face transformers (not needed to run or test).

In an environment with torch, transformers and numpy:

    python scripts/make_goldens.py logits [--family qwen3]
    python scripts/make_goldens.py greedy --name stories260k --model ../shared/models/stories260k
    python scripts/make_goldens.py greedy --name smollm2 --model FOLDER
    python scripts/make_goldens.py beams --name smollm2 --model FOLDER
    python scripts/make_goldens.py tokenizer --name smollm2 --model FOLDER

FOLDER: SmolLM2-135M-Instruct in Hugging Face format, float32, with the weights of the GGUF file that
scripts/fetch_demo_model.py fetches, dequantised (by ../shared/tools/fetch_real_models.py --dtype float32).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"
sys.path.insert(0, str(ROOT / "tests" / "models"))
import families  # noqa: E402  (found through the line above)

NEW_TOKENS = 128
BEAM_TOKENS = 40
PAD = 1  # no token that is generated (a pad of 0 counts as none)
PROMPTS: dict[str, list[str]] = {
    "stories260k": [
        "Once upon a time",
        "Lily and Tom went to the park.",
        "The big dog was sad because",
        "One day, a little girl named Mia found a red ball in the garden. She wanted to",
        "Tim had a toy car.",
    ],
    "smollm2": [
        "What is the capital of France?",
        "Write a short poem about the sea.",
        "Explain in three sentences why the sky is blue.",
        "List five animals that can fly, with one fact about each.",
    ],
}
TEXTS = [
    "Hello, world!",
    "Hello  world   three    spaces",
    " leading space",
    "trailing space ",
    "\n",
    "\n\n\n",
    "a\n\nb\n",
    "\ttab\t\ttabs",
    "1234567890",
    "3.14159 and 2,000,000",
    "12 345 6789a b0",
    "I'm you're we'll they'd it's I'VE don't",
    "e.g. U.S.A. 's 't",
    "naïve café résumé",
    "cafe\u0301 decomposed",
    "日本語のテキスト",
    "中文测试",
    "Привет, мир",
    "مرحبا بالعالم",
    "😀😃 emoji 👩‍👩‍👧‍👦 end",
    "def f(x):\n    return x**2  # comment\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "text<|endoftext|>more",
    "<s>not special here</s>",
    "a" * 50,
    "   ",
    "\r\n windows\r\n",
    "x=y;z!=w&&(a||b)",
    "http://example.com/path?q=1&r=2#frag",
    "MixedCASE Words ALLCAPS snake_case camelCase",
    "½ ² ① Ⅳ",
    "\u00a0nbsp\u2003em\u200bzero",
    "tab\n \n mixed",
    '{\'json\': [1, 2, null], "k": "v"}',
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "  Three \n"},
    ],
]


def make_logits(names: list[str]) -> None:
    """tests/goldens/logits_FAMILY.npz: config, tokens, logits of a prefill and of each step after it."""
    for family in names:
        hf = families.hf_config(family)
        config = transformers.AutoConfig.for_model(**hf)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(families.tensor(name, tuple(parameter.shape))))
        tokens = families.tokens(family)
        prompt = len(tokens) - families.STEPS
        logits = forced_logits(model, tokens, prompt)
        np.savez_compressed(
            GOLDENS / f"logits_{family}.npz",
            config=json.dumps(hf),
            saved_config=json.dumps(config.to_dict()),  # how this version of transformers writes it
            tokens=tokens.astype(np.int32),
            prompt_length=prompt,
            logits=logits,
        )
        print(f"{family}: logits {logits.shape}, spread {logits.std():.2f}")


@torch.no_grad()
def forced_logits(model: Any, tokens: np.ndarray, prompt: int) -> np.ndarray:
    """f32[len(tokens), V]: prefill of ``prompt`` tokens at once, then one token at a time."""
    ids = torch.from_numpy(tokens)[None]
    out = model(ids[:, :prompt], use_cache=True)
    rows = [out.logits[0]]
    for i in range(prompt, len(tokens)):
        out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0])
    return torch.cat(rows).numpy()


@torch.no_grad()
def make_greedy(name: str, folder: Path) -> None:
    """tests/goldens/greedy_NAME.json: greedy tokens (never stopping) and the top-2 gap at each step."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    done = []
    for text in PROMPTS[name]:
        if tokenizer.chat_template is not None:
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=tokenizer.chat_template is None).input_ids
        chosen, gaps = greedy(model, ids)
        done.append({"prompt": text, "prompt_token_ids": ids, "token_ids": chosen, "gaps": gaps})
        print(f"{len(ids)} prompt tokens, smallest gap {min(gaps):.5f}: {tokenizer.decode(chosen)[:90]!r}")
    write_json(f"greedy_{name}.json", {"prompts": done})


def greedy(model: Any, ids: list[int]) -> tuple[list[int], list[float]]:
    """NEW_TOKENS greedy tokens, and how far the best logit was above the second best."""
    chosen: list[int] = []
    gaps: list[float] = []
    out = model(torch.tensor([ids]), use_cache=True)
    while True:
        best, second = torch.topk(out.logits[0, -1], 2).values.tolist()
        chosen.append(int(out.logits[0, -1].argmax()))
        gaps.append(round(best - second, 6))
        if len(chosen) == NEW_TOKENS:
            return chosen, gaps
        out = model(torch.tensor([chosen[-1:]]), past_key_values=out.past_key_values, use_cache=True)


def make_beams(name: str, folder: Path) -> None:
    """tests/goldens/beams_NAME.json: what beam search returns for the first prompt, by width and length penalty.

    Besides the model's own end of text a frequent token ends it (the full stop of the first greedy text, say), so that
    beams end at different lengths.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    stop = tokenizer(".", add_special_tokens=False).input_ids[-1]
    done = []
    for text in PROMPTS[name][:1]:
        ids = tokenizer(text, add_special_tokens=True).input_ids
        for width, penalty, stops in ((2, 1.0, []), (4, 1.0, [stop]), (8, 0.0, [stop]), (4, 2.0, [])):
            eos = [model.config.eos_token_id, *stops]
            found = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                generation_config=transformers.GenerationConfig(
                    num_beams=width,
                    num_return_sequences=width,
                    max_new_tokens=BEAM_TOKENS,
                    length_penalty=penalty,
                    do_sample=False,
                    eos_token_id=eos,
                    pad_token_id=PAD,
                    return_dict_in_generate=True,
                    output_scores=True,
                ),
            )
            sequences = [[int(t) for t in each[len(ids) :] if t != PAD] for each in found.sequences]
            scores = [round(float(score), 5) for score in found.sequences_scores]
            done.append(
                {"prompt_token_ids": ids, "width": width, "length_penalty": penalty, "eos_token_ids": eos}
                | {"sequences": sequences, "scores": scores}
            )
            print(width, penalty, [len(each) for each in sequences], scores[:2])
    write_json(f"beams_{name}.json", {"searches": done})


def make_tokenizer(name: str, folder: Path) -> None:
    """tests/goldens/tokenizer_NAME.json: token ids and decoded text of TEXTS, prompts of CHATS."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = []
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        decoded = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        texts.append({"text": text, "ids": ids, "decoded": decoded})
    chats = [
        {
            "messages": messages,
            "text": tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
            "without_prompt": tokenizer.apply_chat_template(messages, tokenize=False),
        }
        for messages in CHATS
    ]
    write_json(f"tokenizer_{name}.json", {"texts": texts, "chats": chats})
    print(f"{len(texts)} texts, {len(chats)} chats")


def write_json(name: str, value: Any) -> None:
    """One line for each list item, so that differences can be read."""
    lines = [
        f'"{key}": [\n' + ",\n".join(json.dumps(item, ensure_ascii=False) for item in items) + "\n]"
        for key, items in value.items()
    ]
    (GOLDENS / name).write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("logits", "greedy", "beams", "tokenizer"))
    parser.add_argument("--name", choices=tuple(PROMPTS))
    parser.add_argument("--family", nargs="+", default=list(families.FAMILIES), help="for logits (default: all)")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    args = parser.parse_args()
    GOLDENS.mkdir(exist_ok=True)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    if args.what == "logits":
        make_logits(args.family)
    elif args.name is None or args.model is None:
        parser.error(f"{args.what} needs --name and --model")
    else:
        make = {"greedy": make_greedy, "beams": make_beams, "tokenizer": make_tokenizer}[args.what]
        make(args.name, args.model)


if __name__ == "__main__":
    main()
