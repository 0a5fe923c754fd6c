"""Paged attention of row tiles in plain jnp, for every device.

The result of a row depends on nothing but its own context: the context is walked in chunks of
a fixed length at absolute positions, and a chunk past a row's end changes nothing in it, so
neither the other rows nor the bucket show in the result. The number of chunks is data, so the
context length is no bucket dimension. (On a GPU such a loop asks the host at every iteration:
the price of a reference.)
"""

import jax
import jax.numpy as jnp
from jax import lax

from rlt_jax.kernels.paged_kv import PagedKV, TileBatch

CHUNK_TOKENS = 128
_MASKED = -1e30  # finite, so that a fully masked chunk gives exp(0) and not NaN


def paged_prefill(q_thx: jax.Array, kv: PagedKV, layer, batch: TileBatch, precision) -> jax.Array:
    offsets_q = jnp.arange(batch.tile_rows)
    rows_nq = batch.first_rows_n[:, None] + offsets_q
    valid_nq = offsets_q < batch.counts_n[:, None]
    lengths_nq = jnp.where(valid_nq, batch.starts_n[:, None] + offsets_q + 1, 0)
    q_nqhx = q_thx.at[rows_nq].get(mode="clip")
    out_nqhx = attend_tiles(
        q_nqhx, kv, layer, batch.tables_np, lengths_nq, batch.depths_n, precision
    )
    rows_nq = jnp.where(valid_nq, rows_nq, batch.num_rows)
    return jnp.zeros_like(q_thx).at[rows_nq].set(out_nqhx, mode="drop")


def attend_tiles(
    q_nqhx: jax.Array,
    kv: PagedKV,
    layer: jax.Array,
    tables_np: jax.Array,
    lengths_nq: jax.Array,
    depths_n: jax.Array,
    precision: lax.Precision,
) -> jax.Array:
    """Each row attends to the first lengths_nq positions of its tile's plane (0: zeros)."""
    n, q, h, x = q_nqhx.shape
    k = kv.kv_heads
    pages_per_chunk = max(1, min(CHUNK_TOKENS // kv.page_size, tables_np.shape[1]))
    chunk = pages_per_chunk * kv.page_size
    padding = -tables_np.shape[1] % pages_per_chunk
    tables = jnp.pad(tables_np, ((0, 0), (0, padding)))
    queries = q_nqhx.reshape(n, q, k, h // k, x)
    scale = x**-0.5

    def attend_chunk(i, carry):
        peak, total, mixed = carry
        pages = lax.dynamic_slice_in_dim(tables, i * pages_per_chunk, pages_per_chunk, axis=1)
        blocks = kv.pool[layer, kv.physical_page(pages, depths_n[:, None])]
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
