"""Weights in int8 beside bfloat16: perplexity of a text, and the time of a model's products by the number of rows.

    python scripts/bench_int8.py MODEL TEXT --json FILE

The text is cut into chunks of --chunk tokens, each scored by itself: exp of the mean negative log-probability of all
tokens but a chunk's first. Products are those of all layers in one program, as the decoder calls them.
"""

from __future__ import annotations

import math
from pathlib import Path

import jax
import numpy as np
from bench_tools import make_parser, print_table, save_json, take_turns
from jpaged_models import Decoder, LoadedModel, load_model, merge_params, pack_model

from jpaged import LLM, SamplingParams

KINDS = {"bfloat16": None, "int8": "int8"}


def measure_perplexity(packed: LoadedModel, text: str, chunk: int) -> tuple[float, int]:
    """(perplexity, tokens that were scored)."""
    llm = LLM(packed, max_model_len=chunk + 1, max_num_seqs=8, progress=False)
    ids = llm.get_tokenizer().encode(text)
    chunks = [ids[start : start + chunk] for start in range(0, len(ids), chunk)]
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outputs = llm.generate(chunks, scored, use_tqdm=False)
    found = [
        each[token].logprob
        for output, tokens in zip(outputs, chunks, strict=True)
        for token, each in zip(tokens, output.prompt_logprobs, strict=True)
        if each is not None
    ]
    return math.exp(-float(np.mean(found))), len(found)


def time_products(models: dict[str, LoadedModel], rows: int, repeats: int) -> dict[str, float]:
    """Median ms by kind of weights."""
    config = next(iter(models.values())).config
    dtype = next(iter(models.values())).dtype
    rng = np.random.default_rng(0)
    widths = (config.hidden_size, config.num_heads * config.head_dim)
    x, seen = (jax.numpy.asarray(rng.standard_normal((rows, width)), dtype) for width in widths)

    def multiply(model: Decoder) -> list[jax.Array]:
        return [
            each
            for block, layer in model.blocks()
            for each in (
                block.attention.qkv(x, norm=block.attention_norm, layer=layer),
                block.attention.out(seen, residual=x, layer=layer),
                block.mlp(x, block.mlp_norm, None, layer),
            )
        ]

    def prepare(model: LoadedModel):
        run = jax.jit(lambda params: multiply(merge_params(model.graphdef, params)))
        return lambda: run(model.params)

    times = take_turns({name: prepare(model) for name, model in models.items()}, repeats, calls=3)
    return {name: 1e3 * time for name, time in times.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", help="folder, .gguf file or hub id")
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--characters", type=int, default=24_000, help="of the text's beginning (default: 24000)")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens scored together (default: 1024)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512], help="default: 1 8 32 128 512")
    parser.add_argument("--repeats", type=int, default=9, help="turns of three calls each (default: 9)")
    args = parser.parse_args()
    loaded = load_model(args.model, "bfloat16")
    models = {name: pack_model(loaded, quantization=kind) for name, kind in KINDS.items()}
    text = args.text.read_text()[: args.characters]
    table = []
    for name, model in models.items():
        perplexity, tokens = measure_perplexity(model, text, args.chunk)
        table.append({"what": f"perplexity, {tokens} tokens", "weights": name, "value": round(perplexity, 3)})
    for rows in args.rows:
        for name, time in time_products(models, rows, args.repeats).items():
            table.append({"what": f"products of all layers, {rows} rows, ms", "weights": name, "value": round(time, 2)})
    print_table(list(table[0]), [list(row.values()) for row in table])
    save_json(args.json, table)


if __name__ == "__main__":
    main()
