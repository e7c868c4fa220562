"""What form an output must have: a JSON schema, any JSON, a regular expression, a choice, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

from jpaged.validation import as_bool, as_texts

KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one of the first five; names as in vLLM. The output is of that form from its first character.

    json                    a JSON schema, as a dict or as JSON text
    json_object             True: any JSON object
    regex                   a regular expression (Rust's syntax) that the whole output matches
    choice                  texts, one of which the output is
    grammar                 a context-free grammar in llguidance's Lark syntax
    disable_any_whitespace  JSON without whitespace between its parts
    """

    json: str | None = None  # kept as JSON text, so that equal schemas share a compiled grammar
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a form that is not given exactly once or of the wrong type; syntax is not checked."""
        for name in ("json_object", "disable_any_whitespace"):
            object.__setattr__(self, name, as_bool(f"structured_outputs.{name}", getattr(self, name)))
        object.__setattr__(self, "choice", as_texts("structured_outputs.choice", self.choice))
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", json.dumps(self.json))
        for name in ("json", "regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"structured_outputs.{name} must be a text that is not empty, got {value!r}")
        given = [name for name in KINDS if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"structured_outputs takes exactly one of {', '.join(KINDS)}, got {given or 'none'}")

    @classmethod
    def from_mapping(cls, value: Mapping) -> StructuredOutputsParams:
        unknown = set(value) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"structured_outputs knows {[f.name for f in fields(cls)]}, got {sorted(unknown)}")
        return cls(**value)
