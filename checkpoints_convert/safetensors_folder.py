"""Hugging Face folders: config.json beside one or several safetensors files.

Everything that headers and the index can tell is checked before any data is read. Data is then
mapped, not read: a tensor costs no anonymous memory until it is copied.
"""

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from rlt_jax.checkpoints_convert.errors import CheckpointError
from rlt_jax.checkpoints_convert.tensors import (
    DTYPES,
    TensorInfo,
    check_tensors,
    expected_items,
)
from rlt_jax.models.ouro_config import OuroConfig

INDEX_NAME = "model.safetensors.index.json"

_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclasses.dataclass(frozen=True)
class HuggingFaceFolder:
    """A checked Hugging Face folder. offsets: tensor name to its first byte in its file."""

    folder: Path
    config: OuroConfig
    tensors: Mapping[str, TensorInfo]
    offsets: Mapping[str, int]
    kind: str = "huggingface"

    @property
    def weight_files(self) -> tuple[Path, ...]:
        return tuple(self.folder / name for name in sorted({t.file for t in self.tensors.values()}))

    def read_tensor(self, name: str) -> np.ndarray:
        """A read-only view of the file's bytes."""
        info = self.tensors[name]
        path = self.folder / info.file
        try:
            return np.memmap(path, DTYPES[info.dtype], "r", self.offsets[name], info.shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from error

    def read_item(self, item: str) -> dict[str, np.ndarray]:
        """An item's tensors by name."""
        return {
            spec.name: self.read_tensor(spec.name) for spec in expected_items(self.config)[item]
        }


def open_huggingface_folder(folder: Path) -> HuggingFaceFolder:
    """Reads the config, the index and every header; raises CheckpointError on any disagreement."""
    config = read_config(folder)
    index = _read_index(folder)
    files = sorted(set(index.values())) if index is not None else _weight_files(folder)
    tensors: dict[str, TensorInfo] = {}
    offsets: dict[str, int] = {}
    for file in files:
        for info, offset in read_header(folder / file):
            if info.name in tensors:
                raise CheckpointError(
                    f"{folder}: duplicate tensor {info.name}: in {tensors[info.name].file} and in "
                    f"{file}"
                )
            tensors[info.name] = info
            offsets[info.name] = offset
    if index is not None:
        _check_index(folder, index, tensors)
    check_tensors(folder, tensors, config)
    return HuggingFaceFolder(folder, config, tensors, offsets)


def read_config(folder: Path) -> OuroConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: has no config.json")
    try:
        return OuroConfig.from_json_file(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def read_header(path: Path) -> list[tuple[TensorInfo, int]]:
    """Each tensor of a safetensors file with the offset of its first byte in the file.

    The safetensors library checks the header: sizes that fit shapes, offsets without holes or
    overlaps that end exactly at the end of the file.
    """
    try:
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length), object_pairs_hook=_unique_keys(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a complete safetensors file (truncated, or of another format): {error}"
        ) from error
    found = []
    for name, entry in header.items():
        if name != "__metadata__":
            dtype = _DTYPE_NAMES.get(entry["dtype"], entry["dtype"])
            info = TensorInfo(name, tuple(entry["shape"]), dtype, path.name)
            found.append((info, 8 + length + entry["data_offsets"][0]))
    return found


def _unique_keys(path: Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """For json.loads: an object whose keys must not repeat."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, count in collections.Counter(key for key, _ in pairs).items():
            if count > 1:
                raise CheckpointError(f"{path}: duplicate tensor {key}: named {count} times")
        return dict(pairs)

    return unique


def _weight_files(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir())
    if files := [name for name in names if name.endswith(".safetensors")]:
        return files
    if pickles := [name for name in names if name.endswith(_PICKLE_SUFFIXES)]:
        raise CheckpointError(
            f"{folder}: {pickles[0]} is a pickle, and pickle is not loaded; convert it to "
            "safetensors first"
        )
    raise CheckpointError(f"{folder}: has no .safetensors file")


def _read_index(folder: Path) -> dict[str, str] | None:
    """The index's weight_map (tensor name to file name), or None where there is no index."""
    path = folder / INDEX_NAME
    if not path.exists():
        return None

    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys(path))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map = {weight_map!r}: must be a non-empty object")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file:
            raise CheckpointError(
                f"{path}: weight_map[{name!r}] = {file!r}: must be the name of a file inside the "
                "folder"
            )
        if not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: weight_map[{name!r}] = {file!r}: must be a .safetensors file"
            )
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise CheckpointError(f"{path}: names {file}, which does not exist")
    return weight_map


def _check_index(folder: Path, index: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    path = folder / INDEX_NAME
    for name, file in index.items():
        if name not in tensors:
            raise CheckpointError(f"{path}: says that tensor {name} is in {file}; it is not")
        if tensors[name].file != file:
            raise CheckpointError(
                f"{path}: says that tensor {name} is in {file}; it is in {tensors[name].file}"
            )
    for name, info in tensors.items():
        if name not in index:
            raise CheckpointError(f"{path}: does not name tensor {name}, which is in {info.file}")
    for file in sorted(folder.glob("model*.safetensors")):
        if file.name not in index.values():
            raise CheckpointError(f"{path}: does not name {file.name}, which is in the folder")
