"""Which kernels are chosen where, and what is said when it is not what was asked for."""

import ast
import dataclasses
import inspect
import logging
import sys
import types

import jax
import pytest

from rlt_jax.kernels import selection
from rlt_jax.kernels.compat import MOSAIC_CANNOT
from rlt_jax.kernels.selection import KERNELS, REFERENCE, Kernels, select

OURO = {
    "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "head_dim": 128,
    "heads": 16,
    "kv_heads": 16,
    "page_size": 16,
}
TRITON = Kernels("triton", "triton", "triton", "triton", tile_rows=128)


@pytest.fixture(autouse=True)
def nothing_said_yet():
    selection._warn_once.cache_clear()


@pytest.fixture
def mosaic(monkeypatch):
    """A stand-in for the Mosaic decode kernel, which can do what `reason` does not refuse."""
    module = types.ModuleType("rlt_jax.kernels.paged_decode.mosaic")
    module.reason, module.asked = None, []

    def unsupported_reason(head_dim, kv_heads, heads, page_size, dtype):
        module.asked.append((head_dim, kv_heads, heads, page_size, dtype))
        return module.reason

    module.unsupported_reason = unsupported_reason
    from rlt_jax.kernels import paged_decode

    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(paged_decode, "mosaic", module, raising=False)
    return module


@pytest.mark.parametrize("requested", ["auto", "reference"])
def test_a_cpu_runs_the_reference(requested):
    assert select(requested, platform="cpu", **OURO) == REFERENCE


def test_triton_on_a_cpu_is_interpreted():
    kernels = select("triton", platform="cpu", **OURO)
    assert kernels == Kernels("triton", "triton", "triton", "triton", interpret=True)


def test_mosaic_needs_a_gpu():
    with pytest.raises(ValueError, match=r"ExecutionConfig\.kernels = 'mosaic': needs a CUDA GPU"):
        select("mosaic", platform="cpu", **OURO)


def test_an_unknown_device_runs_the_reference_only():
    assert select("auto", platform="tpu", **OURO) == REFERENCE
    for requested in ("triton", "mosaic"):
        with pytest.raises(ValueError, match=rf"ExecutionConfig\.kernels = '{requested}': needs"):
            select(requested, platform="tpu", **OURO)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"ExecutionConfig\.kernels = 'cuda': must be one of"):
        select("cuda", platform="gpu", **OURO)


def test_a_gpu_runs_triton_unless_told_otherwise(mosaic):
    assert select("reference", platform="gpu", **OURO) == REFERENCE
    assert select("triton", platform="gpu", **OURO) == TRITON
    assert not mosaic.asked


@pytest.mark.parametrize("prefer", [False, True])
def test_auto_takes_the_mosaic_decode_kernel_where_it_is_preferred(monkeypatch, mosaic, prefer):
    monkeypatch.setattr(selection, "PREFER_MOSAIC_DECODE", prefer)
    kernels = select("auto", platform="gpu", **OURO)
    assert kernels.decode == ("mosaic" if prefer else "triton")
    assert kernels.prefill == kernels.update == kernels.norm == "triton"
    assert mosaic.asked == [(128, 16, 16, 16, "bfloat16")] * prefer


def test_mosaic_falls_back_to_triton_and_says_so_once(mosaic, caplog):
    assert select("mosaic", platform="gpu", **OURO).decode == "mosaic"
    mosaic.reason = "head_dim 128 is unlucky"
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert select("mosaic", platform="gpu", **OURO) == TRITON
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "Triton" in record.message and "head_dim 128 is unlucky" in record.message


@pytest.mark.parametrize(
    "change, said",
    [
        ({}, None),
        ({"head_dim": 96}, "head_dim 96"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "rows of float32"),
        ({"kv_dtype": "float32"}, "K/V of float32 beside rows of bfloat16"),
    ],
)
def test_what_the_real_mosaic_kernel_cannot_do_triton_does(change, said, caplog):
    said = MOSAIC_CANNOT or said
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            kernels = select("mosaic", platform="gpu", **(OURO | change))
    assert kernels == (TRITON if said else dataclasses.replace(TRITON, decode="mosaic"))
    assert [said in record.message for record in caplog.records] == ([True] if said else [])


def test_on_other_gpus_than_hopper_triton_runs_instead_of_mosaic(mosaic, caplog):
    with caplog.at_level(logging.WARNING):
        chosen = select("mosaic", platform="gpu", compute_capability="8.0", **OURO)
    assert chosen == TRITON and not mosaic.asked
    assert "compute capability 8.0, not 9.0 (Hopper)" in caplog.text


def test_the_mosaic_kernel_needs_jax_0_11():
    assert (MOSAIC_CANNOT is None) == (jax.__version_info__ >= (0, 11))


@pytest.mark.parametrize("requested", ["auto", "triton", "mosaic"])
@pytest.mark.parametrize(
    "change, said",
    [
        ({"page_size": 48}, "CacheConfig.block_size = 48 is no power of two"),
        ({"head_dim": 512}, "head_dim 512"),
        ({"head_dim": 65}, "head_dim 65"),
        ({"dtype": "float64"}, "rows of float64"),
        ({"kv_dtype": "float8_e4m3fn"}, "rows of float8_e4m3fn"),
    ],
)
def test_what_triton_cannot_do_the_reference_does_and_it_is_said_once(
    requested, change, said, caplog
):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert select(requested, platform="gpu", **(OURO | change)) == REFERENCE
    [record] = caplog.records
    assert "reference" in record.message and said in record.message


def test_every_choice_of_the_config_is_known():
    for requested in KERNELS:
        assert isinstance(select(requested, platform="gpu", **OURO), Kernels)


def test_choosing_imports_no_kernel():
    """Only a kernel that runs is imported, and Pallas with it."""
    tree = ast.parse(inspect.getsource(selection))
    modules = {alias.name for x in tree.body if isinstance(x, ast.Import) for alias in x.names}
    modules |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert modules <= {
        *("dataclasses", "functools", "logging"),
        "rlt_jax.config",
        "rlt_jax.validation",
    }
