"""What a checkpoint recommends for generation (``generation_config.json``)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .config import ModelConfig, token_ids


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """Stop tokens and sampling settings a checkpoint ships; None where it says nothing."""

    eos_token_ids: tuple[int, ...] = ()
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], config: ModelConfig) -> "GenerationDefaults":
        """Read a ``generation_config.json`` dict ({} if none); its stop tokens win over the config's."""
        fields = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return cls(token_ids(hf.get("eos_token_id")) or config.eos_token_ids, **{n: hf.get(n) for n in fields})

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "GenerationDefaults":
        return cls(**{**saved, "eos_token_ids": tuple(saved.get("eos_token_ids", ()))})
