"""A request's row of `Controls`, made on the host with NumPy when the request is admitted."""

from __future__ import annotations

import numpy as np

from jpaged.config import EngineConfig
from jpaged.controls import Controls
from jpaged.features import CONTROLLED, Feature
from jpaged.request import Request


def counts_dtype(max_model_len: int) -> np.dtype:
    """The smallest type that can count every token of the longest sequence twice."""
    return np.dtype(np.int16 if max_model_len < 2**14 else np.int32)


def init_controls(vocab_size: int, config: EngineConfig) -> Controls:
    """NumPy arrays of S rows that no request has written."""
    return Controls(
        *(np.broadcast_to(value, (config.max_num_seqs, *value.shape)) for value in empty_row(vocab_size, config))
    )


def empty_row(vocab_size: int, config: EngineConfig) -> Controls:
    """One slot's row, everything off."""
    entries, words, before = config.max_logit_bias, config.max_bad_words, config.max_bad_word_tokens - 1
    return Controls(
        mask=np.full(-(-vocab_size // 32), -1, np.int32),
        bias_ids=np.full(entries, vocab_size, np.int32),
        bias_values=np.zeros(entries, np.float32),
        bias_until=np.zeros(entries, np.int32),
        bad_last=np.full(words, vocab_size, np.int32),
        bad_before=np.full((words, before), -1, np.int32),
        recent=np.full(before, -2, np.int32),
        counts=np.zeros(vocab_size, counts_dtype(config.max_model_len)),
        penalties=np.array([1, 0, 0], np.float32),
        args=np.zeros(len(config.processor_args), np.float32),
    )


def make_row(request: Request, vocab_size: int, config: EngineConfig) -> Controls:
    """The row of a request with all its tokens known to the host. Its arrays may be written to."""
    row, params = empty_row(vocab_size, config), request.params
    output = np.asarray(request.output_token_ids, np.int64)
    if request.features & Feature.MASK:
        row.mask[:] = next_mask(request, vocab_size)
    entries = bias_entries(request)
    for place, (token, value, until) in enumerate(entries):
        row.bias_ids[place], row.bias_values[place], row.bias_until[place] = token, value, until
    sequences = [word for word in request.bad_word_ids if len(word) > 1]
    for place, word in enumerate(sequences):
        row.bad_last[place] = word[-1]
        row.bad_before[place, len(row.recent) - len(word) + 1 :] = word[:-1]
    if sequences and len(output):
        tail = output[-len(row.recent) :]
        row.recent[len(row.recent) - len(tail) :] = tail
    if request.features & Feature.PENALTIES:
        row.counts[:] = 2 * np.bincount(output, minlength=vocab_size)
        row.counts[np.unique(request.prompt_token_ids)] += 1
        row.penalties[:] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    for place, (name, default) in enumerate(config.processor_args.items()):
        row.args[place] = params.extra_args.get(name, default)
    return row


def bias_entries(request: Request) -> list[tuple[int, float, int]]:
    """(token, value, until): logit_bias for all positions, and the stop tokens until min_tokens are there."""
    always = 2**31 - 1
    entries = [(token, value, always) for token, value in request.params.logit_bias.items()]
    if request.params.min_tokens:
        first = len(request.prompt_token_ids) + request.params.min_tokens
        entries += [(token, -np.inf, first) for token in sorted(request.stop_ids)]
    return entries


def allowed_tokens(request: Request, vocab_size: int) -> np.ndarray:
    """bool[V]: allowed_token_ids without the bad words of one token."""
    listed = request.params.allowed_token_ids
    allowed = np.full(vocab_size, listed is None)
    if listed is not None:
        allowed[list(listed)] = True
    allowed[[word[0] for word in request.bad_word_ids if len(word) == 1]] = False
    return allowed


def next_mask(request: Request, vocab_size: int) -> np.ndarray:
    """i32[W]: the tokens that may come next, by the request's lists and its grammar."""
    if request.grammar is None:
        return pack_bits(allowed_tokens(request, vocab_size))
    mask = request.grammar.next_mask()
    if request.params.allowed_token_ids is not None or request.bad_word_ids:
        mask &= pack_bits(allowed_tokens(request, vocab_size))
    return mask


def pack_bits(allowed: np.ndarray) -> np.ndarray:
    """i32[ceil(V / 32)] from bool[V], lowest bit first."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)


def find_features(request: Request) -> Feature:
    """What a request uses, from its parameters, its bad words and the tokens that may end it."""
    params, found = request.params, Feature(0)
    uses = {
        Feature.MASK: params.allowed_token_ids is not None or any(len(word) == 1 for word in request.bad_word_ids),
        Feature.BIAS: bool(params.logit_bias) or (params.min_tokens > 0 and bool(request.stop_ids)),
        Feature.BAD_WORDS: any(len(word) > 1 for word in request.bad_word_ids),
        Feature.PENALTIES: params.penalized,
        Feature.PROCESSOR: bool(params.extra_args),
        Feature.LOGPROBS: params.logprobs is not None,
        Feature.PROMPT_LOGPROBS: params.prompt_logprobs is not None,
        Feature.STRUCTURED | Feature.MASK: params.structured_outputs is not None,
    }
    for feature, used in uses.items():
        found |= feature if used else Feature(0)
    return found


def check_controls(request: Request, vocab_size: int, config: EngineConfig) -> None:
    """Raises ValueError for ids outside the vocabulary and for more than the engine's tables hold."""
    params = request.params
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logit_bias", tuple(params.logit_bias)),
    ):
        stray = [token for token in ids if token >= vocab_size]
        if stray:
            raise ValueError(f"{name}: {stray[0]} is outside the model's vocabulary: ids are 0 to {vocab_size - 1}")
    entries = len(bias_entries(request))
    if entries > config.max_logit_bias:
        raise ValueError(
            f"logit_bias and the stop tokens under min_tokens are {entries} entries; at most "
            f"max_logit_bias={config.max_logit_bias} are allowed, a setting of the engine"
        )
    sequences = [word for word in request.bad_word_ids if len(word) > 1]
    longest = max(map(len, sequences), default=0)
    if len(sequences) > config.max_bad_words or longest > config.max_bad_word_tokens:
        raise ValueError(
            f"bad_words are {len(sequences)} sequences of at most {longest} tokens; allowed are "
            f"max_bad_words={config.max_bad_words} of max_bad_word_tokens={config.max_bad_word_tokens}, "
            "settings of the engine"
        )
    unknown = set(params.extra_args) - set(config.processor_args)
    if unknown:
        raise ValueError(
            f"extra_args: the engine's logits processor takes {list(config.processor_args) or 'none'}, "
            f"got {sorted(unknown)}"
        )
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        wanted = vocab_size if wanted == -1 else wanted or 0
        if wanted > min(config.max_logprobs, vocab_size):
            raise ValueError(
                f"{name}: {wanted} tokens asked for; at most {min(config.max_logprobs, vocab_size)} are allowed "
                f"(the engine's max_logprobs={config.max_logprobs}, a vocabulary of {vocab_size})"
            )


CONTROL_ROW = CONTROLLED | Feature.STRUCTURED  # what needs a row of Controls
