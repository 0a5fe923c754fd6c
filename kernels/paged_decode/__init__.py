"""Paged decode attention: one query row per request, rows at mixed depths."""

import jax
from jax import lax

from rlt_jax.kernels.kv_update import rotate_and_write
from rlt_jax.kernels.paged_decode import reference
from rlt_jax.kernels.paged_kv import PagedKV, RowBatch
from rlt_jax.kernels.selection import REFERENCE, Kernels

__all__ = ["paged_decode", "prepare", "write_and_decode"]


def prepare(kv: PagedKV, batch: RowBatch, kernels: Kernels = REFERENCE) -> PagedKV:
    """The same K/V, its scratch holding what these kernels share between the layers: made once for
    all decodes of this batch, where each would otherwise make its own."""
    if kernels.decode == "triton":
        from rlt_jax.kernels.paged_decode import triton

        return kv.replace(scratch=triton.make_sharing(kv, batch))
    if kernels.decode == "mosaic":
        from rlt_jax.kernels.paged_decode import mosaic

        return kv.replace(scratch=mosaic.make_schedule(kv, batch))
    return kv


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
    if kernels.decode == "mosaic":
        from rlt_jax.kernels.paged_decode import mosaic

        return mosaic.paged_decode(q_rhx, kv, layer, batch, kernels.interpret, kv.scratch)
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
