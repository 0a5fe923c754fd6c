"""Paged decode attention: one query row per request, rows at mixed depths."""

import jax
import jax.numpy as jnp
from jax import lax

from rlt_jax.kernels.kv_update import rotate_and_write
from rlt_jax.kernels.paged_decode import reference
from rlt_jax.kernels.paged_kv import PagedKV, RowBatch
from rlt_jax.kernels.selection import REFERENCE, Kernels

__all__ = ["paged_decode", "with_scratch", "write_and_decode"]


def with_scratch(kv: PagedKV, rows: int, kernels: Kernels) -> PagedKV:
    """The same K/V with scratch for write_and_decode over `rows` rows: made once for many layers,
    where each call would otherwise make its own."""
    if kernels.decode != "triton":
        return kv
    return kv.replace(arrivals_rk=jnp.zeros((rows, kv.kv_heads), jnp.int32))


def paged_decode(
    q_rhx: jax.Array,
    kv: PagedKV,
    layer: jax.Array,
    batch: RowBatch,
    kernels: Kernels = REFERENCE,
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> jax.Array:
    """Attention of each row over its request's plane, up to and including itself.

    Query heads are grouped over K/V heads (GQA); scores are scaled by head_dim ** -0.5; softmax
    and sums are float32. A row's result is bitwise the same in any company. Returns [r, h, x] in
    q's dtype; zeros in invalid rows.
    """
    if kernels.decode == "triton":
        from rlt_jax.kernels.paged_decode import triton

        return triton.paged_decode(q_rhx, kv, layer, batch, kernels.interpret)
    return reference.paged_decode(q_rhx, kv, layer, batch, precision)


def write_and_decode(
    qkv_rcx: jax.Array,
    cos_ry: jax.Array,
    sin_ry: jax.Array,
    kv: PagedKV,
    layer: jax.Array,
    batch: RowBatch,
    kernels: Kernels = REFERENCE,
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> tuple[jax.Array, PagedKV]:
    """rotate_and_write, then paged_decode, in one kernel where there is one.

    Returns (attention [r, h, x], the pool, written in place).
    """
    if kernels.decode == "triton":
        from rlt_jax.kernels.paged_decode import triton

        return triton.write_and_decode(qkv_rcx, cos_ry, sin_ry, kv, layer, batch, kernels.interpret)
    places = batch.places(kv)
    q_rhx, kv = rotate_and_write(qkv_rcx, cos_ry, sin_ry, kv, layer, places, kernels)
    return paged_decode(q_rhx, kv, layer, batch, kernels, precision), kv
