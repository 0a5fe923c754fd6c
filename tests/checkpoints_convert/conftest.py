"""A tiny Ouro checkpoint, its conversion, and ways to damage a copy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from examples.make_random_checkpoint import make_random_checkpoint
from rlt_jax.checkpoints_convert import convert

TINY = {
    "hidden": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "intermediate": 48,
    "max_positions": 64,
}


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory) -> Path:
    """A Hugging Face folder in bfloat16; never written to."""
    return make_random_checkpoint(tmp_path_factory.mktemp("tiny") / "source", **TINY)


@pytest.fixture(scope="session")
def tiny_converted(tiny_source, tmp_path_factory) -> Path:
    """The same as an Orbax folder; never written to."""
    folder = tmp_path_factory.mktemp("tiny") / "converted"
    convert(tiny_source, folder)
    return folder


@pytest.fixture
def source(tiny_source, tmp_path) -> Path:
    """A Hugging Face folder to damage."""
    return Path(shutil.copytree(tiny_source, tmp_path / "source"))


@pytest.fixture
def converted(tiny_converted, tmp_path) -> Path:
    """An Orbax folder to damage."""
    return Path(shutil.copytree(tiny_converted, tmp_path / "converted"))


@pytest.fixture
def edit_tensors() -> Callable:
    """edit_tensors(folder, change): rewrites model.safetensors after change(tensors)."""

    def edit(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


@pytest.fixture
def edit_json() -> Callable:
    """edit_json(path, change): rewrites a JSON file after change(content)."""

    def edit(path: Path, change: Callable[[dict], object]) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return edit


@pytest.fixture
def sharded(source) -> Path:
    """A Hugging Face folder of two shards with an index, to damage."""
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map = {name: shards["layers.1" in name or "head" in name] for name in tensors}
    for shard in shards:
        part = {name: tensors[name] for name in tensors if weight_map[name] == shard}
        save_file(part, source / shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    return source
