"""Machines that are not here: compile for them with their real compilers, and read what the compilers say.

A TPU's compiler comes with the `libtpu` wheel (the extra "tpu"), a GPU's with jax's CUDA plugin ("cuda-compiler"), both
in an environment of their own, because they look for their devices when JAX starts. `prepare` is called before that.
"""

from __future__ import annotations

import functools
import importlib.resources
import importlib.util
import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding, use_abstract_mesh
from jpaged_models import make_mesh

from jpaged.chips import CHIPS

try:
    from jax.sharding import AbstractDevice
except ImportError:  # JAX 0.10
    from jax._src.mesh import AbstractDevice


class Target(NamedTuple):
    """Chips that a model is divided among: what JAX calls the machine they are in, and one by its maker's numbers."""

    platform: str  # as JAX names it when it lowers
    topology: str
    chips: int
    cores: int  # of a chip, as Pallas wants to know them
    memory_bytes: int  # of a chip
    bandwidth: float  # bytes/s of a chip
    flops: float  # bfloat16 products of a chip, 1/s


H200 = Target("cuda", "1x1x1", 1, 132, *CHIPS["h200"])
V5E = Target("tpu", "v5e:2x2", 1, 1, *CHIPS["v5e"])
V6E = Target("tpu", "v6e:2x2", 1, 1, *CHIPS["v6e"])
TARGETS = {
    "h200": H200,
    "h200x2": H200._replace(topology="1x1x2", chips=2),
    "h200x4": H200._replace(topology="1x1x4", chips=4),
    "h200x8": H200._replace(topology="1x1x8", chips=8),
    "v5e": V5E,
    "v5e-4": V5E._replace(chips=4),
    "v5e-8": V5E._replace(topology="v5e:2x4", chips=8),
    "v6e": V6E,
    "v6e-4": V6E._replace(chips=4),
    "v6e-8": V6E._replace(topology="v6e:2x4", chips=8),
}
# A module, and the extra that brings it.
NEEDS = {"tpu": ("libtpu", "tpu"), "cuda": ("jax_cuda13_plugin", "cuda-compiler")}


def prepare() -> None:
    """Tells JAX and the compilers not to look for devices. To be called before JAX is first used."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu: do not ask a cloud for its metadata,
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")  # nor complain of what that would have said;
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # the topology is what it compiles for
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # there is no chip for which to allow one process only
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the CUDA plugin: there is no driver
    jax.config.update("jax_platforms", "cpu")


def find_target(name: str) -> Target:
    """Raises ValueError for an unknown name, or if the target's compiler is not installed."""
    if name not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {name!r}")
    target = TARGETS[name]
    module, extra = NEEDS[target.platform]
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"target {name!r} needs the compiler for {target.platform}: pip install 'jpaged[{extra}]'")
    return target


@functools.lru_cache
def list_devices(target: Target) -> Sequence[Any]:
    """Devices to compile for. Kept, because those of another call would be other devices."""
    if target.platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices
    text = importlib.resources.files("jpaged.devices").joinpath("nvidia_h200.txtpb").read_text(encoding="utf-8")
    return topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=text, topology=target.topology
    ).devices


def find_mesh(target: Target) -> Mesh | None:
    """Its chips; None if there is but one."""
    return make_mesh(target.chips, list(list_devices(target))) if target.chips > 1 else None


def lower_for(target: Target, program: Any, *arguments: Any) -> jax.stages.Lowered:
    """A jitted program lowered for the target. arguments: trees of anything with a shape and a dtype.

    Those that have a sharding keep it; others are on the only chip, or on every one.
    """
    device, mesh = list_devices(target)[0], find_mesh(target)
    if mesh is not None:
        default = NamedSharding(mesh, PartitionSpec())

        def place(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or default)

        return program.trace(*jax.tree.map(place, arguments)).lower(lowering_platforms=(target.platform,))
    sharding = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    abstract = AbstractDevice(device.device_kind, target.cores, target.platform)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        return program.trace(*shapes).lower(lowering_platforms=(target.platform,))


class Report(NamedTuple):
    """What a compiler says of a program; bytes are of one chip."""

    argument_bytes: int
    alias_bytes: int  # of arguments whose memory the results take
    temporary_bytes: int
    kernels: int  # of ours that it calls
    copies: list[str]  # lines of HLO that copy what should not be
    has_text: bool  # False: this jaxlib cannot read the HLO of that compiler, and `kernels` are those before compiling


KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|__gpu\$xla\.gpu\.triton|triton_kernel_call_ffi)"')
LOWERED_KERNEL = re.compile(r"@(?:tpu_custom_call|\"?__gpu\$xla\.gpu\.triton|triton_kernel_call_ffi)")


def inspect(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, sizes_kept: Collection[int]) -> Report:
    """What the compiler says; `sizes_kept`: how many elements those arrays have that must not be copied."""
    memory: Any = compiled.memory_analysis()
    sizes = memory.argument_size_in_bytes, memory.alias_size_in_bytes, memory.temp_size_in_bytes
    try:
        text = compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:
        return Report(*sizes, len(LOWERED_KERNEL.findall(lowered.as_text())), [], False)
    return Report(*sizes, len(KERNEL.findall(text)), list(find_copies(text, sizes_kept)), True)


def find_copies(hlo: str, sizes: Collection[int]) -> Iterator[str]:
    """Lines that write a new array of one of these numbers of elements which nothing but moves or converts another.

    Told by their size, because a copy is often made to have another shape. Fused computations are passed over: what
    they make in between is never in memory. So are copies to fast memory, which a TPU's layouts call S(1).
    """
    fused = set(re.findall(r"fusion\([^\n]*calls=%?([\w.-]+)", hlo))
    inside = ""
    moves = "copy|convert|bitcast-convert|transpose"
    moving = re.compile(rf"\s*(?:ROOT )?%?[\w.-]+ = \w+\[([\d,]*)\]\S* (?:{moves})\(")
    for line in hlo.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if header:
            inside = header[1]
        made = moving.match(line)
        if made and "S(1)" in line.split(" = ")[1].split(" ")[0]:
            continue
        if made and inside not in fused and math.prod(int(n) for n in made[1].split(",") if n) in sizes:
            yield line.strip()[:200]
