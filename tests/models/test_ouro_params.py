"""Synthetic parameters: shapes, scales, placement; and what a dtype may be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.models import ouro
from rlt_jax.models.ouro import DTypePolicy, OuroConfig, OuroParams

WIDE = OuroConfig(
    vocab_size=300,
    hidden_size=256,
    intermediate_size=320,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=64,
    total_ut_steps=4,
)


def named_leaves(tree) -> dict:
    return {jax.tree_util.keystr(k): x for k, x in jax.tree_util.tree_leaves_with_path(tree)}


def replicated() -> jax.sharding.Sharding:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


@functools.cache
def wide_params(dtype: str) -> OuroParams:
    """Of key 0; the bf16 ones under a sharding."""
    sharding = replicated() if dtype == "bfloat16" else None
    return ouro.init_params(WIDE, jax.random.key(0), DTypePolicy(dtype), sharding)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_init_params_has_the_shapes_of_the_model(dtype):
    layer = {
        "wqkv": (8 * 16 + 2 * 4 * 16, 256),
        "wo": (256, 8 * 16),
        "w_gate_up": (2 * 320, 256),
        "w_down": (256, 320),
        "norms": (4, 256),
    }
    expected = {
        ".embed": (300, 256),
        ".norm": (256,),
        ".gate_weight": (256,),
        ".gate_bias": (),
        ".lm_head": (300, 256),
    }
    expected |= {f".layers[{i}].{name}": shape for i in (0, 1) for name, shape in layer.items()}
    for tree in (wide_params(dtype), ouro.abstract_params(WIDE, DTypePolicy(dtype))):
        leaves = named_leaves(tree)
        assert {name: leaf.shape for name, leaf in leaves.items()} == expected
        assert {leaf.dtype for leaf in leaves.values()} == {jnp.dtype(dtype)}


def test_init_params_is_decided_by_the_key_alone():
    """Drawn again in another dtype, the same numbers are rounded."""
    rounded = named_leaves(wide_params("bfloat16"))
    zero, one = map(jax.jit(lambda key: ouro.init_params(WIDE, key)), map(jax.random.key, (0, 1)))
    for name, leaf in named_leaves(wide_params("float32")).items():
        assert np.array_equal(leaf.astype(jnp.bfloat16), rounded[name])
        np.testing.assert_allclose(named_leaves(zero)[name], leaf, rtol=1e-5)
        assert not np.isclose(named_leaves(one)[name], leaf, rtol=1e-5).all()


def test_init_params_lie_where_they_are_told():
    assert {leaf.sharding for leaf in jax.tree.leaves(wide_params("bfloat16"))} == {replicated()}


def test_init_params_draws_every_leaf_anew():
    """No two leaves share their noise, nor the rows of one leaf."""
    noise = {}
    for name, leaf in named_leaves(wide_params("float32")).items():
        rows = np.asarray(leaf, np.float64).reshape(-1, leaf.shape[-1] if leaf.ndim else 1)
        noise[name] = (rows - rows.mean()) / (rows.std() or 1)
        if len(rows) > 1:
            assert abs((noise[name][0] * noise[name][1]).mean()) < 5 * rows.shape[1] ** -0.5
    names = [name for name in noise if noise[name].size >= 256]
    for i, a in enumerate(names):
        for b in names[:i]:
            x, y = noise[a].ravel(), noise[b].ravel()
            size = min(x.size, y.size)
            assert abs((x[:size] * y[:size]).mean()) < 5 * size**-0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_init_params_has_no_zeros_and_the_right_scales(dtype):
    fan_in = {"wo": 8 * 16, "w_down": 320}
    for name, leaf in named_leaves(wide_params(dtype)).items():
        field = name.split(".")[-1]
        x = np.asarray(leaf, np.float64)
        assert (x != 0).all() and np.isfinite(x).all()
        mean, deviation = 0.0, fan_in.get(field, 256) ** -0.5
        if field in ("norm", "norms"):
            mean, deviation = 1.0, 0.1
        elif field == "embed":
            deviation = 1.0
        elif field == "gate_bias":
            continue
        assert abs(x.mean() - mean) <= 5 * deviation * x.size**-0.5
        assert abs(x.std() / deviation - 1) <= 5 * (2 * x.size) ** -0.5


def test_a_dtype_is_float32_or_bfloat16():
    for dtype in ("float16", "bf16", None, np.float32):
        with pytest.raises(ValueError, match=r"dtype = .*: must be .*'float32'.*'bfloat16'"):
            DTypePolicy(dtype)
