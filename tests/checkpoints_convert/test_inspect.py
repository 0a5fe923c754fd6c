"""rlt-jax inspect: what it says of a checkpoint."""

import io
import json
import sys

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from rlt_jax.checkpoints_convert import (
    CheckpointError,
    inspect_checkpoint,
    render_checkpoint,
)
from rlt_jax.checkpoints_convert.inspect import kv_bytes_per_token
from rlt_jax.models.ouro_config import OuroConfig

OURO = {
    "rope_theta": 1e6,
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "max_position_embeddings": 65536,
    "total_ut_steps": 4,
}


@pytest.mark.parametrize(
    "layers, dtype, last_exited, shared",
    [
        (24, "bfloat16", 786_432, 196_608),
        (24, "float32", 1_572_864, 393_216),
        (48, "bfloat16", 1_572_864, 393_216),
    ],
)
def test_kv_bytes_per_token_of_the_released_models(layers, dtype, last_exited, shared):
    config = OuroConfig.from_dict(OURO | {"num_hidden_layers": layers})
    expected = {"last_exited": last_exited, "shared": shared}
    assert kv_bytes_per_token(config, dtype) == expected


@pytest.mark.parametrize("kind", ["huggingface", "orbax"])
def test_counts_are_those_of_the_tensors(tiny_source, tiny_converted, kind):
    info = inspect_checkpoint(tiny_source if kind == "huggingface" else tiny_converted)
    tensors = load_file(tiny_source / "model.safetensors")
    assert info.kind == kind
    assert info.tensor_count == len(tensors)
    assert info.parameter_count == sum(array.size for array in tensors.values())
    assert info.stored_bytes == sum(array.nbytes for array in tensors.values())
    assert info.dtypes == {"bfloat16": len(tensors)}
    assert info.kv_bytes_per_token == {"last_exited": 2 * 2 * 2 * 16 * 2 * 4, "shared": 256}
    assert (info.converted_from is not None) == (kind == "orbax")


def test_main_dtype_decides_the_kv_dtype(source, edit_tensors):
    def to_float32_but_norms(tensors):
        for name, array in tensors.items():
            if "norm" not in name:
                tensors[name] = array.astype(np.float32)

    edit_tensors(source, to_float32_but_norms)
    info = inspect_checkpoint(source)
    assert set(info.dtypes) == {"float32", "bfloat16"}
    assert info.kv_dtype == "float32"
    assert info.kv_bytes_per_token["shared"] == 512


def test_inspecting_reads_no_weights(tiny_converted, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)  # importing it would fail
    assert inspect_checkpoint(tiny_converted).tensor_count == 27


def test_rendering_shows_every_figure(tiny_converted, tiny_source):
    info = inspect_checkpoint(tiny_converted)
    text = io.StringIO()
    Console(file=text, width=200).print(render_checkpoint(info))
    config = json.loads((tiny_source / "config.json").read_text())
    for shown in (
        f"{info.parameter_count:,}",
        f"{info.stored_bytes:,}",
        "1,024 (bfloat16)",
        "256 (bfloat16)",
        "hidden_size",
        str(config["max_position_embeddings"]),
        str(tiny_source),
        "rlt-jax 0.1.0",
    ):
        assert shown in text.getvalue(), shown


def test_bad_path_has_the_errors_of_opening(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        inspect_checkpoint(tmp_path)
