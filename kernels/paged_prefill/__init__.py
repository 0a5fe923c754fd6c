"""Causal attention of packed prompt chunks over their paged history."""

import jax
from jax import lax

from rlt_jax.kernels.paged_kv import PagedKV, TileBatch
from rlt_jax.kernels.paged_prefill import reference
from rlt_jax.kernels.selection import REFERENCE, Kernels

__all__ = ["paged_prefill"]


def paged_prefill(
    q_thx: jax.Array,
    kv: PagedKV,
    layer: jax.Array,
    batch: TileBatch,
    kernels: Kernels = REFERENCE,
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> jax.Array:
    """Attention of each row over its request's plane, up to and including itself.

    The rows' own K/V must lie in the pool already. As in paged_decode, a row's result is bitwise
    the same in any company. Returns [t, h, x] in q's dtype; padding rows may hold anything finite.
    """
    if kernels.prefill == "triton":
        from rlt_jax.kernels.paged_prefill import triton

        return triton.paged_prefill(q_thx, kv, layer, batch, kernels.interpret)
    return reference.paged_prefill(q_thx, kv, layer, batch, precision)
