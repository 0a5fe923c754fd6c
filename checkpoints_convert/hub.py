"""Hugging Face hub ids; huggingface_hub is optional."""

import re
from pathlib import Path

from rlt_jax.checkpoints_convert.errors import CheckpointError

# What a checkpoint needs and nothing that can carry code or pickles.
CONFIG_FILES = ("*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt")
WEIGHT_FILES = ("*.safetensors",)

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def is_hub_id(name: str) -> bool:
    """Whether the name has the form org/name."""
    return _HUB_ID.fullmatch(name) is not None


def download(hub_id: str, weights: bool = True) -> Path:
    """The local folder of a hub checkpoint's snapshot, downloaded unless it is cached."""
    patterns = [*CONFIG_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{hub_id}: no such folder, and as a hub id it needs huggingface_hub "
            "(pip install huggingface_hub)"
        ) from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as error:  # network, authorisation, no such id: the hub's many classes
        raise CheckpointError(
            f"{hub_id}: no such folder, and the hub could not give it: {error}"
        ) from error
