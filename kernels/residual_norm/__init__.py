"""The seam between two branches of a sandwich-normed layer, in one kernel."""

import jax

from rlt_jax.kernels.residual_norm import reference
from rlt_jax.kernels.selection import REFERENCE, Kernels

__all__ = ["residual_norm", "rms_norm"]

rms_norm = reference.rms_norm


def residual_norm(
    hidden_td: jax.Array,
    branch_td: jax.Array,
    after: tuple[jax.Array, int],
    before: tuple[jax.Array, int],
    eps: float,
    kernels: Kernels = REFERENCE,
) -> tuple[jax.Array, jax.Array]:
    """hidden + rms_norm(branch, after), and that sum's rms_norm with `before`: both [t, d].

    after: weight of the norm behind the branch, before: of the norm before the next branch; each
    as (weights [n, d], which of them), since a slice taken outside would be a kernel of its own.
    """
    if kernels.norm == "triton":
        from rlt_jax.kernels.residual_norm import triton

        return triton.residual_norm(hidden_td, branch_td, after, before, eps, kernels.interpret)
    return reference.residual_norm(hidden_td, branch_td, after, before, eps)
