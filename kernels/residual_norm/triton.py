"""The residual seam in one Pallas-Triton kernel: a program per row, one pass over memory."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rlt_jax.kernels.compat import WHOLE, load, store, triton_call


def residual_norm(hidden_td, branch_td, after, before, eps, interpret):
    (after_nd, after_row), (before_nd, before_row) = after, before
    dtypes = {a.dtype for a in (hidden_td, branch_td, after_nd, before_nd)}
    if len(dtypes) > 1:
        raise ValueError(f"residual_norm wants rows and weights of one dtype, not {dtypes}")
    rows, width = hidden_td.shape
    if rows == 0:
        return hidden_td, hidden_td
    out = jax.ShapeDtypeStruct((rows, width), hidden_td.dtype)
    return triton_call(
        functools.partial(_seam, width=width, eps=eps, after_row=after_row, before_row=before_row),
        grid=(rows,),
        out_shape=(out, out),
        in_specs=[WHOLE] * 4,
        out_specs=(WHOLE, WHOLE),
        num_warps=max(1, min(8, pl.next_power_of_2(width) // 256)),
        num_stages=1,
        interpret=interpret,
        name="residual_norm",
    )(hidden_td, branch_td, after_nd, before_nd)


def _seam(
    hidden_ref,
    branch_ref,
    after_ref,
    before_ref,
    sum_ref,
    normed_ref,
    *,
    width,
    eps,
    after_row,
    before_row,
):
    row = pl.program_id(0)
    at_d = jnp.arange(pl.next_power_of_2(width))
    inside_d = at_d < width
    dtype = hidden_ref.dtype
    rounded = functools.partial(_rounded, dtype=dtype)

    def load_d(ref, *index):
        return load(ref.at[(*index, at_d)], mask=inside_d, other=0).astype(jnp.float32)

    def norm(x_d, weight_ref, weight_row):
        scale = lax.rsqrt(jnp.sum(x_d * x_d) / width + eps)
        return rounded(load_d(weight_ref, weight_row) * rounded(x_d * scale))

    # Padding is zero in x, so it adds nothing to the sum of squares.
    sum_d = rounded(load_d(hidden_ref, row) + norm(load_d(branch_ref, row), after_ref, after_row))
    store(sum_ref.at[row, at_d], sum_d.astype(dtype), mask=inside_d)
    store(
        normed_ref.at[row, at_d], norm(sum_d, before_ref, before_row).astype(dtype), mask=inside_d
    )


def _rounded(x, dtype):
    """float32 arithmetic with the roundings that the same operations have in `dtype`."""
    return x.astype(dtype).astype(jnp.float32)
