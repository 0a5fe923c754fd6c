"""manifest.json of a converted checkpoint. It is written last: without it nothing loads."""

import dataclasses
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rlt_jax.checkpoints_convert.errors import CheckpointError
from rlt_jax.checkpoints_convert.tensors import TensorInfo

MANIFEST_NAME = "manifest.json"
FORMAT = "rlt-jax-orbax"
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a converted folder holds and where it came from.

    source: as given to the converter. source_files: name to {"bytes", "sha256"}.
    tensors: by name; a tensor's `file` is its item. files: every file of the folder but the
    manifest, by relative path, to its size in bytes.
    """

    source: str
    source_files: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, int]
    converter_version: str
    format_version: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        content = {
            "format": FORMAT,
            "format_version": self.format_version,
            "converter_version": self.converter_version,
            "source": self.source,
            "source_files": dict(self.source_files),
            "tensors": {
                name: {"item": info.file, "shape": list(info.shape), "dtype": info.dtype}
                for name, info in self.tensors.items()
            },
            "files": dict(self.files),
        }
        (folder / MANIFEST_NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises CheckpointError when the manifest is damaged or newer than this version."""
        path = folder / MANIFEST_NAME
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise CheckpointError(f"{path}: not a manifest of rlt-jax (format must be {FORMAT!r})")
        version = raw.get("format_version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise CheckpointError(f"{path}: format_version = {version!r}: must be an integer >= 1")
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version = {version}: written by a newer rlt-jax "
                f"({raw.get('converter_version')}); this one reads up to {FORMAT_VERSION}: upgrade "
                "it or convert again"
            )
        try:
            return cls(
                source=str(raw["source"]),
                source_files=dict(raw["source_files"]),
                tensors={name: _tensor(name, entry) for name, entry in raw["tensors"].items()},
                files={_relative(file): int(size) for file, size in raw["files"].items()},
                converter_version=str(raw["converter_version"]),
                format_version=version,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: damaged manifest: {error!r}") from error


def converter_version() -> str:
    return importlib.metadata.version("rlt-jax")


def _tensor(name: str, entry: Mapping[str, Any]) -> TensorInfo:
    shape = tuple(int(size) for size in entry["shape"])
    return TensorInfo(name, shape, str(entry["dtype"]), str(entry["item"]))


def _relative(file: str) -> str:
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"files: {file!r} lies outside the folder")
    return file
