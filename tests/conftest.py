"""Where tests run: on the CPU, unless `-m gpu` asks for the GPU tests."""

import os

import pytest


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
