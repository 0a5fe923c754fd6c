"""The name of the packaged model: what it means, and what it does not."""

import shutil
from pathlib import Path

import pytest

from rlt_jax.checkpoints_convert import CheckpointError, convert, open_checkpoint
from rlt_jax.checkpoints_convert.checkpoint import resolve_folder
from rlt_jax.packaged_model import NAME, packaged_folder


@pytest.fixture
def packaged(monkeypatch, tiny_source):
    """A small checkpoint in the place of the packaged model."""
    where = "rlt_jax.checkpoints_convert.checkpoint.packaged_folder"
    monkeypatch.setattr(where, lambda: tiny_source)
    return tiny_source


def test_it_lies_inside_the_package():
    import rlt_jax

    assert packaged_folder() == Path(rlt_jax.__file__).parent / "assets" / "ouro-tiny"


@pytest.mark.parametrize("weights", [True, False])
def test_the_name_is_the_packaged_model(packaged, weights):
    assert NAME == "ouro-tiny"
    assert resolve_folder("ouro-tiny", weights=weights) == packaged
    assert open_checkpoint("ouro-tiny").tensors


def test_the_name_wins_over_a_folder_which_a_path_still_reaches(packaged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(packaged, tmp_path / "ouro-tiny")
    assert resolve_folder("ouro-tiny") == packaged
    for path in ("./ouro-tiny", "ouro-tiny/", Path("ouro-tiny"), folder):
        assert resolve_folder(path).resolve() == folder.resolve()


def test_it_can_be_converted(packaged, tmp_path):
    assert convert("ouro-tiny", tmp_path / "out").manifest.source == "ouro-tiny"


def test_an_installation_without_it_says_so(monkeypatch, tmp_path):
    where = "rlt_jax.checkpoints_convert.checkpoint.packaged_folder"
    monkeypatch.setattr(where, lambda: tmp_path / "no")
    with pytest.raises(CheckpointError, match=r"'ouro-tiny': this installation has no packaged"):
        open_checkpoint("ouro-tiny")
