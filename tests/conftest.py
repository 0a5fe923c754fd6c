"""Where tests run: on the CPU, unless `-m gpu` asks for the GPU tests."""

import os

import pytest

from tests.tiny import TINY


def wants_gpu(config) -> bool:
    return config.getoption("markexpr") == "gpu"


def pytest_configure(config):
    if not wants_gpu(config):
        os.environ["JAX_PLATFORMS"] = "cpu"


def pytest_collection_modifyitems(config, items):
    if wants_gpu(config):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="a GPU test: run `pytest -m gpu` on a GPU"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    """The folder of a tiny random checkpoint with a context of 64 tokens."""
    from examples.make_random_checkpoint import make_random_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    return str(make_random_checkpoint(folder, max_positions=64, dtype="float32", **TINY))
