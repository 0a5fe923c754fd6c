"""Names: folders, hub ids with and without huggingface_hub, and neither."""

import fnmatch
import sys
import types

import pytest

from rlt_jax.checkpoints_convert import CheckpointError, convert, open_checkpoint
from rlt_jax.checkpoints_convert.checkpoint import resolve_folder


@pytest.fixture
def hub(monkeypatch, tiny_source):
    """A huggingface_hub that knows org/ouro (a folder) and nothing else; records its calls."""
    calls = []

    def snapshot_download(repo_id, **options):
        calls.append((repo_id, options))
        if repo_id != "org/ouro":
            raise RuntimeError("404 Not Found")
        return str(tiny_source)

    module = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return calls


def test_hub_id_is_downloaded(hub, tiny_source):
    assert open_checkpoint("org/ouro").folder == tiny_source
    assert [repo_id for repo_id, _ in hub] == ["org/ouro"]


def test_hub_id_can_be_converted(hub, tmp_path):
    converted = convert("org/ouro", tmp_path / "out")
    assert converted.manifest.source == "org/ouro"


def test_only_weights_config_and_tokenizer_are_downloaded(hub):
    open_checkpoint("org/ouro")
    patterns = hub[0][1]["allow_patterns"]

    def allowed(name):
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    wanted = ["model.safetensors", "model-00001-of-00002.safetensors", "config.json"]
    wanted += ["model.safetensors.index.json", "tokenizer.json", "chat_template.jinja"]
    wanted += ["merges.txt", "vocab.json"]
    unwanted = ["pytorch_model.bin", "modeling_ouro.py", "training_args.bin", "a.pkl", "x.pt"]
    assert [name for name in wanted if not allowed(name)] == []
    assert [name for name in unwanted if allowed(name)] == []


def test_the_tokenizer_alone_can_be_downloaded(hub, tiny_source):
    assert resolve_folder("org/ouro", weights=False) == tiny_source
    patterns = hub[0][1]["allow_patterns"]
    assert not any(fnmatch.fnmatch("model.safetensors", pattern) for pattern in patterns)
    assert any(fnmatch.fnmatch("tokenizer.json", pattern) for pattern in patterns)


def test_existing_destination_is_refused_before_the_download(hub, tmp_path):
    with pytest.raises(CheckpointError, match="already exists"):
        convert("org/ouro", tmp_path)
    assert hub == []


def test_existing_folder_wins_over_a_hub_id(hub, source, monkeypatch):
    monkeypatch.chdir(source.parent.parent)
    name = f"{source.parent.name}/source"
    assert open_checkpoint(name).tensors
    assert hub == []


def test_error_of_the_hub_is_passed_on(hub):
    with pytest.raises(CheckpointError, match=r"org/other: no such folder, and the hub .*404"):
        open_checkpoint("org/other")


def test_hub_id_without_huggingface_hub_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        CheckpointError, match=r"org/ouro: no such folder.*pip install huggingface_hub"
    ):
        open_checkpoint("org/ouro")


def test_a_folder_needs_no_huggingface_hub(monkeypatch, tiny_source):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert open_checkpoint(tiny_source).tensors


@pytest.mark.parametrize(
    "name",
    [
        "ouro-1.4b",
        "./org/name",
        "../name",
        "/no/such/folder",
        "~no-such-user/x",
        "a/b/c",
        "org/",
        "",
        "-x/y",
        "org/n m",
    ],
)
def test_name_that_is_neither_names_both_options(hub, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither an existing folder nor .*org/name"):
        open_checkpoint(name)
    assert hub == []


def test_a_file_is_not_a_folder(source):
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        open_checkpoint(source / "model.safetensors")
