"""The residual seam against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.kernels.residual_norm import residual_norm, rms_norm
from tests.kernels.support import IMPLEMENTATIONS, bits, error

EPS = 1e-6


@functools.partial(jax.jit, static_argnames=("eps", "kernels"))
def seam(hidden_td, branch_td, after_d, before_d, *, eps, kernels):
    """The weights lie among others, all NaN."""
    nan = jnp.full_like(after_d, jnp.nan)
    after = jnp.stack([nan, after_d, nan]), 1
    before = jnp.stack([nan, nan, before_d]), 2
    return residual_norm(hidden_td, branch_td, after, before, eps, kernels)


each_kind = pytest.mark.parametrize("name", IMPLEMENTATIONS)
each_dtype = pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])


def operands(rows: int, width: int, dtype, seed: int = 0):
    rng = np.random.default_rng(seed)
    hidden, branch = rng.standard_normal((2, rows, width)) * np.array([3, 0.1])[:, None, None]
    after, before = 1 + 0.3 * rng.standard_normal((2, width))
    return [x.astype(dtype) for x in (hidden, branch, after, before)]


def norm64(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


@each_kind
@each_dtype
@pytest.mark.parametrize("rows, width", [(1, 64), (5, 24), (3, 2048)])
def test_both_results_equal_the_exact_ones(name, dtype, rows, width):
    args = operands(rows, width, dtype)
    total, normed = seam(*args, eps=EPS, kernels=IMPLEMENTATIONS[name])
    hidden, branch, after, before = (x.astype(np.float64) for x in args)
    exact = hidden + norm64(branch, after)
    assert total.dtype == normed.dtype == dtype
    tolerance = 1e-6 if dtype == np.float32 else 2e-2
    assert error(total, exact) <= tolerance
    # The norm is of the sum as it is stored.
    assert error(normed, norm64(np.asarray(total, np.float64), before)) <= tolerance


@each_kind
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e12])
def test_rows_of_any_size_are_normed(name, scale):
    hidden, branch, after, before = operands(2, 64, np.float32)
    args = hidden * 0, (branch * scale).astype(np.float32), after, before
    total, normed = seam(*args, eps=EPS, kernels=IMPLEMENTATIONS[name])
    exact = norm64(args[1].astype(np.float64), after)
    assert np.abs(total - exact).max() <= 1e-5 * max(np.abs(exact).max(), 1e-30)
    assert np.isfinite(np.asarray(normed)).all()


@each_kind
def test_a_row_is_bitwise_the_same_in_any_company(name):
    kernels = IMPLEMENTATIONS[name]
    hidden, branch, *weights = operands(8, 64, np.float32)
    whole = seam(hidden, branch, *weights, eps=EPS, kernels=kernels)
    order = np.array([3, 1, 0, 2, 7, 6, 5, 4])
    moved = seam(hidden[order], branch[order], *weights, eps=EPS, kernels=kernels)
    for a, b in zip(whole, moved):
        assert np.array_equal(bits(a)[order], bits(b))


@each_dtype
def test_the_norm_alone(dtype):
    hidden, _, weight, _ = operands(4, 24, dtype)
    out = rms_norm(jnp.asarray(hidden), jnp.asarray(weight), EPS)
    assert out.dtype == dtype
    exact = norm64(hidden.astype(np.float64), weight.astype(np.float64))
    assert error(out, exact) <= (1e-6 if dtype == np.float32 else 1e-2)
