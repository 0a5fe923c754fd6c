"""A slot on its way to the host and back, a few pages of its block table at a time."""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from rlt_jax.runtime.device_state import DeviceState

MAX_TRANSFER_BYTES = 64 * 2**20


@struct.dataclass
class SlotContent:
    """Some pages of a slot, and what else it holds. kv: [layers, pages * planes, 2, kv_heads,
    page_size, head_dim], page after page with all its planes, in the order of the block table.
    hidden_d, last_token, remaining, left: the slot's, as in DeviceState."""

    kv: jax.Array
    hidden_d: jax.Array
    last_token: jax.Array
    remaining: jax.Array
    left: jax.Array


def pages_at_once(state: DeviceState) -> int:
    """Logical pages of one transfer: what fits in MAX_TRANSFER_BYTES, at least one, at most those
    of a block table."""
    pool = state.kv.pool
    page_bytes = state.kv.planes * (pool.size // pool.shape[1]) * pool.dtype.itemsize
    return min(max(MAX_TRANSFER_BYTES // page_bytes, 1), state.tables_sp.shape[1])


def save(state: DeviceState, slot: jax.Array, first: jax.Array) -> SlotContent:
    """The pages from the `first`-th of a slot's block table on, and the rest of the slot.

    Where the table is shorter, its last page again: anything, but in bounds.
    """
    kv, exits = state.kv, state.exits
    pages = _logical_pages(state, slot, first)[:, None] * kv.planes + jnp.arange(kv.planes)
    # Both axes by index: by the second alone, XLA may turn the whole pool around.
    layers = jnp.arange(kv.pool.shape[0])[:, None]
    return SlotContent(
        kv=kv.pool.at[layers, pages.ravel()].get(mode="clip"),
        hidden_d=_of_slot(state.hidden_sd, slot),
        last_token=_of_slot(state.last_token_s, slot),
        remaining=_of_slot(exits.remaining_s, slot),
        left=_of_slot(exits.left_s, slot),
    )


def restore(
    state: DeviceState, slot: jax.Array, first: jax.Array, count: jax.Array, content: SlotContent
) -> DeviceState:
    """Writes what save() gave into the first `count` (1 at least) pages of a slot's block table
    from the `first`-th on, and into the slot: that in every transfer, it does no harm.

    slot: past the last one, nothing is written into a slot.
    """
    planes = state.kv.planes
    logical_p = _logical_pages(state, slot, first)

    def write(i, pool):
        # The last page again instead of those past it: nothing of the pool is read, and a number of
        # turns that is data would make a GPU ask the host after each.
        i = jnp.minimum(i, jnp.maximum(count, 1) - 1)
        page = lax.dynamic_slice_in_dim(content.kv, i * planes, planes, axis=1)
        return lax.dynamic_update_slice_in_dim(pool, page, logical_p[i] * planes, axis=1)

    pool = lax.fori_loop(0, logical_p.shape[0], write, state.kv.pool)
    exits = state.exits.replace(
        remaining_s=state.exits.remaining_s.at[slot].set(content.remaining, mode="drop"),
        left_s=state.exits.left_s.at[slot].set(content.left, mode="drop"),
    )
    return state.replace(
        kv=state.kv.replace(pool=pool),
        hidden_sd=state.hidden_sd.at[slot].set(content.hidden_d, mode="drop"),
        last_token_s=state.last_token_s.at[slot].set(content.last_token, mode="drop"),
        exits=exits,
    )


def abstract_content(state: DeviceState) -> SlotContent:
    """What save() gives, as jax.ShapeDtypeStruct leaves."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.eval_shape(save, state, number, number)


def _logical_pages(state: DeviceState, slot: jax.Array, first: jax.Array) -> jax.Array:
    entries_p = first + jnp.arange(pages_at_once(state))
    return _of_slot(state.tables_sp, slot).at[entries_p].get(mode="clip")


def _of_slot(array: jax.Array, slot: jax.Array) -> jax.Array:
    return array.at[slot].get(mode="clip")
