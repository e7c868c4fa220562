"""JAX's persistent compilation cache, on by default so that the second start takes seconds."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def default_cache_dir() -> Path:
    """The user's cache folder for compiled programs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jpaged" / "xla"


def enable_compilation_cache(folder: str | Path | None = None) -> None:
    """Keep compiled programs in `folder`. A cache that the process has configured already is left as it is."""
    if folder is None:
        if jax.config.values["jax_compilation_cache_dir"] is not None:
            return
        folder = default_cache_dir()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
