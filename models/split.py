"""One model on several devices: tensor parallelism (Shoeybi et al., 2019, "Megatron-LM", section 3).

Each device has some of the query heads with the KV heads they read, and some of the feed-forward's width. The products
that end attention and feed-forward give partial sums, which the devices add up. The vocabulary is divided too: the head
is a decode step's largest matrix, and where it is tied to the embedding both are one array. The embedding's rows are
added up likewise (each is zero but on one device), and logits are gathered, so that every device samples from all.

A parameter of a split model is one global array, sharded along one axis so that each device's part is what a decoder
of fewer heads would have: rows of the fused q, k, v (and gate, up) matrices are put in order for that, KV heads are
repeated where there are fewer of them than devices, and a vocabulary is padded with zeros.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .config import ModelConfig

AXIS = "tensor"
OUTPUTS, INPUTS, WHOLE = PartitionSpec(AXIS), PartitionSpec(None, AXIS), PartitionSpec()
DIVIDED = {
    "embedding": OUTPUTS,
    "head.weight": OUTPUTS,
    "qkv.weight": OUTPUTS,
    "qkv.bias": OUTPUTS,
    "gate_up.weight": OUTPUTS,
    "gate_up.bias": OUTPUTS,
    "out.weight": INPUTS,
    "down.weight": INPUTS,
}


class Split(NamedTuple):
    """Over which axis of a mesh a decoder is divided, and among how many devices."""

    axis: str
    devices: int

    def part(self, config: ModelConfig) -> ModelConfig:
        """The sizes that one device has."""
        n, whole = self.devices, repeat_kv_heads(config, self.devices)
        return dataclasses.replace(
            config,
            vocab_size=-(-config.vocab_size // n),
            intermediate_size=config.intermediate_size // n,
            num_heads=config.num_heads // n,
            num_kv_heads=whole.num_kv_heads // n,
        )


def check_split(config: ModelConfig, devices: int) -> None:
    """Raises ValueError unless the model can be divided among so many devices, saying what could be."""

    _check_size(devices)

    def divides(n: int) -> bool:
        return (
            config.num_heads % n == 0
            and config.intermediate_size % n == 0
            and (config.num_kv_heads % n == 0 or n % config.num_kv_heads == 0)
        )

    if not divides(devices):
        allowed = ", ".join(str(n) for n in range(1, config.num_heads + 1) if divides(n))
        raise ValueError(
            f"tensor_parallel_size={devices} does not divide this model: its {config.num_heads} attention heads and "
            f"feed-forward size {config.intermediate_size} must be multiples of it, and its {config.num_kv_heads} "
            f"key/value heads a multiple or a divisor; allowed: {allowed}"
        )


def _check_size(devices: int) -> None:
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(f"tensor_parallel_size must be an integer of at least 1, got {devices!r}")


def repeat_kv_heads(config: ModelConfig, devices: int) -> ModelConfig:
    """The model as so many devices hold it, each at least one KV head."""
    return dataclasses.replace(config, num_kv_heads=max(config.num_kv_heads, devices))


def make_mesh(devices: int, available: list[jax.Device] | None = None) -> Mesh:
    """The first so many devices. Raises ValueError if there are fewer."""
    _check_size(devices)
    available = jax.local_devices() if available is None else available
    if devices > len(available):
        raise ValueError(
            f"tensor_parallel_size={devices} needs as many devices, and there are {len(available)} of platform "
            f"{available[0].platform!r} (for tests a CPU can be several: jax.config.update('jax_num_cpu_devices', "
            f"{devices}) before JAX is first used)"
        )
    return Mesh(np.array(available[:devices]), (AXIS,))


def split_of(mesh: Mesh | None) -> Split | None:
    """How a model on this mesh is divided."""
    return None if mesh is None else Split(mesh.axis_names[0], mesh.size)


def param_spec(name: str) -> PartitionSpec:
    """The axis along which a parameter is sharded."""
    return DIVIDED.get(".".join(name.split(".")[-2:]), WHOLE)


def whole_shapes(parts: dict[str, jax.ShapeDtypeStruct], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """The global arrays' shapes and shardings from those of the parts that each device has."""

    def whole(name: str, part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = param_spec(name)
        divided = [*spec, *[None] * (len(part.shape) - len(spec))]
        shape = tuple(size * (mesh.size if axis else 1) for size, axis in zip(part.shape, divided, strict=True))
        return jax.ShapeDtypeStruct(shape, part.dtype, sharding=NamedSharding(mesh, spec))

    return {name: whole(name, part) for name, part in parts.items()}


def put_param(name: str, array: np.ndarray, config: ModelConfig, mesh: Mesh) -> jax.Array:
    """A whole parameter of the model, on its devices."""
    ordered = order_rows(name, array, config, mesh.size)
    return jax.device_put(ordered, NamedSharding(mesh, param_spec(name)))


def order_rows(name: str, array: np.ndarray, config: ModelConfig, devices: int) -> np.ndarray:
    """A whole parameter [out, ...] such that a cut into so many equal parts gives every device its own."""

    def cut(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(devices, -1, *array.shape[1:])

    if ".qkv." in name:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q_rows, k_rows, v_rows = np.split(array, [q, q + kv])
        total = repeat_kv_heads(config, devices).num_kv_heads
        heads = np.arange(total) * config.num_kv_heads // total  # of each place, the head that stands there

        def repeat(rows: np.ndarray) -> np.ndarray:
            return rows.reshape(config.num_kv_heads, config.head_dim, *array.shape[1:])[heads]

        parts = [cut(q_rows), cut(repeat(k_rows)), cut(repeat(v_rows))]
    elif ".gate_up." in name:
        parts = [cut(rows) for rows in np.split(array, 2)]
    elif param_spec(name) == OUTPUTS:
        return np.pad(array, ((0, -len(array) % devices), (0, 0)))
    else:
        return array
    return np.concatenate(parts, axis=1).reshape(-1, *array.shape[1:])


Place = Callable[[str, np.ndarray], jax.Array]


def placer(config: ModelConfig, mesh: Mesh | None) -> Place:
    """What puts parameters, read whole on the host, on the mesh; without one, on the default device."""
    if mesh is None:
        return lambda name, array: jax.device_put(array)
    return lambda name, array: put_param(name, array, config, mesh)
