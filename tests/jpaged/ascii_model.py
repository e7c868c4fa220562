"""The tiny random model with a tokenizer of printable characters."""

from __future__ import annotations

import dataclasses

import tokenizers
from jpaged_models import LoadedModel, Tokenizer
from tiny import tiny_model


def ascii_tokenizer() -> Tokenizer:
    """One token for each printable character; "<end>" is id 2."""
    symbols = [chr(code) for code in range(33, 127)]
    vocab = ["!", "\u0120", "<end>", *symbols[1:], "\u010a"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({symbol: i for i, symbol in enumerate(vocab)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, {"eos_token": "<end>"})


def ascii_model() -> LoadedModel:
    return dataclasses.replace(tiny_model(), tokenizer=ascii_tokenizer())
