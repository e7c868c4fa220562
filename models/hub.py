"""Models by their Hugging Face hub id, from the network or from huggingface-hub's cache."""

import re
from pathlib import Path

from .errors import CheckpointError

_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form "owner/model"."""
    return _ID.fullmatch(name) is not None


def download(model_id: str) -> Path:
    """The local folder of a hub model, brought up to date if the hub can be reached, else as cached.

    Raises ``CheckpointError`` if it can be had from neither.
    """
    from huggingface_hub import snapshot_download  # takes a while to import, and most loads do not need it

    try:
        return Path(snapshot_download(model_id, allow_patterns=_PATTERNS))
    # What a missing network raises depends on the library's version and on proxies: so ask the cache always
    except Exception as online:
        try:
            return Path(snapshot_download(model_id, allow_patterns=_PATTERNS, local_files_only=True))
        except Exception as offline:
            raise CheckpointError(
                f"{model_id!r} is neither a local path, nor in the Hugging Face cache ({offline}), "
                f"nor to be had from the hub ({type(online).__name__}: {online})"
            ) from online
