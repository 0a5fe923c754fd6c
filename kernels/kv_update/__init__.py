"""Writes to the paged K/V pool, in place: new rows, and the finalization of exited tokens."""

import jax

from rlt_jax.kernels.kv_update import reference
from rlt_jax.kernels.paged_kv import PagedKV, Places
from rlt_jax.kernels.selection import REFERENCE, Kernels

__all__ = ["apply_rotary", "finalize_kv", "rotate_and_write"]

apply_rotary = reference.apply_rotary


def rotate_and_write(
    qkv_tcx: jax.Array,
    cos_ty: jax.Array,
    sin_ty: jax.Array,
    kv: PagedKV,
    layer: jax.Array,
    places: Places,
    kernels: Kernels = REFERENCE,
) -> tuple[jax.Array, PagedKV]:
    """Rotates q and k (RoPE, split halves) and writes k and v of each valid row at its place.

    qkv_tcx: the q, k and v heads of a row, one after the other. cos_ty, sin_ty: [t, x / 2] in the
    rows' dtype. layer: int32 []. Returns (rotated q_thx, the pool, written in place).
    """
    if kernels.update == "triton":
        from rlt_jax.kernels.kv_update import triton

        return triton.rotate_and_write(
            qkv_tcx, cos_ty, sin_ty, kv, layer, places, kernels.interpret
        )
    return reference.rotate_and_write(qkv_tcx, cos_ty, sin_ty, kv, layer, places)


def finalize_kv(
    kv: PagedKV,
    tables_rp: jax.Array,
    positions_r: jax.Array,
    exit_depths_r: jax.Array,
    valid_r: jax.Array,
    kernels: Kernels = REFERENCE,
) -> PagedKV:
    """Copies each valid row's K/V of its exit depth into the deeper planes, at every layer.

    After it, a query at depth d sees version min(d, exit depth) of the token. Nothing is copied
    in the SHARED layout.
    """
    if kv.planes == 1:
        return kv
    if kernels.update == "triton":
        from rlt_jax.kernels.kv_update import triton

        return triton.finalize_kv(
            kv, tables_rp, positions_r, exit_depths_r, valid_r, kernels.interpret
        )
    return reference.finalize_kv(kv, tables_rp, positions_r, exit_depths_r, valid_r)
