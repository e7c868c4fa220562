"""Text to token ids and back, over the ``tokenizers`` library, with the checkpoint's chat template."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from .chat_template import compile_template, cut_after_final_message
from .errors import CheckpointError
from .jsonfile import read_object

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A tokenizer and what its checkpoint says about it.

    ``backend``: the ``tokenizers.Tokenizer``. ``special_tokens``: {"bos_token": text, …}. ``chat_template``:
    Jinja source or None. Decoding never "cleans up" spaces: text round-trips as the model wrote it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ):
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._render: Callable[..., str] | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read ``tokenizer.json`` and, if there, ``tokenizer_config.json`` and ``chat_template.jinja``."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{folder} holds no tokenizer.json (the only tokenizer format read from folders)")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file} is damaged or of an unknown kind: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = read_object(folder / "tokenizer_config.json", optional=True)
        special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None}
        template = _default_template(config.get("chat_template"))
        jinja = folder / "chat_template.jinja"
        if jinja.is_file():
            template = jinja.read_text(encoding="utf-8")
        return cls(backend, special, template)

    def save(self, folder: Path) -> None:
        """Write files that ``from_folder`` reads back."""
        self.backend.save(str(folder / "tokenizer.json"))
        config = {**self.special_tokens, "chat_template": self.chat_template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; with ``add_special_tokens`` also those it always adds (often BOS)."""
        if not isinstance(text, str):
            raise ValueError(f"text to encode must be a str, got {type(text).__name__}")
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @property
    def vocab_size(self) -> int:
        """How many token texts it knows, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def byte_fallback(self) -> bool:
        """Whether its decoder has tokens for single bytes ("<0x0A>") that it decodes a run at a time."""
        decoder = self.backend.decoder
        return decoder is not None and b'"ByteFallback"' in decoder.__getstate__()

    @functools.cached_property
    def added_token_ids(self) -> frozenset[int]:
        """Ids of tokens beside the model's own vocabulary, the special ones among them."""
        return frozenset(self.backend.get_added_tokens_decoder())

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Those of the added tokens that ``decode`` leaves out by default."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end; ``LoadedModel.generation`` has the checkpoint's full list."""
        eos = self._special_id("eos_token")
        return () if eos is None else (eos,)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation. Encode it with ``add_special_tokens=False``: it has them.

        ``continue_final_message``: end with the last message's content, for the model to go on with it.
        Raises ``ValueError`` without a template, and ``ChatTemplateError`` (a ValueError) when it fails.
        """
        if chat_template is not None:
            render = compile_template(chat_template)
        elif self.chat_template is None:
            raise ValueError("this model has no chat template; pass one, or prompt it with plain text")
        else:
            render = self._render = self._render or compile_template(self.chat_template)
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "continue_final_message must be used with add_generation_prompt=False: a new turn is begun or the last "
                "one continued, got True for both"
            )
        text = render(
            messages,
            **{**self.special_tokens, "tools": tools, "documents": None, **variables},
            add_generation_prompt=add_generation_prompt,
        )
        return cut_after_final_message(text, messages) if continue_final_message else text

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def _token_text(value: Any) -> str | None:
    """A special token in tokenizer_config.json: a text, or a dict with its text under "content"."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _default_template(value: Any) -> str | None:
    """One template, or the one named "default" of several."""
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value}.get("default")
    return value if isinstance(value, str) else None
