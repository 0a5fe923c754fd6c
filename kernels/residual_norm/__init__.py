"""The seam between two branches of a sandwich-normed layer, in one kernel."""

import jax

from rlt_jax.kernels.residual_norm import reference
from rlt_jax.kernels.selection import REFERENCE, Kernels

__all__ = ["residual_norm", "rms_norm"]

rms_norm = reference.rms_norm


def residual_norm(
    hidden_td: jax.Array,
    branch_td: jax.Array,
    after_d: jax.Array,
    before_d: jax.Array,
    eps: float,
    kernels: Kernels = REFERENCE,
) -> tuple[jax.Array, jax.Array]:
    """hidden + rms_norm(branch, after), and that sum's rms_norm with `before`: both [t, d].

    after_d: weight of the norm behind the branch; before_d: of the norm before the next branch.
    """
    if kernels.norm == "triton":
        from rlt_jax.kernels.residual_norm import triton

        return triton.residual_norm(hidden_td, branch_td, after_d, before_d, eps, kernels.interpret)
    return reference.residual_norm(hidden_td, branch_td, after_d, before_d, eps)
