"""What paged attention works on: the pool of K/V blocks, and a batch of row tiles."""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class PagedKV:
    """The K/V of every layer, page and plane in one array.

    pool: [layers, physical pages, 2 (K, V), kv_heads, page_size, head_dim], of the rows' dtype or
    one that holds it exactly.
    planes: how many planes each logical page has, one after the other: the model's depth in the
    LAST_EXITED layout, 1 in SHARED. The physical page of logical page p at depth d (from 1) is
    p * planes + min(d, planes) - 1.
    """

    pool: jax.Array
    planes: int = struct.field(pytree_node=False)

    @property
    def num_pages(self) -> int:
        return self.pool.shape[1]

    @property
    def page_size(self) -> int:
        return self.pool.shape[4]

    def physical_page(self, logical_page: jax.Array, depth: jax.Array) -> jax.Array:
        return logical_page * self.planes + jnp.minimum(depth, self.planes) - 1


@struct.dataclass
class TileBatch:
    """Rows to compute, in tiles: the rows of a tile belong to one request and one depth.

    Decode uses tiles of one row, prefill tiles of several consecutive prompt positions.
    tables_np: int32 [n, pages], each tile's block table (logical pages).
    positions_nq: int32 [n, q], the rows' token positions.
    valid_nq: bool [n, q]; other rows read no context and write nothing.
    depths_n: int32 [n], the loop that is run, from 1.
    """

    tables_np: jax.Array
    positions_nq: jax.Array
    valid_nq: jax.Array
    depths_n: jax.Array
