"""Paged decode attention in plain jnp."""

from rlt_jax.kernels.paged_prefill.reference import attend_tiles


def paged_decode(q_rhx, kv, layer, batch, precision):
    """Every row is a tile of its own."""
    lengths_r = batch.positions_r + 1
    out = attend_tiles(
        q_rhx[:, None],
        kv,
        layer,
        batch.tables_rp,
        lengths_r[:, None] * batch.valid_r[:, None],
        batch.depths_r,
        precision,
    )
    return out[:, 0]
