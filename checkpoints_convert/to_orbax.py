"""Hugging Face folder or hub id -> self-contained Orbax folder."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from rlt_jax.checkpoints_convert.checkpoint import open_checkpoint
from rlt_jax.checkpoints_convert.errors import CheckpointError
from rlt_jax.checkpoints_convert.host_memory import return_freed_memory
from rlt_jax.checkpoints_convert.manifest import Manifest, converter_version
from rlt_jax.checkpoints_convert.new_folder import (
    SIDE_FILES,
    check_apart,
    check_destination,
    copy_side_files,
    file_sizes,
    new_folder,
)
from rlt_jax.checkpoints_convert.orbax_folder import (
    ITEMS,
    OrbaxFolder,
    open_orbax_folder,
    read_item,
    write_item,
)
from rlt_jax.checkpoints_convert.progress import byte_progress
from rlt_jax.checkpoints_convert.safetensors_folder import HuggingFaceFolder
from rlt_jax.checkpoints_convert.tensors import DTYPES, TensorInfo, expected_items
from rlt_jax.config import DTYPES as CONVERTED_TO


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str | None = None,
    verify: bool = False,
    force: bool = False,
    show_progress: bool = False,
) -> OrbaxFolder:
    """Converts item by item; host memory stays within 3 x the largest item + 256 MiB.

    dtype: "bfloat16" or "float32" casts every tensor; None keeps each tensor's bits. verify:
    reload what was written and compare it bit for bit before the folder appears. force: replace
    an existing checkpoint once the new one is complete.

    Raises CheckpointError on bad input, an existing destination, a full disk or a failed
    verification; nothing that loads is left behind then.
    """
    if dtype is not None and dtype not in CONVERTED_TO:
        choices = ", ".join(CONVERTED_TO)
        raise CheckpointError(f"dtype = {dtype!r}: must be one of {choices}, or None")
    destination = check_destination(Path(destination), force)
    checkpoint = open_checkpoint(source)
    if not isinstance(checkpoint, HuggingFaceFolder):
        raise CheckpointError(f"{source}: is converted already; give a Hugging Face folder")
    check_apart(checkpoint.folder, destination)

    tensors = _converted_tensors(checkpoint, dtype)
    item_bytes = {
        item: sum(tensors[spec.name].nbytes for spec in specs)
        for item, specs in expected_items(checkpoint.config).items()
    }
    total = sum(item_bytes.values())

    def read_source(item: str) -> dict[str, np.ndarray]:
        return {
            name: array.astype(DTYPES[tensors[name].dtype], copy=False)
            for name, array in checkpoint.read_item(item).items()
        }

    hashed = [checkpoint.folder / name for name in SIDE_FILES]
    hashed = [path for path in hashed if path.is_file()] + list(checkpoint.weight_files)
    steps = total * (2 if verify else 1) + sum(path.stat().st_size for path in hashed)
    with (
        new_folder(destination, total) as folder,
        byte_progress(steps, show_progress) as advance,
        return_freed_memory(),
    ):
        copy_side_files(checkpoint.folder, folder)
        if dtype is not None:
            _set_config_dtype(folder / "config.json", dtype)
        (folder / ITEMS).mkdir()
        for item, size in item_bytes.items():
            write_item(folder / ITEMS / item, read_source(item))
            advance(f"convert {item}", size)
        if verify:
            for item, size in item_bytes.items():
                _compare(folder / ITEMS / item, read_source(item))
                advance(f"verify {item}", size)
        Manifest(
            source=str(source),
            source_files={path.name: _digest(path, advance) for path in hashed},
            tensors=tensors,
            files=file_sizes(folder),
            converter_version=converter_version(),
        ).write(folder)
    return open_orbax_folder(destination)


def _converted_tensors(checkpoint: HuggingFaceFolder, dtype: str | None) -> dict[str, TensorInfo]:
    return {
        spec.name: dataclasses.replace(
            checkpoint.tensors[spec.name],
            dtype=dtype or checkpoint.tensors[spec.name].dtype,
            file=item,
        )
        for item, specs in expected_items(checkpoint.config).items()
        for spec in specs
    }


def _set_config_dtype(path: Path, dtype: str) -> None:
    """Keeps config.json's own word on the weights' dtype true after a cast."""
    config = json.loads(path.read_text(encoding="utf-8"))
    keys = {"torch_dtype", "dtype"} & set(config)
    config |= dict.fromkeys(keys or {"torch_dtype"}, dtype)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _digest(path: Path, advance: Callable[[str, int], None]) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = path.stat().st_size
    advance("hash source", size)
    return {"bytes": size, "sha256": digest}


def _compare(path: Path, expected: Mapping[str, np.ndarray]) -> None:
    """Raises CheckpointError unless the stored item has exactly the expected bits."""
    stored = read_item(path)
    for name, array in expected.items():
        bits = np.dtype(f"u{array.dtype.itemsize}")
        found = stored.get(name)
        if (
            found is None
            or (found.dtype, found.shape) != (array.dtype, array.shape)
            or not np.array_equal(found.view(bits), array.view(bits))
        ):
            raise CheckpointError(f"{path}: tensor {name} does not read back bit for bit")
