"""Paged attention, K/V writes and depth finalization in plain jnp, for every device.

The result of a row depends on nothing but its own context: the context is walked in chunks of
a fixed length at absolute positions, and a chunk past a row's end changes nothing in it, so
neither the other rows nor the bucket show in the result. The number of chunks is data, so the
context length is no bucket dimension. (On a GPU such a loop asks the host at every iteration:
the price of a reference.)
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from rlt_jax.kernels.paged_attention.types import PagedKV, TileBatch

CHUNK_TOKENS = 128
_MASKED = -1e30  # finite, so that a fully masked chunk gives exp(0) and not NaN


def write_kv(
    kv: PagedKV, layer: jax.Array, k_nqkx: jax.Array, v_nqkx: jax.Array, batch: TileBatch
) -> PagedKV:
    """Writes each valid row's K and V at (layer, batch depth, row position), in place."""
    pages = jnp.take_along_axis(
        batch.tables_np, batch.positions_nq // kv.page_size, axis=1, mode="clip"
    )
    physical = kv.physical_page(pages, batch.depths_n[:, None])
    physical = jnp.where(batch.valid_nq, physical, _nowhere(kv, physical.shape))
    offsets = batch.positions_nq % kv.page_size
    pool = kv.pool.at[layer, physical, :, :, offsets].set(
        jnp.stack([k_nqkx, v_nqkx], axis=2).astype(kv.pool.dtype),
        mode="drop",
        unique_indices=True,
    )
    return kv.replace(pool=pool)


def paged_attention(
    q_nqhx: jax.Array,
    kv: PagedKV,
    layer: jax.Array,
    batch: TileBatch,
    *,
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> jax.Array:
    """Causal attention of each row over its request's plane, up to and including itself.

    Query heads are grouped over K/V heads (GQA); scores are scaled by head_dim ** -0.5;
    softmax and sums are float32. Returns [n, q, h, x] in q's dtype; zeros in invalid rows.
    """
    n, q, h, x = q_nqhx.shape
    k = kv.pool.shape[3]
    pages_per_chunk = max(1, min(CHUNK_TOKENS // kv.page_size, batch.tables_np.shape[1]))
    chunk = pages_per_chunk * kv.page_size
    padding = -batch.tables_np.shape[1] % pages_per_chunk
    tables = jnp.pad(batch.tables_np, ((0, 0), (0, padding)))
    lengths_nq = jnp.where(batch.valid_nq, batch.positions_nq + 1, 0)
    queries = q_nqhx.reshape(n, q, k, h // k, x)
    scale = x**-0.5

    def attend_chunk(i, carry):
        peak, total, mixed = carry
        pages = lax.dynamic_slice_in_dim(tables, i * pages_per_chunk, pages_per_chunk, axis=1)
        blocks = kv.pool[layer, kv.physical_page(pages, batch.depths_n[:, None])]
        keys_nkcx, values_nkcx = (
            jnp.swapaxes(blocks[:, :, side], 1, 2).reshape(n, k, chunk, x) for side in (0, 1)
        )
        scores = jnp.einsum(
            "nqkgx,nkcx->nkgqc",
            queries,
            keys_nkcx.astype(queries.dtype),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        at = i * chunk + jnp.arange(chunk)
        seen = (at < lengths_nq[..., None])[:, None, None]  # [n, 1, 1, q, c]
        scores = jnp.where(seen, scores * scale, _MASKED)
        new_peak = jnp.maximum(peak, scores.max(-1))
        decay = jnp.exp(peak - new_peak)
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
        # Blocks never written may hold anything: 0 * NaN must not reach the sum.
        any_seen = seen.any(axis=(1, 2, 3))[:, None, :, None]
        values = jnp.where(any_seen, values_nkcx.astype(jnp.float32), 0.0)
        mixed = mixed * decay[..., None] + jnp.einsum(
            "nkgqc,nkcx->nkgqx", weights, values, precision=lax.Precision.HIGHEST
        )
        return new_peak, total * decay + weights.sum(-1), mixed

    rows = (n, k, h // k, q)
    start = (
        jnp.full(rows, _MASKED, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, x), jnp.float32),
    )
    num_chunks = (lengths_nq.max() + chunk - 1) // chunk
    _, total, mixed = lax.fori_loop(0, num_chunks, attend_chunk, start)
    out = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(n, q, h, x).astype(q_nqhx.dtype)


def finalize_kv(
    kv: PagedKV,
    tables_np: jax.Array,
    positions_n: jax.Array,
    exit_depths_n: jax.Array,
    valid_n: jax.Array,
) -> PagedKV:
    """Copies each valid row's K/V of its exit depth into the deeper planes, at every layer.

    After it, a query at depth d sees version min(d, exit depth) of the token. Nothing is copied
    in the SHARED layout.
    """
    if kv.planes == 1:
        return kv
    logical = jnp.take_along_axis(
        tables_np, positions_n[:, None] // kv.page_size, axis=1, mode="clip"
    )[:, 0]
    offsets = positions_n % kv.page_size
    source = kv.physical_page(logical, exit_depths_n)
    versions = kv.pool.at[:, source, :, :, offsets].get(mode="clip")  # [n, layers, 2, k, x]
    depths_d = jnp.arange(2, kv.planes + 1)
    targets_nd = kv.physical_page(logical[:, None], depths_d)
    skipped_nd = valid_n[:, None] & (depths_d > exit_depths_n[:, None])
    targets_nd = jnp.where(skipped_nd, targets_nd, _nowhere(kv, targets_nd.shape))
    pool = kv.pool.at[:, targets_nd, :, :, offsets[:, None]].set(
        versions[:, None], mode="drop", unique_indices=True
    )
    return kv.replace(pool=pool)


def _nowhere(kv: PagedKV, shape: tuple[int, ...]) -> jax.Array:
    """Pages past the pool, whose writes are dropped; all different, as unique_indices promises."""
    return kv.num_pages + jnp.arange(math.prod(shape)).reshape(shape)
