"""Each way in which a Hugging Face folder can be wrong has its own clear error."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlt_jax.checkpoints_convert import CheckpointError, convert, open_checkpoint

NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def refuse(folder, *words):
    """Opening raises an error that has all the words; so does converting, which writes nothing."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert str(folder) in message
    for word in words:
        assert word in message, (word, message)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        convert(folder, folder.parent / "out")
    assert not [path for path in folder.parent.iterdir() if "out" in path.name]


def test_single_and_sharded_folders_open_alike(tiny_source, sharded):
    single, shards = open_checkpoint(tiny_source), open_checkpoint(sharded)
    assert (single.kind, shards.kind) == ("huggingface", "huggingface")
    assert single.config == shards.config
    for name in single.tensors:
        expected = single.read_tensor(name)
        assert expected.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(shards.read_tensor(name), expected)


def test_values_are_those_that_the_safetensors_library_reads(tiny_source):
    checkpoint = open_checkpoint(tiny_source)
    for name, expected in load_file(tiny_source / "model.safetensors").items():
        np.testing.assert_array_equal(checkpoint.read_tensor(name), expected)


def test_shards_may_be_links_as_in_the_hub_cache(sharded, tmp_path):
    (tmp_path / "blobs").mkdir()
    (sharded / FIRST).rename(tmp_path / "blobs" / "abc")
    (sharded / FIRST).symlink_to(tmp_path / "blobs" / "abc")
    assert open_checkpoint(sharded).read_tensor(NORM).shape == (32,)


def test_missing_tensor(source, edit_tensors):
    edit_tensors(source, lambda tensors: tensors.pop(NORM))
    refuse(source, "missing tensor", NORM)


def test_unexpected_tensor(source, edit_tensors):
    edit_tensors(source, lambda t: t.update({"model.extra": np.zeros(3, np.float32)}))
    refuse(source, "unexpected tensor", "model.extra", "model.safetensors")


def test_duplicate_tensor_across_files(source):
    tensors = load_file(source / "model.safetensors")
    save_file({NORM: tensors[NORM]}, source / "other.safetensors")
    refuse(source, "duplicate tensor", NORM, "model.safetensors", "other.safetensors")


def test_duplicate_tensor_across_shards(sharded):
    tensors = load_file(sharded / SECOND)
    save_file(tensors | {NORM: load_file(sharded / FIRST)[NORM]}, sharded / SECOND)
    refuse(sharded, "duplicate tensor", NORM, FIRST, SECOND)


def test_duplicate_tensor_in_the_index(sharded):
    text = (sharded / INDEX).read_text()
    entry = f'"{NORM}": "{FIRST}"'
    assert entry in text
    (sharded / INDEX).write_text(text.replace(entry, f"{entry}, {entry}"))
    refuse(sharded, "duplicate tensor", NORM, INDEX)


def test_duplicate_tensor_in_a_header(source):
    path = source / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip(b" ")
    entry = json.dumps({NORM: json.loads(header)[NORM]}, separators=(",", ":")).encode()
    header = header[:-1] + b"," + entry[1:]
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    refuse(source, "duplicate tensor", NORM, "model.safetensors")


def test_wrong_shape(source, edit_tensors):
    edit_tensors(source, lambda t: t.update({NORM: np.ones(33, ml_dtypes.bfloat16)}))
    refuse(source, NORM, "model.safetensors", "(33,)", "(32,)", "hidden_size")


def test_transposed_matrix_is_a_wrong_shape(source, edit_tensors):
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(source, lambda t: t.update({name: np.ascontiguousarray(t[name].T)}))
    refuse(source, name, "(32, 48)", "(48, 32)", "intermediate_size, hidden_size")


@pytest.mark.parametrize("dtype, code", [("int64", "I64"), ("float64", "F64"), ("uint8", "U8")])
def test_wrong_dtype(source, edit_tensors, dtype, code):
    edit_tensors(source, lambda t: t.update({NORM: np.ones(32, dtype)}))
    refuse(source, NORM, f"dtype {code}", "float32, float16, bfloat16")


def test_index_names_a_tensor_that_its_shard_lacks(sharded, edit_json):
    edit_json(sharded / INDEX, lambda raw: raw["weight_map"].update({"ghost": FIRST}))
    refuse(sharded, INDEX, "ghost", FIRST, "it is not")


def test_index_names_the_wrong_shard(sharded, edit_json):
    edit_json(sharded / INDEX, lambda raw: raw["weight_map"].update({NORM: SECOND}))
    refuse(sharded, INDEX, NORM, f"is in {SECOND}; it is in {FIRST}")


def test_shard_holds_a_tensor_that_the_index_lacks(sharded, edit_json):
    edit_json(sharded / INDEX, lambda raw: raw["weight_map"].pop(NORM))
    refuse(sharded, INDEX, "does not name tensor", NORM, FIRST)


def test_index_names_a_shard_that_does_not_exist(sharded):
    (sharded / SECOND).unlink()
    refuse(sharded, INDEX, SECOND, "does not exist")


def test_folder_has_a_shard_that_the_index_does_not_name(sharded):
    save_file({"x": np.zeros(1)}, sharded / "model-00003-of-00003.safetensors")
    refuse(sharded, INDEX, "does not name model-00003-of-00003.safetensors")


@pytest.mark.parametrize(
    "path", ["../evil.safetensors", "sub/a.safetensors", "{absolute}", "..\\a"]
)
def test_index_names_a_path_outside_the_folder(sharded, edit_json, tmp_path, path):
    target = tmp_path / "evil.safetensors"
    (sharded / "sub").mkdir()
    for copy in (target, sharded / "sub" / "a.safetensors"):  # refused although it exists
        copy.write_bytes((sharded / FIRST).read_bytes())
    path = path.replace("{absolute}", str(target))
    edit_json(sharded / INDEX, lambda raw: raw["weight_map"].update({NORM: path}))
    refuse(sharded, INDEX, NORM, repr(path), "inside the folder")


@pytest.mark.parametrize("value", [None, 7, ""])
def test_index_entry_that_is_no_file_name(sharded, edit_json, value):
    edit_json(sharded / INDEX, lambda raw: raw["weight_map"].update({NORM: value}))
    refuse(sharded, INDEX, NORM, repr(value))


@pytest.mark.parametrize("text, word", [("{", "JSON"), ("[]", "weight_map"), ("{}", "weight_map")])
def test_index_that_is_not_an_index(sharded, text, word):
    (sharded / INDEX).write_text(text)
    refuse(sharded, INDEX, word)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_file(source, kept):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refuse(source, "model.safetensors", "truncated")


@pytest.mark.parametrize("content", [b"PK\x03\x04" + bytes(200), b"<html>" * 50])
def test_file_that_is_not_safetensors(source, content):
    (source / "model.safetensors").write_bytes(content)
    refuse(source, "model.safetensors", "not a complete safetensors file")


def test_git_lfs_pointer(source):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"
    (source / "model.safetensors").write_bytes(pointer)
    refuse(source, "model.safetensors", "not a complete safetensors file")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pth", "model.pkl"])
def test_pickle_only(source, name):
    (source / "model.safetensors").rename(source / name)
    refuse(source, name, "pickle is not loaded", "convert it to safetensors")


def test_pickle_beside_safetensors_is_ignored(source):
    (source / "pytorch_model.bin").write_bytes(b"junk")
    assert open_checkpoint(source).tensors


def test_no_weights_at_all(source):
    (source / "model.safetensors").unlink()
    refuse(source, "no .safetensors file")


def test_no_config(source):
    (source / "config.json").unlink()
    refuse(source, "no config.json")


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("num_hidden_layers", 3, ["num_hidden_layers = 3", "2 layers"]),
        ("num_hidden_layers", 10**12, ["num_hidden_layers = 1000000000000", "2 layers"]),
        ("num_hidden_layers", 1, ["num_hidden_layers = 1", "2 layers"]),
        ("hidden_size", 64, ["(320, 32)", "(320, 64)", "vocab_size, hidden_size"]),
        ("vocab_size", 384, ["model.embed_tokens.weight", "(320, 32)", "(384, 32)"]),
        ("num_key_value_heads", 4, ["k_proj", "kv_heads x head_dim"]),
        ("head_dim", 8, ["q_proj", "heads x head_dim"]),
        ("intermediate_size", 64, ["gate_proj", "intermediate_size"]),
    ],
)
def test_config_and_tensors_disagree(source, edit_json, key, value, words):
    edit_json(source / "config.json", lambda raw: raw.update({key: value}))
    refuse(source, *words)


def test_config_that_cannot_be_honoured(source, edit_json):
    edit_json(source / "config.json", lambda raw: raw.update({"sliding_window": 128}))
    refuse(source, "config.json", "sliding_window = 128")


def test_config_that_is_not_json(source):
    (source / "config.json").write_text("{'a': 1}")
    refuse(source, "config.json", "JSON")
