"""A ``tokenizers.Tokenizer`` from the vocabulary in a GGUF file: byte-level BPE, or SentencePiece BPE.

The file names its pre-tokenizer (``tokenizer.ggml.pre``) rather than describing it, so the rules are here, as
in the Hugging Face tokenizers of those models.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from .errors import CheckpointError
from .tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # tokenizer.ggml.token_type
_Json = dict[str, Any]


def _byte_level(use_regex: bool) -> _Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(digits: str) -> list[_Json]:
    """The GPT-4 style split; ``digits`` says how many of them stay together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(False)]


_GPT2: _Json = {"pre": [_byte_level(True)]}
_LLAMA3: _Json = {"pre": _split(r"\p{N}{1,3}"), "ignore_merges": True, "add_bos": True}
_QWEN2: _Json = {"pre": _split(r"\p{N}"), "normalizer": {"type": "NFC"}}
_SMOLLM: _Json = {"pre": [{"type": "Digits", "individual_digits": True}, _byte_level(True)]}
PRE_TOKENIZERS: dict[str, _Json] = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _SMOLLM,
}


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a GGUF file or None; ``CheckpointError`` for an unknown or damaged one."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if kind not in builders:
        raise CheckpointError(
            f"GGUF tokenizer model {kind!r} is not supported; allowed: {', '.join(builders)} "
            "(or give another tokenizer)"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError("the GGUF metadata lacks tokenizer.ggml.tokens")
    types = [int(t) for t in metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))]
    if len(types) != len(tokens):
        raise CheckpointError(f"the GGUF tokenizer has {len(tokens)} tokens but {len(types)} token types")
    description, add_bos = builders[kind](metadata, tokens, types)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos)
    description["post_processor"] = _template(metadata, tokens, add_bos)
    description["added_tokens"] = [
        _added(i, tokens[i], special=t != _USER_DEFINED)
        for i, t in enumerate(types)
        if t in (_CONTROL, _UNKNOWN, _USER_DEFINED)
    ]
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"the GGUF tokenizer is damaged: {error}") from error
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {
        ours: tokens[token]
        for ours, theirs in names.items()
        if (token := _special_id(metadata, theirs, tokens)) is not None
    }
    return Tokenizer(backend, special, metadata.get("tokenizer.chat_template"))


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> tuple[_Json, bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"GGUF pre-tokenizer (tokenizer.ggml.pre) {pre!r} is not supported; allowed: "
            f"{', '.join(PRE_TOKENIZERS)} (or give another tokenizer)"
        )
    rules = PRE_TOKENIZERS[pre]
    model = _bpe(tokens, types, [m.split(" ", 1) for m in metadata.get("tokenizer.ggml.merges", ())])
    model["ignore_merges"] = rules.get("ignore_merges", False)
    description = {
        "normalizer": rules.get("normalizer"),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": rules["pre"]},
        "decoder": _byte_level(True),
        "model": model,
    }
    return description, rules.get("add_bos", False)


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> tuple[_Json, bool]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError("the GGUF tokenizer needs tokenizer.ggml.scores, one for each token")
    model = _bpe(tokens, types, _merges_from_scores(tokens, [float(s) for s in scores], types))
    unknown = next((tokens[i] for i, t in enumerate(types) if t == _UNKNOWN), None)
    model |= {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    normalizers: list[_Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoders: list[_Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    description = {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }
    return description, True


def _bpe(tokens: Sequence[str], types: Sequence[int], merges: Sequence[Sequence[str]]) -> _Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED},
        "merges": [list(m) for m in merges],
    }


def _merges_from_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """SentencePiece merges whatever two pieces make the best-scored one; written out as ranked merges."""
    mergeable = {token: i for i, token in enumerate(tokens) if types[i] in (1, _USER_DEFINED)}
    found = []
    for whole, i in mergeable.items():
        pairs = [(whole[:cut], whole[cut:]) for cut in range(1, len(whole))]
        known = [(mergeable[a], mergeable[b], a, b) for a, b in pairs if a in mergeable and b in mergeable]
        found += [(-scores[i], a, b) for _, _, a, b in sorted(known)]
    found.sort(key=lambda merge: merge[0])  # stable: equal scores stay in the vocabulary's order
    return [(a, b) for _, a, b in found]


def _special_id(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    token = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token is not None and not 0 <= token < len(tokens):
        raise CheckpointError(f"tokenizer.ggml.{name}_token_id is {token}, of {len(tokens)} tokens")
    return token


def _template(metadata: Mapping[str, Any], tokens: Sequence[str], add_bos: bool) -> _Json | None:
    """What every encoded text gets: BOS before and EOS after, where the file asks for them."""
    bos = _special_id(metadata, "bos", tokens) if add_bos else None
    eos = _special_id(metadata, "eos", tokens) if metadata.get("tokenizer.ggml.add_eos_token") else None
    if bos is None and eos is None:
        return None

    def sequence(which: str, type_id: int) -> list[_Json]:
        parts: list[_Json] = [{"Sequence": {"id": which, "type_id": type_id}}]
        if bos is not None:
            parts.insert(0, {"SpecialToken": {"id": tokens[bos], "type_id": type_id}})
        if eos is not None:
            parts.append({"SpecialToken": {"id": tokens[eos], "type_id": type_id}})
        return parts

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in (bos, eos) if i is not None
        },
    }


def _added(token: int, text: str, *, special: bool) -> _Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token, "content": text, "special": special, **flags}
