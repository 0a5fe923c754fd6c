"""Opens whatever holds a checkpoint: a Hugging Face folder, an Orbax folder, a hub id, or the
name of the packaged model."""

import os
from pathlib import Path

from rlt_jax.checkpoints_convert.errors import CheckpointError
from rlt_jax.checkpoints_convert.hub import download, is_hub_id
from rlt_jax.checkpoints_convert.new_folder import is_temporary
from rlt_jax.checkpoints_convert.orbax_folder import (
    OrbaxFolder,
    looks_like_orbax_folder,
    open_orbax_folder,
)
from rlt_jax.checkpoints_convert.safetensors_folder import (
    HuggingFaceFolder,
    open_huggingface_folder,
)
from rlt_jax.packaged_model import NAME, packaged_folder

# Both have .kind, .folder, .config, .tensors, .read_tensor(name) and .read_item(item).
Checkpoint = HuggingFaceFolder | OrbaxFolder


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Opens and checks a checkpoint without reading its data.

    source: a folder (as Hugging Face or `rlt-jax convert` writes it), a hub id org/name, which
    is downloaded when huggingface_hub is installed, or "ouro-tiny". An existing folder wins over
    a hub id, never over "ouro-tiny" (see resolve_folder).
    Raises CheckpointError naming the file, the tensor or field, and the rule that it breaks.
    """
    folder = resolve_folder(source)
    if is_temporary(folder):
        raise CheckpointError(
            f"{folder}: half written: the temporary folder of an interrupted conversion; delete it"
        )
    try:
        if looks_like_orbax_folder(folder):
            return open_orbax_folder(folder)
        return open_huggingface_folder(folder)
    except OSError as error:
        path = error.filename or folder
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def resolve_folder(source: str | Path, *, weights: bool = True) -> Path:
    """The folder that `source` names, downloaded if it is a hub id (without the weights, where
    only the tokenizer is wanted).

    The string "ouro-tiny" always means the model that is installed with rlt-jax, even beside a
    folder of that name: write "./ouro-tiny" (or give a Path) for the folder.
    """
    if source == NAME:
        return _packaged_model()
    path = Path(os.path.expanduser(source))
    if str(source) and path.is_dir():
        return path
    if str(source) and path.exists():
        raise CheckpointError(f"{source}: is a file; give the folder that holds the checkpoint")
    if is_hub_id(str(source)):
        return download(str(source), weights)
    raise CheckpointError(
        f"{str(source)!r}: neither an existing folder nor a Hugging Face hub id (org/name)"
    )


def _packaged_model() -> Path:
    folder = packaged_folder()
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{NAME!r}: this installation has no packaged model ({folder}); "
            "install rlt-jax with its package data, or give a checkpoint's folder"
        )
    return folder
