"""Orbax folder -> Hugging Face folder of sharded safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from rlt_jax.checkpoints_convert.checkpoint import open_checkpoint
from rlt_jax.checkpoints_convert.errors import CheckpointError
from rlt_jax.checkpoints_convert.host_memory import return_freed_memory
from rlt_jax.checkpoints_convert.new_folder import (
    check_apart,
    check_destination,
    copy_side_files,
    new_folder,
)
from rlt_jax.checkpoints_convert.orbax_folder import OrbaxFolder
from rlt_jax.checkpoints_convert.progress import byte_progress
from rlt_jax.checkpoints_convert.safetensors_folder import (
    INDEX_NAME,
    HuggingFaceFolder,
    open_huggingface_folder,
)
from rlt_jax.checkpoints_convert.tensors import expected_items


def export(
    source: str | Path,
    destination: str | Path,
    *,
    force: bool = False,
    show_progress: bool = False,
) -> HuggingFaceFolder:
    """Writes one shard per item, so that host memory stays within 3 x the largest item.

    The bits, the config and the tokenizer files are those of the Orbax folder. Raises
    CheckpointError as convert() does, and leaves nothing behind then.
    """
    destination = check_destination(Path(destination), force)
    checkpoint = open_checkpoint(source)
    if not isinstance(checkpoint, OrbaxFolder):
        raise CheckpointError(f"{source}: is a Hugging Face folder already; give an Orbax folder")
    check_apart(checkpoint.folder, destination)

    items = expected_items(checkpoint.config)
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    weight_map: dict[str, str] = {}
    with (
        new_folder(destination, total) as folder,
        byte_progress(total, show_progress) as advance,
        return_freed_memory(),
    ):
        copy_side_files(checkpoint.folder, folder)
        for number, (item, specs) in enumerate(items.items(), start=1):
            shard = f"model-{number:05d}-of-{len(items):05d}.safetensors"
            _write_shard(folder / shard, checkpoint.read_item(item))
            weight_map |= {spec.name: shard for spec in specs}
            advance(f"export {item}", sum(checkpoint.tensors[spec.name].nbytes for spec in specs))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX_NAME).write_text(text, encoding="utf-8")
        for path in folder.iterdir():  # safetensors makes its files private to the user
            path.chmod((folder / INDEX_NAME).stat().st_mode)
    return open_huggingface_folder(destination)


def _write_shard(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
