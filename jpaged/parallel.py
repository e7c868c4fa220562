"""Programs run by several devices at once, each on its part of a divided model (models/split.py).

A whole program is the body of one `shard_map`: every device has its KV heads of the pool and its part of the weights.
The allocator, block tables and sampling are the same on all of them and computed by each. Devices speak to one another
only where the decoder says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jpaged_models import param_spec
from jpaged_models.split import AXIS

from jpaged.state import EngineState

PARAMS = "params"  # stands for the specs of a model's parameters
SAME = P()  # on every device
CACHE = P(None, AXIS)  # pages [N, Hkv, B, D] and scales [N, Hkv, B]
CONTENT = P(None, None, AXIS)  # of blocks, [K, n, Hkv, ...]
STATE = EngineState(CACHE, *[SAME] * (len(EngineState._fields) - 1))  # type: ignore[arg-type]


def on_all(function: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """The function, run by every device of the mesh; without one, as it is.

    Specs are prefixes of the trees of arguments and results. PARAMS may be among `in_specs`.
    """
    if mesh is None:
        return function

    def run(*arguments: Any) -> Any:
        specs = in_specs
        if isinstance(in_specs, tuple):
            specs = tuple(
                {name: param_spec(name) for name in argument} if spec is PARAMS else spec
                for spec, argument in zip(in_specs, arguments, strict=True)
            )
        # check_vma: what is the same on all devices need not be proved to be.
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)(*arguments)

    return run


def state_shardings(mesh: Mesh, state: EngineState) -> EngineState:
    """Where each array of a state is."""
    return EngineState(
        *(
            jax.tree.map(lambda _, spec=spec: NamedSharding(mesh, spec), part)
            for spec, part in zip(STATE, state, strict=True)
        )
    )
