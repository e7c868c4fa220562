"""One call from a name to a model: a Hugging Face folder or hub id, a GGUF file, or our own checkpoint."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from . import hub, orbax_checkpoint
from .config import ModelConfig
from .errors import CheckpointError
from .generation import GenerationDefaults
from .gguf_file import GgufFile
from .gguf_loader import GgufSource, gguf_config, gguf_generation
from .gguf_tokenizer import gguf_tokenizer
from .jsonfile import read_object
from .layers import is_packed
from .params import abstract_decoder, param_shapes
from .safetensors_loader import SafetensorsSource
from .split import check_split, make_mesh, put_param, split_of
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
    runs: tuple[int, ...] | None = None  # layers of each run (see runs.py); None: each layer by itself
    mesh: Mesh | None = None  # the devices among which it is divided; None: all on one

    @property
    def dtype(self) -> jnp.dtype:
        """Of activations, and of the weights unless they are quantised."""
        return self.params["norm.weight"].dtype

    @property
    def quantization(self) -> str | None:
        """Of the weights: "int8" (see ``pack_model``) or None."""
        return "int8" if self.params["embedding"].dtype == jnp.int8 else None

    def with_max_length(self, max_model_len: int) -> "LoadedModel":
        """The same parameters in a decoder for sequences of at most this length: some rope scalings depend on it."""
        config = self.config.with_max_length(max_model_len)
        if config == self.config:
            return self
        graphdef = nnx.graphdef(abstract_decoder(config, self.dtype, self.runs, split_of(self.mesh)))
        return dataclasses.replace(self, config=config, graphdef=graphdef)

    def split(self, devices: int) -> "LoadedModel":
        """The same model divided among so many devices; one that is so already is returned as it is.

        Raises ValueError if it cannot be.
        """
        if self.mesh is not None or devices == 1:
            found = 1 if self.mesh is None else self.mesh.size
            if found != devices:
                raise ValueError(f"tensor_parallel_size={devices}, but the model is divided among {found} devices")
            return self
        if is_packed(self.params["embedding"]):
            raise ValueError(f"tensor_parallel_size={devices} needs weights that are not packed for the CPU's kernels")
        check_split(self.config, devices)
        mesh = make_mesh(devices)
        graphdef, _ = param_shapes(self.config, self.dtype, split_of(mesh))
        params = {name: put_param(name, np.asarray(x), self.config, mesh) for name, x in self.params.items()}
        return dataclasses.replace(self, graphdef=graphdef, params=params, mesh=mesh)


def load_model(
    path_or_id: str | Path,
    dtype: str = "auto",
    tokenizer: str | Path | Tokenizer | None = None,
    *,
    tensor_parallel_size: int = 1,
) -> LoadedModel:
    """Load a model from a folder, a ``.gguf`` file, a checkpoint written by ``save_checkpoint``, or a hub id.

    ``dtype``: "auto" (as stored; float16 and quantised weights become bfloat16), "float32" or "bfloat16".
    ``tokenizer``: another folder, ``.gguf`` file, hub id or ``Tokenizer`` to use in place of the model's own.
    ``tensor_parallel_size``: among how many devices to divide the model (see ``split``).
    Raises ``ValueError`` (``ConfigError``, ``CheckpointError``) saying what is wrong with the checkpoint.
    The tokenizer is None if the model has none and none is given.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; allowed: {', '.join(DTYPES)}")
    mesh = None if tensor_parallel_size == 1 else make_mesh(tensor_parallel_size)
    path = resolve(path_or_id)
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    if path.is_file():
        return _load_gguf(path, dtype, given, mesh)
    if orbax_checkpoint.is_checkpoint(path):
        return _load_orbax(path, dtype, given, mesh)
    return _load_folder(path, dtype, given, mesh)


def load_tokenizer(source: str | Path | Tokenizer) -> Tokenizer:
    """The tokenizer of a folder, GGUF file, or hub id (a ``Tokenizer`` is returned as it is)."""
    if isinstance(source, Tokenizer):
        return source
    path = resolve(source)
    if path.is_file():
        found = gguf_tokenizer(GgufFile(path).metadata)
    elif orbax_checkpoint.is_checkpoint(path):
        found = orbax_checkpoint.read_tokenizer(path)
    else:
        found = Tokenizer.from_folder(path)
    if found is None:
        raise CheckpointError(f"{path} holds no tokenizer")
    return found


def resolve(path_or_id: str | Path) -> Path:
    """The local path of a model; a hub id is downloaded (or found in the cache) if no such path exists."""
    path = Path(path_or_id).expanduser()
    if path.exists():
        return path
    if isinstance(path_or_id, str) and hub.is_hub_id(path_or_id):
        return hub.download(path_or_id)
    raise CheckpointError(
        f"there is no model at {str(path_or_id)!r}; allowed: a folder, a .gguf file or a hub id (owner/name)"
    )


def _load_folder(folder: Path, dtype: str, tokenizer: Tokenizer | None, mesh: Mesh | None) -> LoadedModel:
    config = ModelConfig.from_hf(read_object(folder / "config.json"))
    recommended = read_object(folder / "generation_config.json", optional=True)
    if tokenizer is None and (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_folder(folder)
    graphdef, params = load_params(config, SafetensorsSource(folder), dtype, mesh=mesh)
    return LoadedModel(config, graphdef, params, tokenizer, GenerationDefaults.from_hf(recommended, config), mesh=mesh)


def _load_gguf(path: Path, dtype: str, tokenizer: Tokenizer | None, mesh: Mesh | None) -> LoadedModel:
    file = GgufFile(path)
    config = gguf_config(file)
    with ThreadPoolExecutor(1) as pool:  # a vocabulary takes as long as the weights of a small model
        given = pool.submit(lambda: gguf_tokenizer(file.metadata) if tokenizer is None else tokenizer)
        graphdef, params = load_params(config, GgufSource(file, config), dtype, mesh=mesh)
    return LoadedModel(config, graphdef, params, given.result(), gguf_generation(file), mesh=mesh)


def _load_orbax(folder: Path, dtype: str, tokenizer: Tokenizer | None, mesh: Mesh | None) -> LoadedModel:
    config, generation, stored = orbax_checkpoint.read_manifest(folder)
    if tokenizer is None:
        tokenizer = orbax_checkpoint.read_tokenizer(folder)
    graphdef, params = orbax_checkpoint.restore_params(folder, config, stored, dtype, mesh=mesh)
    return LoadedModel(config, graphdef, params, tokenizer, generation, mesh=mesh)
