"""A refusal that takes effect only if it is lowered for a device.

Where the platform decides which kernel runs, every platform's kernel is traced, and what one of them lacks must not
keep the others from running. So a `ValueError` of a kernel becomes an operation, which raises it when a program that
needs it is lowered.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

_refuse = Primitive("paged_refusal")
_refuse.multiple_results = True


def refuse(message: str, like: Any) -> Any:
    """A tree like `like`, of arrays' shapes and dtypes, that cannot be computed: ValueError(message) instead."""
    leaves, tree = jax.tree.flatten(like)
    shapes = tuple((x.shape, x.dtype) for x in leaves)
    return jax.tree.unflatten(tree, _refuse.bind(message=message, shapes=shapes))


@_refuse.def_abstract_eval
def _(*, message: str, shapes: tuple) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in shapes]


@_refuse.def_impl
def _(*, message: str, shapes: tuple) -> NoReturn:
    raise ValueError(message)


def _lower(context: mlir.LoweringRuleContext, *, message: str, shapes: tuple) -> NoReturn:
    raise ValueError(message)


mlir.register_lowering(_refuse, _lower)
