"""What a decoder is made of, read from a Hugging Face ``config.json`` and checked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError
from .rope import RopeConfig

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ACTIVATIONS = ("silu", "swish")  # two names of one function
LAYER_TYPES = ("full_attention", "sliding_attention")
DEFAULT_WINDOW = 4096  # of a config that does not name sliding_window, as in transformers
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and switches of one decoder-only transformer. Hashable, so it can be a static jit argument."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k before rotation
    windows: tuple[int | None, ...] = ()  # one a layer: tokens a query sees, itself included, None: all; (): all None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None  # what the checkpoint says it is stored in

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_position_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"the number of attention heads ({self.num_heads}) must be a multiple of the number of "
                f"key/value heads ({self.num_kv_heads})"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(f"windows must be () or one for each of {self.num_layers} layers, got {self.windows}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
        """Read a ``config.json`` dict. Raises ``ConfigError`` naming what is missing or not supported."""
        model_type = hf.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(f"model_type {model_type!r} is not supported; allowed: {', '.join(MODEL_TYPES)}")
        # Only Llama ever left the number of key/value heads out (Llama 1 and 2 have one per query head)
        needed = _NEEDED if model_type == "llama" else (*_NEEDED, "num_key_value_heads")
        missing = [name for name in needed if hf.get(name) is None]
        if missing:
            raise ConfigError(f"the config of a {model_type!r} model needs {', '.join(map(repr, missing))}")
        activation = hf.get("hidden_act", "silu")
        if activation not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {activation!r} is not supported; allowed: {', '.join(ACTIVATIONS)}")
        hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
        head_dim = hf.get("head_dim")
        if head_dim is None and model_type == "qwen3":
            head_dim = 128  # its default in transformers
        elif head_dim is None:
            if not (isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads == 0):
                raise ConfigError(f"without head_dim, hidden_size {hidden!r} must be a multiple of {heads!r} heads")
            head_dim = hidden // heads
        bias = bool(hf.get("attention_bias", False)) and model_type in ("llama", "qwen3")
        return cls(
            model_type=model_type,
            vocab_size=hf["vocab_size"],
            hidden_size=hidden,
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            max_position_embeddings=hf["max_position_embeddings"],
            rms_norm_eps=float(hf["rms_norm_eps"]),
            rope=RopeConfig.from_hf(hf, head_dim),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=bias or model_type == "qwen2",
            attention_out_bias=bias,
            mlp_bias=bool(hf.get("mlp_bias", False)) and model_type == "llama",
            qk_norm=model_type == "qwen3",
            windows=_read_windows(hf),
            bos_token_id=first_id(hf.get("bos_token_id")),
            eos_token_ids=token_ids(hf.get("eos_token_id")),
            dtype=hf.get("dtype") or hf.get("torch_dtype"),
        )

    def with_max_length(self, length: int) -> "ModelConfig":
        """This config for sequences of at most ``length`` tokens (``longrope`` alone cares)."""
        if self.rope.kind != "longrope":
            return self
        use_long = length > self.rope.original_max_positions
        return dataclasses.replace(self, rope=dataclasses.replace(self.rope, use_long=use_long))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; ``from_dict`` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "ModelConfig":
        """The inverse of ``to_dict``, also after a trip through JSON."""
        try:
            rope: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in saved["rope"].items()}
            rest: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items() if k != "rope"}
            return cls(rope=RopeConfig(**rope), **rest)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"not a saved ModelConfig: {error}") from error


def token_ids(value: Any) -> tuple[int, ...]:
    """A token id field of a config (null, one id or a list) as a tuple."""
    if value is None:
        return ()
    return tuple(int(x) for x in value) if isinstance(value, list | tuple) else (int(value),)


def first_id(value: Any) -> int | None:
    """The first id of such a field, or None."""
    return next(iter(token_ids(value)), None)


def _read_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's sliding window, as transformers understands the config; () if none hides anything."""
    family, layers = hf["model_type"], hf["num_hidden_layers"]
    window, kinds = hf.get("sliding_window", DEFAULT_WINDOW), list(hf.get("layer_types") or ())
    unknown = sorted(set(kinds) - set(LAYER_TYPES))
    if unknown:
        raise ConfigError(f"layer_types {unknown} are not supported; allowed: {', '.join(LAYER_TYPES)}")
    if not isinstance(layers, int) or (kinds and len(kinds) != layers):
        raise ConfigError(f"layer_types must name num_hidden_layers={layers!r} layers, got {len(kinds)}")
    if family in ("qwen2", "qwen3"):
        if not hf.get("use_sliding_window", False):
            window = None
        first = hf.get("max_window_layers", 28)
        kinds = kinds or [LAYER_TYPES[i >= first] for i in range(layers)]
    else:  # all alike; Llama has no window in transformers, which ignores the key
        kind = LAYER_TYPES[family == "mistral"]
        if window is not None and set(kinds) - {kind}:
            raise ConfigError(
                f"layer_types {sorted(set(kinds))} are not supported in a {family} model; allowed: {kind}"
            )
        kinds = [kind] * layers
    if window is None or "sliding_attention" not in kinds:
        return ()
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ConfigError(f"sliding_window must be null or a positive integer, got {window!r}")
    if window >= hf["max_position_embeddings"]:
        return ()  # no sequence is long enough for the window to hide anything
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
