"""K/V writes as Pallas-Triton kernels: the pool goes in and comes out at the same address."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from rlt_jax.kernels.compat import WHOLE, load, store, triton_call
from rlt_jax.kernels.paged_kv import PagedKV, Places


def rotate_and_write(qkv_tcx, cos_ty, sin_ty, kv: PagedKV, layer, places: Places, interpret):
    rows, _, head_dim = qkv_tcx.shape
    heads = qkv_tcx.shape[1] - 2 * kv.kv_heads
    q_shape = jax.ShapeDtypeStruct((rows, heads, head_dim), qkv_tcx.dtype)
    if rows == 0:
        return jnp.zeros(q_shape.shape, q_shape.dtype), kv
    q_thx, pool = triton_call(
        functools.partial(_rotate_and_write, heads=heads, kv_heads=kv.kv_heads, head_dim=head_dim),
        grid=(rows,),
        out_shape=(q_shape, jax.ShapeDtypeStruct(kv.pool.shape, kv.pool.dtype)),
        in_specs=[WHOLE] * 8,
        out_specs=(WHOLE, WHOLE),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="rotate_and_write",
        input_output_aliases={7: 1},
    )(
        jnp.reshape(layer, (1,)),
        qkv_tcx,
        cos_ty,
        sin_ty,
        places.pages_t,
        places.offsets_t,
        places.valid_t,
        kv.pool,
    )
    return q_thx, kv.replace(pool=pool)


def finalize_kv(kv: PagedKV, tables_rp, positions_r, exit_depths_r, valid_r, interpret):
    if kv.planes == 1 or positions_r.shape[0] == 0:
        return kv
    pool = triton_call(
        functools.partial(_finalize, kv=kv.replace(pool=None), shape=kv.pool.shape),
        grid=(positions_r.shape[0], kv.pool.shape[0]),
        out_shape=jax.ShapeDtypeStruct(kv.pool.shape, kv.pool.dtype),
        in_specs=[WHOLE] * 5,
        out_specs=WHOLE,
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="finalize_kv",
        input_output_aliases={4: 0},
    )(tables_rp, positions_r, exit_depths_r, valid_r, kv.pool)
    return kv.replace(pool=pool)


def load_rotated(rows_ref, cos_ref, sin_ref, row, heads, at_x, head_dim, mask):
    """Heads of a row, rotated with the roundings of the rows' dtype; float32.

    heads, at_x: what the head and head_dim axes are indexed with; mask has their joint shape.
    """
    half = head_dim // 2
    first_x = at_x < half
    partner_x = jnp.where(first_x, at_x + half, at_x - half)
    angle_x = jnp.where(first_x, at_x, at_x - half)
    in_head_x = at_x < head_dim
    rounded = functools.partial(_rounded, dtype=rows_ref.dtype)
    cos_x, sin_x = (
        load(ref.at[row, angle_x], mask=in_head_x, other=0).astype(jnp.float32)
        for ref in (cos_ref, sin_ref)
    )
    own, partner = (
        load(rows_ref.at[row, heads, index], mask=mask, other=0).astype(jnp.float32)
        for index in (at_x, partner_x)
    )
    signed_sin_x = jnp.where(first_x, -sin_x, sin_x)
    return rounded(rounded(own * cos_x) + rounded(partner * signed_sin_x))


def _rotate_and_write(
    layer_ref,
    qkv_ref,
    cos_ref,
    sin_ref,
    pages_ref,
    offsets_ref,
    valid_ref,
    _pool_in_ref,
    q_out_ref,
    pool_ref,
    *,
    heads,
    kv_heads,
    head_dim,
):
    row = pl.program_id(0)
    at_x = jnp.arange(pl.next_power_of_2(head_dim))[None]
    at_h = jnp.arange(pl.next_power_of_2(heads))[:, None]
    in_q = (at_h < heads) & (at_x < head_dim)
    q_hx = load_rotated(qkv_ref, cos_ref, sin_ref, row, at_h, at_x, head_dim, in_q)
    store(q_out_ref.at[row, at_h, at_x], q_hx.astype(q_out_ref.dtype), mask=in_q)

    at_k = jnp.arange(pl.next_power_of_2(kv_heads))[:, None]
    in_kv = (at_k < kv_heads) & (at_x < head_dim)
    layer, page, offset = layer_ref[0], pages_ref[row], offsets_ref[row]

    @pl.when(valid_ref[row])
    def _():
        k_kx = load_rotated(qkv_ref, cos_ref, sin_ref, row, heads + at_k, at_x, head_dim, in_kv)
        v_kx = load(qkv_ref.at[row, heads + kv_heads + at_k, at_x], mask=in_kv, other=0)
        for side, new_kx in enumerate((k_kx, v_kx)):
            place = pool_ref.at[layer, page, side, at_k, offset, at_x]
            # By way of the rows' dtype: the pool holds what the rows hold.
            store(place, new_kx.astype(qkv_ref.dtype).astype(pool_ref.dtype), mask=in_kv)


def _finalize(
    tables_ref, positions_ref, exit_depths_ref, valid_ref, pool_in_ref, pool_ref, *, kv, shape
):
    _, _, _, kv_heads, page_size, head_dim = shape
    row, layer = pl.program_id(0), pl.program_id(1)
    exit_depth = exit_depths_ref[row]

    @pl.when(valid_ref[row] & (exit_depth < kv.planes))
    def _():
        position = positions_ref[row]
        logical = tables_ref[row, position // page_size]
        offset = position % page_size
        at_k = jnp.arange(pl.next_power_of_2(kv_heads))[:, None]
        at_x = jnp.arange(pl.next_power_of_2(head_dim))[None]
        inside = (at_k < kv_heads) & (at_x < head_dim)
        source = kv.physical_page(logical, exit_depth)
        for side in (0, 1):
            version = load(
                pool_in_ref.at[layer, source, side, at_k, offset, at_x], mask=inside, other=0
            )
            for depth in range(2, kv.planes + 1):
                target = pool_ref.at[
                    layer, kv.physical_page(logical, depth), side, at_k, offset, at_x
                ]
                store(target, version, mask=inside & (depth > exit_depth))


def _rounded(x, dtype):
    """float32 arithmetic with the roundings that the same operations have in `dtype`."""
    return x.astype(dtype).astype(jnp.float32)
