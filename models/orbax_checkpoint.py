"""This project's own checkpoint: parameters as Orbax arrays, ready to restore in any sharding.

folder/
    jpaged.json     format, configuration, generation defaults (written last: a mark of completeness)
    tokenizer/      as a Hugging Face folder (absent without a tokenizer)
    params/         one Orbax array for each parameter, in this decoder's layout (fused, ``[out, in]``)
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .config import ModelConfig
from .errors import CheckpointError
from .generation import GenerationDefaults
from .jsonfile import read_object
from .params import param_shapes
from .split import check_split, put_param, split_of
from .tokenizer import Tokenizer
from .weights import resolve_dtype

if TYPE_CHECKING:
    from .load import LoadedModel

MANIFEST = "jpaged.json"
_FORMAT = 1


def is_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` is one of ours."""
    return (folder / MANIFEST).is_file()


def save_checkpoint(path: str | Path, loaded: "LoadedModel") -> None:
    """Write ``loaded`` to the folder ``path``, which must not exist yet or be empty (``ValueError``)."""
    import orbax.checkpoint as ocp  # slow to import, and only needed here

    folder = Path(path).expanduser().absolute()
    if loaded.mesh is not None:
        raise ValueError("a model that is divided among devices cannot be saved: load it on one")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists and is not an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "params", loaded.params)
    if loaded.tokenizer is not None:
        (folder / "tokenizer").mkdir()
        loaded.tokenizer.save(folder / "tokenizer")
    manifest = {
        "format": _FORMAT,
        "dtype": str(loaded.params["embedding"].dtype),
        "config": loaded.config.to_dict(),
        "generation": loaded.generation.to_dict(),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def read_manifest(folder: Path) -> tuple[ModelConfig, GenerationDefaults, str]:
    """Configuration, generation defaults and the stored dtype. Raises ``CheckpointError``."""
    manifest = read_object(folder / MANIFEST)
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{folder / MANIFEST}: format {manifest.get('format')!r} is not supported; allowed: {_FORMAT}"
        )
    try:
        config, generation = manifest["config"], manifest["generation"]
        return ModelConfig.from_dict(config), GenerationDefaults.from_dict(generation), manifest["dtype"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}") from error


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer stored with the parameters, if there is one."""
    return Tokenizer.from_folder(folder / "tokenizer") if (folder / "tokenizer").is_dir() else None


def restore_params(
    folder: Path,
    config: ModelConfig,
    stored_dtype: str,
    dtype: str = "auto",
    mesh: Mesh | None = None,
) -> tuple[nnx.GraphDef, dict[str, jax.Array]]:
    """The graph and the parameters, on the default device or divided among those of ``mesh``.

    Raises ``ValueError`` for a model that cannot be divided so, and ``CheckpointError`` naming missing, unexpected or
    misshaped arrays.
    """
    import orbax.checkpoint as ocp

    target = resolve_dtype(dtype, stored_dtype)
    graphdef, shapes = param_shapes(config, target)
    if mesh is not None:
        check_split(config, mesh.size)
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_spread(leaf.shape, mesh))
        for name, leaf in shapes.items()
    }
    # Orbax would read everything at once and hold a second copy of it: one gigabyte, or two arrays, at a time
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in shapes.values())
    handler = ocp.StandardCheckpointHandler(restore_concurrent_gb=1 + 2 * largest // 10**9)
    with ocp.Checkpointer(handler) as checkpointer:
        try:
            metadata = checkpointer.metadata(folder / "params").item_metadata
            if metadata is None:  # Orbax logs why
                raise CheckpointError("the list of arrays cannot be read")
            found = {name: tuple(entry.shape) for name, entry in metadata.tree.items()}
        except Exception as error:  # whatever the storage layers raise about a damaged folder
            raise CheckpointError(f"{folder / 'params'} is damaged or not there: {error}") from error
        _compare({name: leaf.shape for name, leaf in wanted.items()}, found, folder)
        try:
            params = checkpointer.restore(folder / "params", args=ocp.args.StandardRestore(wanted))
        except Exception as error:
            raise CheckpointError(f"{folder / 'params'} is damaged: {error}") from error
    if mesh is None:
        return graphdef, params
    for name in params:  # one at a time: as it lies in the file, it has no device's part in one piece
        params[name] = put_param(name, np.asarray(params[name]), config, mesh)
    return param_shapes(config, target, split_of(mesh))[0], params


def _spread(shape: tuple[int, ...], mesh: Mesh | None) -> Sharding:
    """Where an array is read to: no device gets more than its share, if it can be."""
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    axis = next((i for i, size in enumerate(shape) if size % mesh.size == 0), len(shape))
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, *mesh.axis_names[: axis < len(shape)]))


def _compare(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    wrong = {
        "missing": [n for n in wanted if n not in found],
        "unexpected": [n for n in found if n not in wanted],
        "misshaped": [f"{n} {found[n]} (should be {s})" for n, s in wanted.items() if n in found and found[n] != s],
    }
    problems = [f"{what}: {', '.join(names)}" for what, names in wrong.items() if names]
    if problems:
        raise CheckpointError(f"{folder}: the arrays do not fit the config: " + "; ".join(problems))
