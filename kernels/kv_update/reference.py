"""K/V writes in plain jnp, for every device: one XLA scatter each."""

import math

import jax
import jax.numpy as jnp

from rlt_jax.kernels.paged_kv import PagedKV, Places


def apply_rotary(x_thx: jax.Array, cos_ty: jax.Array, sin_ty: jax.Array) -> jax.Array:
    """Rotates the split halves of the last axis."""
    cos, sin = cos_ty[:, None], sin_ty[:, None]
    first, second = jnp.split(x_thx, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rotate_and_write(qkv_tcx, cos_ty, sin_ty, kv: PagedKV, layer, places: Places):
    k = kv.kv_heads
    h = qkv_tcx.shape[1] - 2 * k
    rotated = apply_rotary(qkv_tcx[:, : h + k], cos_ty, sin_ty)
    return rotated[:, :h], write_kv(kv, layer, rotated[:, h:], qkv_tcx[:, h + k :], places)


def write_kv(kv: PagedKV, layer, k_tkx: jax.Array, v_tkx: jax.Array, places: Places) -> PagedKV:
    """Writes each valid row's K and V at its place."""
    pages = jnp.where(places.valid_t, places.pages_t, _nowhere(kv, places.pages_t.shape))
    pool = kv.pool.at[layer, pages, :, :, places.offsets_t].set(
        jnp.stack([k_tkx, v_tkx], axis=1).astype(kv.pool.dtype),
        mode="drop",
        unique_indices=True,
    )
    return kv.replace(pool=pool)


def finalize_kv(kv: PagedKV, tables_rp, positions_r, exit_depths_r, valid_r) -> PagedKV:
    logical = jnp.take_along_axis(
        tables_rp, positions_r[:, None] // kv.page_size, axis=1, mode="clip"
    )[:, 0]
    offsets = positions_r % kv.page_size
    source = kv.physical_page(logical, exit_depths_r)
    versions = kv.pool.at[:, source, :, :, offsets].get(mode="clip")  # [r, layers, 2, k, x]
    depths_d = jnp.arange(2, kv.planes + 1)
    targets_rd = kv.physical_page(logical[:, None], depths_d)
    skipped_rd = valid_r[:, None] & (depths_d > exit_depths_r[:, None])
    targets_rd = jnp.where(skipped_rd, targets_rd, _nowhere(kv, targets_rd.shape))
    # One scatter: of three in a row XLA makes copies of the pool.
    pool = kv.pool.at[:, targets_rd, :, :, offsets[:, None]].set(
        versions[:, None], mode="drop", unique_indices=True
    )
    return kv.replace(pool=pool)


def _nowhere(kv: PagedKV, shape: tuple[int, ...]) -> jax.Array:
    """Pages past the pool, whose writes are dropped; all different, as unique_indices promises."""
    return kv.num_pages + jnp.arange(math.prod(shape)).reshape(shape)
