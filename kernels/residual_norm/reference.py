"""RMSNorm and the residual seam in plain jnp."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis: float32 statistics, cast to x.dtype, then times the weight."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return weight * (x32 * scale).astype(x.dtype)


def residual_norm(hidden_td, branch_td, after, before, eps):
    (after_nd, after_row), (before_nd, before_row) = after, before
    hidden_td = hidden_td + rms_norm(branch_td, after_nd[after_row], eps)
    return hidden_td, rms_norm(hidden_td, before_nd[before_row], eps)
