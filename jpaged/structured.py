"""Structured output: grammars compiled in the background, one mask of allowed tokens for each token, on the host.

The work is llguidance's (https://github.com/guidance-ai/llguidance), an optional dependency. Neither compiling nor
computing a mask holds Python's interpreter lock, and the engine asks for masks while the device runs a step.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from jpaged_models import Tokenizer

from jpaged.request import Request
from jpaged.structured_params import StructuredOutputsParams

EXTRA = 'pip install "jpaged[structured]"'
MAX_CACHED = 256  # compiled grammars


class Grammar:
    """Where one output stands in its grammar."""

    def __init__(self, matcher: Any, words: int) -> None:
        self.matcher = matcher
        self.words = words

    def next_mask(self) -> np.ndarray:
        """i32[W]: bit v % 32 of word v // 32 says whether token v may come next."""
        from llguidance.numpy import fill_next_token_bitmask

        mask = np.zeros((1, self.words), np.int32)
        fill_next_token_bitmask(self.matcher, mask, 0)
        return mask[0]

    def accept(self, token: int) -> bool:
        """Go on by a token; False if the grammar does not allow it."""
        return bool(self.matcher.consume_token(token))

    @property
    def complete(self) -> bool:
        """Whether nothing but an end of text may follow."""
        return bool(self.matcher.is_stopped())


class GrammarCompiler:
    """Compiles what requests ask for, in threads, and keeps the last ones. Nothing is loaded before the first."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = sorted(eos_token_ids)
        self.pool: ThreadPoolExecutor | None = None
        self.trie: Future | None = None  # of llguidance's form of the tokenizer
        self.compiled: OrderedDict[StructuredOutputsParams, Future] = OrderedDict()

    def start(self, params: StructuredOutputsParams) -> Future:
        """Begin to compile; the result is for `grammar_of`.

        Raises ValueError if llguidance is not installed, or there is no tokenizer or no end of text to end with.
        """
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise ValueError(f"structured_outputs need llguidance, an extra of this package: {EXTRA}") from error
        if self.tokenizer is None:
            raise ValueError("structured_outputs need a tokenizer, and this model came without one: pass tokenizer=")
        if not self.eos_token_ids:
            raise ValueError("structured_outputs need an end-of-sequence token, and this checkpoint names none")
        if self.pool is None:
            self.pool = ThreadPoolExecutor(2, thread_name_prefix="grammar")
            self.trie = self.pool.submit(self._load_tokenizer)
        if params not in self.compiled:
            self.compiled[params] = self.pool.submit(self._compile, params)
        self.compiled.move_to_end(params)
        if len(self.compiled) > MAX_CACHED:
            self.compiled.popitem(last=False)
        return self.compiled[params]

    def grammar_of(self, compiled: Future) -> Grammar:
        """A fresh start in a compiled grammar, waiting for it. Raises ValueError if it cannot be compiled."""
        return Grammar(compiled.result().deep_copy(), -(-self.vocab_size // 32))

    def _load_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        assert self.tokenizer is not None
        text = self.tokenizer.backend.to_str()
        return LLTokenizer(text, n_vocab=self.vocab_size, eos_token=self.eos_token_ids)

    def _compile(self, params: StructuredOutputsParams) -> Any:
        from llguidance import LLMatcher

        assert self.trie is not None
        try:
            matcher = LLMatcher(self.trie.result(), describe_grammar(params), log_level=0)
        except Exception as error:  # the library raises bare Exception for tokenizers it cannot use
            raise ValueError(f"structured_outputs: {error}") from error
        if matcher.is_error():
            raise ValueError(f"structured_outputs: {matcher.get_error()}")
        return matcher


class GrammarQueue:
    """Requests whose grammars are being compiled: they are not yet the scheduler's."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler = compiler
        self.compiling: dict[Request, Future] = {}

    def add(self, request: Request) -> None:
        """Raises ValueError if nothing can be compiled here, see `GrammarCompiler.start`."""
        assert request.params.structured_outputs is not None
        self.compiling[request] = self.compiler.start(request.params.structured_outputs)

    def discard(self, request: Request) -> bool:
        """Forget a request. Returns whether it was here."""
        return self.compiling.pop(request, None) is not None

    def any_ready(self) -> bool:
        return any(compiled.done() for compiled in self.compiling.values())

    def take_ready(self, wait: bool) -> list[Request]:
        """Requests that have their grammar now, or whose `error` says why they cannot; with `wait` at least one."""
        if not self.compiling:
            return []
        if wait:
            futures.wait(self.compiling.values(), return_when=futures.FIRST_COMPLETED)
        ready = [request for request, compiled in self.compiling.items() if compiled.done()]
        for request in ready:
            compiled = self.compiling.pop(request)
            try:
                for each in request.group:
                    each.grammar = self.compiler.grammar_of(compiled)
            except ValueError as error:
                request.error = str(error)
        return ready


def describe_grammar(params: StructuredOutputsParams) -> str:
    """The text llguidance compiles."""
    from llguidance import LLMatcher

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.grammar is not None:
        return LLMatcher.grammar_from_lark(params.grammar)
    if params.choice:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in params.choice))
    schema = params.json if params.json is not None else '{"type": "object"}'
    return LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_flexible": not params.disable_any_whitespace}
    )
