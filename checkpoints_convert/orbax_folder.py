"""Converted checkpoints: one Orbax item per layer, beside the config and tokenizer files.

    config.json, tokenizer files, chat template     as in the source
    items/embed, items/layers.00, ..., items/head   an Orbax PyTree each: tensor name to array
    manifest.json                                   written last

Orbax is imported only by what reads or writes an item.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rlt_jax.checkpoints_convert.errors import CheckpointError
from rlt_jax.checkpoints_convert.manifest import MANIFEST_NAME, Manifest
from rlt_jax.checkpoints_convert.safetensors_folder import read_config
from rlt_jax.checkpoints_convert.tensors import TensorInfo, check_tensors, expected_items
from rlt_jax.models.ouro_config import OuroConfig

ITEMS = "items"


@dataclasses.dataclass(frozen=True)
class OrbaxFolder:
    """A checked folder that `rlt-jax convert` wrote."""

    folder: Path
    config: OuroConfig
    manifest: Manifest
    kind: str = "orbax"

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.manifest.tensors

    def read_item(self, item: str) -> dict[str, np.ndarray]:
        """An item's tensors by name, as new host arrays."""
        path = self.folder / ITEMS / item
        tensors = read_item(path)
        expected = [spec.name for spec in expected_items(self.config)[item]]
        if set(tensors) != set(expected):
            names = ", ".join(sorted(set(tensors) ^ set(expected)))
            raise CheckpointError(f"{path}: disagrees with manifest.json about tensor {names}")
        for name, array in tensors.items():
            info = self.tensors[name]
            if (array.shape, array.dtype.name) != (info.shape, info.dtype):
                raise CheckpointError(
                    f"{path}: tensor {name} is {array.dtype.name}{list(array.shape)}; "
                    f"manifest.json says {info.dtype}{list(info.shape)}"
                )
        return {name: tensors[name] for name in expected}

    def read_tensor(self, name: str) -> np.ndarray:
        """One tensor; reads its whole item."""
        return self.read_item(self.tensors[name].file)[name]


def looks_like_orbax_folder(folder: Path) -> bool:
    """Whether the folder is one of ours, even a half-written one."""
    return (folder / MANIFEST_NAME).exists() or (folder / ITEMS).exists()


def open_orbax_folder(folder: Path) -> OrbaxFolder:
    """Checks the manifest, the presence and size of every file, and the tensors' shapes."""
    if not (folder / MANIFEST_NAME).exists():
        raise CheckpointError(
            f"{folder}: half written: has no {MANIFEST_NAME}; delete it and convert again"
        )
    manifest = Manifest.read(folder)
    for file, size in manifest.files.items():
        path = folder / file
        if not path.is_file():
            raise CheckpointError(f"{folder}: incomplete: {file} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{folder}: incomplete: {file} has {path.stat().st_size} bytes; manifest.json says "
                f"{size}"
            )
    config = read_config(folder)
    check_tensors(folder, manifest.tensors, config)
    for item, specs in expected_items(config).items():
        for spec in specs:
            if manifest.tensors[spec.name].file != item:
                stored = manifest.tensors[spec.name].file
                raise CheckpointError(
                    f"{folder / MANIFEST_NAME}: tensor {spec.name} is in item {stored!r}; must be "
                    f"in {item!r}"
                )
    return OrbaxFolder(folder, config, manifest)


def write_item(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Stores one item, uncompressed: weights hardly shrink, and compressing them costs time."""
    import orbax.checkpoint as ocp

    try:
        with ocp.PyTreeCheckpointer(use_compression=False) as checkpointer:
            checkpointer.save(path.absolute(), dict(tensors))
    except Exception as error:  # whatever Orbax and TensorStore raise, a full disk included
        raise CheckpointError(f"{path}: cannot be written by Orbax: {error}") from error


def read_item(path: Path) -> dict[str, np.ndarray]:
    """One item's tensors by name, as new host arrays."""
    import orbax.checkpoint as ocp

    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            tensors = checkpointer.restore(path.absolute())
        return {name: np.asarray(array) for name, array in tensors.items()}
    except Exception as error:  # whatever Orbax and TensorStore raise on damaged files
        raise CheckpointError(f"{path}: cannot be read by Orbax: {error}") from error
