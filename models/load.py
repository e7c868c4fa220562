"""One call from a name to a model: a Hugging Face folder or hub id, a GGUF file, or our own checkpoint."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Sharding

from .config import ModelConfig
from .errors import CheckpointError
from .generation import GenerationDefaults
from .jsonfile import read_object
from .safetensors_loader import SafetensorsSource
from .tokenizer import Tokenizer
from .weights import DTYPES, load_params


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: ``merge_params(graphdef, params)`` is the decoder."""

    config: ModelConfig
    graphdef: nnx.GraphDef
    params: dict[str, jax.Array]
    tokenizer: Tokenizer | None
    generation: GenerationDefaults


def load_model(
    path_or_id: str | Path,
    dtype: str = "auto",
    tokenizer: str | Path | Tokenizer | None = None,
    *,
    shardings: Mapping[str, Sharding] | None = None,
) -> LoadedModel:
    """Load a model from a folder, a ``.gguf`` file, a checkpoint written by ``save_checkpoint``, or a hub id.

    ``dtype``: "auto" (as stored; float16 and quantised weights become bfloat16), "float32" or "bfloat16".
    ``tokenizer``: another folder, hub id or ``Tokenizer`` to use; by default the model's own, None if it has none.
    ``shardings``: where to put the parameters it names, by their names in ``params``.
    Raises ``ValueError`` (``ConfigError``, ``CheckpointError``) saying what is wrong with the checkpoint.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; allowed: {', '.join(DTYPES)}")
    path = resolve(path_or_id)
    if path.is_file():
        raise CheckpointError(f"{path} is not a model: expected a folder")
    return load_hf_folder(path, dtype, tokenizer, shardings)


def resolve(path_or_id: str | Path) -> Path:
    path = Path(path_or_id).expanduser()
    if path.exists():
        return path
    raise CheckpointError(f"{path} does not exist")


def load_hf_folder(
    folder: Path,
    dtype: str,
    tokenizer: str | Path | Tokenizer | None,
    shardings: Mapping[str, Sharding] | None,
) -> LoadedModel:
    """Load a folder in Hugging Face's layout: config.json, safetensors, and optionally the tokenizer's files."""
    config = ModelConfig.from_hf(read_object(folder / "config.json"))
    generation = GenerationDefaults.from_hf(
        read_object(folder / "generation_config.json", optional=True), config
    )
    own = _own_tokenizer(folder)
    graphdef, params = load_params(config, SafetensorsSource(folder), dtype, shardings)
    return LoadedModel(config, graphdef, params, pick_tokenizer(tokenizer, own), generation)


def _own_tokenizer(folder: Path) -> Callable[[], Tokenizer | None]:
    return lambda: Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None


def pick_tokenizer(
    asked: str | Path | Tokenizer | None, own: Callable[[], Tokenizer | None]
) -> Tokenizer | None:
    """The tokenizer asked for, else the model's own."""
    if asked is None:
        return own()
    if isinstance(asked, Tokenizer):
        return asked
    return Tokenizer.from_folder(resolve(asked))
