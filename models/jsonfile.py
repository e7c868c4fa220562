"""Reading the JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from .errors import CheckpointError


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object from bytes; ``CheckpointError`` naming ``what`` otherwise."""
    try:
        value = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{what} is damaged (not JSON): {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is damaged: expected a JSON object, got {type(value).__name__}")
    return value


def read_object(file: Path, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in ``file``; {} if it is ``optional`` and absent."""
    if not file.is_file():
        if optional:
            return {}
        raise CheckpointError(f"{file} is missing")
    return parse_object(file.read_bytes(), str(file))
