"""convert and export: what they write, what they keep, what they refuse."""

import hashlib
import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlt_jax.checkpoints_convert import (
    CheckpointError,
    convert,
    export,
    open_checkpoint,
    to_huggingface,
    to_orbax,
)


def assert_same_bits(one, other):
    """The same tensors, dtypes, shapes and bits (NaNs and negative zeros included)."""
    assert set(one.tensors) == set(other.tensors)
    for name in one.tensors:
        a, b = one.read_tensor(name), other.read_tensor(name)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.tobytes() == b.tobytes(), name


def scramble(tensors):
    """Every bit pattern, in all three dtypes: NaNs with payloads, infinities, denormals."""
    generator = np.random.default_rng(0)
    dtypes = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)]
    for i, (name, array) in enumerate(tensors.items()):
        dtype = dtypes[i % 3]
        bits = generator.bytes(array.size * dtype.itemsize)
        tensors[name] = np.frombuffer(bits, dtype).reshape(array.shape)


@pytest.mark.parametrize("form", ["source", "sharded"])
def test_convert_keeps_every_bit(form, request, tmp_path):
    folder = request.getfixturevalue(form)
    converted = convert(folder, tmp_path / "out", verify=True)
    assert converted.kind == "orbax" and converted.folder == tmp_path / "out"
    assert_same_bits(open_checkpoint(folder), open_checkpoint(tmp_path / "out"))


def test_convert_export_convert_is_bit_exact_for_any_bits_and_dtypes(
    source, edit_tensors, tmp_path
):
    edit_tensors(source, scramble)
    first = convert(source, tmp_path / "first", verify=True)
    exported = export(tmp_path / "first", tmp_path / "exported")
    second = convert(tmp_path / "exported", tmp_path / "second", verify=True)
    assert len({info.dtype for info in first.tensors.values()}) == 3
    assert_same_bits(open_checkpoint(source), first)
    assert_same_bits(first, exported)
    assert_same_bits(first, second)
    assert first.manifest.tensors == second.manifest.tensors
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (source / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_export_is_a_sharded_folder_that_the_safetensors_library_reads(tiny_converted, tmp_path):
    export(tiny_converted, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert sorted(set(index["weight_map"].values())) == files
    tensors = {}
    for file in files:
        tensors |= load_file(tmp_path / "out" / file)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
    converted = open_checkpoint(tiny_converted)
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, converted.read_tensor(name))


def test_folder_is_self_contained(source, tmp_path):
    for name in ("chat_template.jinja", "special_tokens_map.json", "vocab.json", "merges.txt"):
        (source / name).write_text(name)
    link = source / "added_tokens.json"  # the hub's cache holds links
    (tmp_path / "blob").write_text("{}")
    link.symlink_to(tmp_path / "blob")
    names = [path.name for path in source.iterdir() if path.suffix != ".safetensors"]
    contents = {name: (source / name).read_bytes() for name in names}
    convert(source, tmp_path / "out")
    shutil.rmtree(source)
    (tmp_path / "blob").unlink()
    for name, content in contents.items():
        assert (tmp_path / "out" / name).read_bytes() == content
    assert open_checkpoint(tmp_path / "out").read_tensor("model.norm.weight").shape == (32,)


def test_pickles_and_code_are_not_copied(source, tmp_path):
    for name in ("pytorch_model.bin", "modeling_ouro.py", "training_args.bin"):
        (source / name).write_text("no")
    convert(source, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.bin")) + list((tmp_path / "out").rglob("*.py"))


def test_manifest_says_what_was_converted(source, tmp_path):
    converted = convert(source, tmp_path / "out")
    raw = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert raw["format_version"] == 1 and raw["converter_version"] == "0.1.0"
    assert raw["source"] == str(source)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        content = (source / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        assert raw["source_files"][name] == {"bytes": len(content), "sha256": digest}
    tensors = load_file(source / "model.safetensors")
    assert {n: (tuple(t["shape"]), t["dtype"]) for n, t in raw["tensors"].items()} == {
        name: (array.shape, array.dtype.name) for name, array in tensors.items()
    }
    items = {path.name for path in (tmp_path / "out" / "items").iterdir()}
    assert items == {"embed", "layers.00", "layers.01", "head"}
    assert items == {tensor["item"] for tensor in raw["tensors"].values()}
    files = {
        str(p.relative_to(converted.folder)) for p in converted.folder.rglob("*") if p.is_file()
    }
    assert set(raw["files"]) == files - {"manifest.json"}


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype_casts_every_tensor_and_config_says_so(source, edit_tensors, tmp_path, stored, dtype):
    numpy_stored = ml_dtypes.bfloat16 if stored == "bfloat16" else np.dtype(stored)
    numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    edit_tensors(source, lambda t: t.update({n: a.astype(numpy_stored) for n, a in t.items()}))
    converted = convert(source, tmp_path / "out", dtype=dtype, verify=True)
    for name, array in load_file(source / "model.safetensors").items():
        found = converted.read_tensor(name)
        assert found.dtype == numpy_dtype
        np.testing.assert_array_equal(found, array.astype(numpy_dtype))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype


@pytest.mark.parametrize("dtype", ["float16", "int8", "f32", 3])
def test_unknown_dtype_is_refused(tiny_source, tmp_path, dtype):
    with pytest.raises(CheckpointError, match=r"dtype = .*must be one of float32, bfloat16"):
        convert(tiny_source, tmp_path / "out", dtype=dtype)


def test_verify_finds_one_flipped_bit(tiny_source, tmp_path, monkeypatch):
    def write_damaged(path, tensors):
        tensors = {name: np.array(array) for name, array in tensors.items()}
        if path.name == "layers.01":
            bits = tensors["model.layers.1.mlp.down_proj.weight"].view(np.uint16)
            bits[3, 5] ^= 1
        write_item(path, tensors)

    write_item = to_orbax.write_item
    monkeypatch.setattr(to_orbax, "write_item", write_damaged)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj.*bit for bit"):
        convert(tiny_source, tmp_path / "out", verify=True)
    assert list(tmp_path.iterdir()) == []
    convert(tiny_source, tmp_path / "out")  # unseen without verify


def test_progress_bar_is_shown_only_on_request(tiny_source, tmp_path, capfd):
    convert(tiny_source, tmp_path / "quiet")
    assert capfd.readouterr() == ("", "")
    convert(tiny_source, tmp_path / "shown", show_progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "hash source" in err


@pytest.fixture(params=["convert", "export"])
def action(request, tiny_source, tiny_converted):
    """convert or export, with a source that it takes."""
    if request.param == "convert":
        return convert, tiny_source
    return export, tiny_converted


def test_existing_destination_is_refused(action, tmp_path):
    run, source = action
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"out: already exists; pass --force"):
        run(source, tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


def test_force_replaces_a_checkpoint_and_leaves_no_trace_of_the_old_one(action, tmp_path):
    run, source = action
    run(source, tmp_path / "out")
    (tmp_path / "out" / "old.txt").write_text("old")
    run(source, tmp_path / "out", force=True)
    assert not (tmp_path / "out" / "old.txt").exists()
    assert open_checkpoint(tmp_path / "out").tensors
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_force_does_not_delete_a_folder_that_is_no_checkpoint(action, tmp_path):
    run, source = action
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match="--force replaces only a checkpoint"):
        run(source, tmp_path / "out", force=True)
    assert (tmp_path / "out" / "thesis.tex").exists()


def test_force_takes_an_empty_folder(action, tmp_path):
    run, source = action
    (tmp_path / "out").mkdir()
    run(source, tmp_path / "out", force=True)
    assert open_checkpoint(tmp_path / "out").tensors


def test_failed_force_keeps_the_old_checkpoint(action, tmp_path, monkeypatch):
    run, source = action
    run(source, tmp_path / "out")
    before = sorted(str(path) for path in tmp_path.rglob("*"))

    def fail(*_, **__):
        raise OSError(28, "No space left on device", "disk")

    monkeypatch.setattr(to_orbax, "write_item", fail)
    monkeypatch.setattr(to_huggingface, "save_file", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run(source, tmp_path / "out", force=True)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    assert open_checkpoint(tmp_path / "out").tensors


def test_destination_that_is_a_file_is_refused(action, tmp_path):
    run, source = action
    (tmp_path / "out").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        run(source, tmp_path / "out", force=True)


@pytest.mark.parametrize(
    "where, rule",
    [(".", "the source itself"), ("in/side", "inside the source"), ("..", "holds the source")],
)
@pytest.mark.parametrize("linked", [False, True])
def test_destination_that_overlaps_the_source_is_refused(source, tmp_path, where, rule, linked):
    shutil.copy(source / "config.json", tmp_path)  # so that --force takes the parent
    destination = source / where
    if linked:
        (tmp_path.parent / f"{tmp_path.name}-link").symlink_to(tmp_path)
        destination = tmp_path.parent / f"{tmp_path.name}-link" / "source" / where
    with pytest.raises(CheckpointError, match=rule):
        convert(source, destination, force=True)
    assert open_checkpoint(source).tensors and not (source / "in").exists()


def test_missing_parents_are_made(action, tmp_path):
    run, source = action
    run(source, tmp_path / "a" / "b" / "out")
    assert open_checkpoint(tmp_path / "a" / "b" / "out").tensors


def test_destination_that_cannot_be_written_has_a_clear_error(action, tmp_path):
    run, source = action
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file: File exists while writing .*file/out"):
        run(source, tmp_path / "file" / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_destination_has_a_clear_error(action, tmp_path):
    run, source = action
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(CheckpointError, match=r"Permission denied while writing"):
        run(source, tmp_path / "locked" / "out")


def test_lack_of_disk_space_is_told_before_anything_is_written(action, tmp_path, monkeypatch):
    run, source = action
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"1,000 bytes free on this disk: [\d,]+ needed"):
        run(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_error_inside_orbax_names_the_item(tiny_source, tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    def fail(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    monkeypatch.setattr(ocp.PyTreeCheckpointer, "save", fail)
    with pytest.raises(CheckpointError, match=r"items/embed: .*Orbax: .*No space left"):
        convert(tiny_source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_each_takes_only_its_own_kind(tiny_source, tiny_converted, tmp_path):
    with pytest.raises(CheckpointError, match="is converted already"):
        convert(tiny_converted, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is a Hugging Face folder already"):
        export(tiny_source, tmp_path / "out")


def test_exported_files_are_as_readable_as_any_new_file(tiny_converted, tmp_path):
    (tmp_path / "new").write_text("")
    export(tiny_converted, tmp_path / "out")
    mode = (tmp_path / "new").stat().st_mode
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {mode}
