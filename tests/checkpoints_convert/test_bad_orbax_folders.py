"""Each way in which a converted folder can be wrong has its own clear error."""

import shutil

import pytest

from rlt_jax.checkpoints_convert import CheckpointError, load_params, open_checkpoint

NORM = "model.norm.weight"


def refuse(folder, *words):
    with pytest.raises(CheckpointError) as caught:
        load_params(open_checkpoint(folder))
    for word in (str(folder), *words):
        assert word in str(caught.value), (word, str(caught.value))


def test_manifest_from_a_newer_version(converted, edit_json):
    newer = {"format_version": 2, "converter_version": "9.9", "surprise": 1}
    edit_json(converted / "manifest.json", lambda raw: raw.update(newer))
    refuse(converted, "manifest.json", "format_version = 2", "newer rlt-jax (9.9)", "upgrade")


def test_half_written_folder(converted):
    (converted / "manifest.json").unlink()
    refuse(converted, "half written", "manifest.json")


def test_temporary_folder_of_an_interrupted_conversion(converted):
    temporary = converted.rename(converted.parent / ".out.tmp-0123abcd")
    refuse(temporary, "half written", "temporary folder")


def test_missing_item(converted):
    shutil.rmtree(converted / "items" / "layers.01")
    refuse(converted, "incomplete", "items/layers.01", "missing")


@pytest.mark.parametrize("name", ["tokenizer.json", "items/head/_METADATA"])
def test_missing_file(converted, name):
    (converted / name).unlink()
    refuse(converted, "incomplete", f"{name} is missing")


def test_truncated_file(converted):
    largest = max((converted / "items" / "layers.00").rglob("*"), key=lambda p: p.stat().st_size)
    size = largest.stat().st_size
    largest.write_bytes(largest.read_bytes()[:-1])
    name = str(largest.relative_to(converted))
    refuse(converted, "incomplete", name, f"{size - 1} bytes", f"says {size}")


def test_damage_that_keeps_the_size_is_an_error_of_orbax(converted):
    path = converted / "items" / "layers.01" / "_METADATA"
    path.write_bytes(bytes(path.stat().st_size))
    refuse(converted, "items/layers.01", "cannot be read by Orbax")


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("shape", [33], ["(33,)", "(32,)"]),
        ("dtype", "int64", ["int64", "must be one of"]),
        ("dtype", "float32", ["items/head", NORM, "bfloat16[32]", "float32[32]"]),
        ("item", "embed", ["'embed'", "'head'"]),
    ],
)
def test_manifest_and_tensors_disagree(converted, edit_json, field, value, words):
    edit_json(converted / "manifest.json", lambda raw: raw["tensors"][NORM].update({field: value}))
    refuse(converted, NORM, *words)


def test_manifest_lacks_a_tensor(converted, edit_json):
    edit_json(converted / "manifest.json", lambda raw: raw["tensors"].pop(NORM))
    refuse(converted, "missing tensor", NORM)


def test_item_of_another_checkpoint(converted, edit_json):
    """Sizes fit, names do not."""
    items = converted / "items"
    shutil.rmtree(items / "layers.01")
    shutil.copytree(items / "layers.00", items / "layers.01")

    def forget_files(raw):
        raw["files"] = {k: v for k, v in raw["files"].items() if "layers.01" not in k}

    edit_json(converted / "manifest.json", forget_files)
    refuse(converted, "items/layers.01", "disagrees", "model.layers.1.mlp.up_proj.weight")


def test_config_and_tensors_disagree(converted, edit_json):
    def change(raw):
        text = (converted / "config.json").read_text()
        text = text.replace('"hidden_size": 32', '"hidden_size": 64')
        (converted / "config.json").write_text(text)
        raw["files"]["config.json"] = len(text)

    edit_json(converted / "manifest.json", change)
    refuse(converted, "(320, 32)", "(320, 64)")


@pytest.mark.parametrize(
    "change",
    [
        {"format": "something"},
        {"format_version": 0},
        {"format_version": True},
        {"format_version": "1"},
        {"tensors": None},
        {"tensors": {NORM: {"shape": [32]}}},
        {"files": [1]},
        {"files": {"../../etc/passwd": 1}},
        {"files": {"/etc/passwd": 1}},
        {"source_files": 3},
    ],
)
def test_damaged_manifest(converted, edit_json, change):
    edit_json(converted / "manifest.json", lambda raw: raw.update(change))
    refuse(converted, "manifest.json")


@pytest.mark.parametrize("text", ["", "[]", "{", "\udcff"])
def test_manifest_that_is_no_json_object(converted, text):
    (converted / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refuse(converted, "manifest.json")
