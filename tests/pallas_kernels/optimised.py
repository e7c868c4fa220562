"""Programs compiled as users have them, for tests that read what the compiler made (see tests/conftest.py)."""

from __future__ import annotations

from typing import Any

import jax

OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": 3}
if jax.__version_info__ < (0, 11):  # newer ones do not know it
    OPTIONS["xla_cpu_use_fusion_emitters"] = True


def compile_optimised(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """The program with XLA's optimiser, whatever flags XLA was started with."""
    return lowered.compile(compiler_options=OPTIONS)
