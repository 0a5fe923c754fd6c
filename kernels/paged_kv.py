"""What the attention kernels work on: the pool of K/V pages, and the shapes of batches.

Arrays are named by their axes: r rows, t packed prompt rows, n tiles, p pages of a block table,
h query heads, k key/value heads, c = h + 2k heads of a fused projection, x head_dim.
"""

from typing import Any

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
    scratch: what the decode kernel shares between the layers of a loop (see paged_decode.prepare);
    None outside of one.
    """

    pool: jax.Array
    planes: int = struct.field(pytree_node=False)
    scratch: Any = None

    @property
    def num_pages(self) -> int:
        return self.pool.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.pool.shape[3]

    @property
    def page_size(self) -> int:
        return self.pool.shape[4]

    def physical_page(self, logical_page: jax.Array, depth: jax.Array) -> jax.Array:
        return logical_page * self.planes + jnp.minimum(depth, self.planes) - 1


@struct.dataclass
class Places:
    """Where each row's K/V lies: physical page and offset in it, int32 [t]; valid_t: bool, other
    rows lie nowhere."""

    pages_t: jax.Array
    offsets_t: jax.Array
    valid_t: jax.Array


@struct.dataclass
class RowBatch:
    """Decode rows: one token of each request, at any mix of depths.

    tables_rp: int32 [r, pages], block tables (logical pages). positions_r: int32, token positions.
    depths_r: int32, the loop that is run, from 1. valid_r: bool; other rows read no context and
    write nothing.
    """

    tables_rp: jax.Array
    positions_r: jax.Array
    depths_r: jax.Array
    valid_r: jax.Array

    @property
    def num_rows(self) -> int:
        return self.positions_r.shape[0]

    @property
    def row_positions(self) -> jax.Array:
        return self.positions_r

    @property
    def parts(self) -> tuple["RowBatch", None]:
        return self, None

    def at_depth(self, depth: jax.Array) -> "RowBatch":
        return self.replace(depths_r=jnp.full_like(self.depths_r, depth))

    def places(self, kv: PagedKV) -> Places:
        return _places(kv, self.tables_rp, self.positions_r, self.depths_r, self.valid_r)


@struct.dataclass
class TileBatch:
    """Prompt rows of several requests, packed one after the other and cut into tiles.

    The rows of a tile are consecutive positions of one request at one depth; tile i has rows
    first_rows_n[i] .. first_rows_n[i] + counts_n[i] - 1. Tiles follow each other without gaps,
    those with counts_n 0 come last; rows after the last tile are padding.

    tables_np: int32 [n, pages]. starts_n: int32, position of the first row. counts_n, depths_n:
    int32. num_rows: t. tile_rows: the most rows a tile can have.
    """

    tables_np: jax.Array
    starts_n: jax.Array
    counts_n: jax.Array
    depths_n: jax.Array
    num_rows: int = struct.field(pytree_node=False)
    tile_rows: int = struct.field(pytree_node=False)

    @property
    def parts(self) -> tuple[None, "TileBatch"]:
        return None, self

    def at_depth(self, depth: jax.Array) -> "TileBatch":
        return self.replace(depths_n=jnp.full_like(self.depths_n, depth))

    @property
    def first_rows_n(self) -> jax.Array:
        return jnp.cumsum(self.counts_n) - self.counts_n

    @property
    def tiles_t(self) -> jax.Array:
        """Each row's tile, int32 [t]; n for padding rows."""
        ends_n = jnp.cumsum(self.counts_n)
        return jnp.sum(ends_n <= jnp.arange(self.num_rows)[:, None], axis=1, dtype=jnp.int32)

    @property
    def valid_t(self) -> jax.Array:
        return self.tiles_t < self.counts_n.shape[0]

    @property
    def row_positions(self) -> jax.Array:
        """Token positions, int32 [t]; anything in padding rows."""
        return self.count_up(self.starts_n)

    @property
    def row_depths(self) -> jax.Array:
        """int32 [t]; anything in padding rows."""
        return self.depths_n.at[self.tiles_t].get(mode="clip")

    def count_up(self, first_n: jax.Array) -> jax.Array:
        """first_n[i], first_n[i] + 1, ... for the rows of tile i, int32 [t]; anything in padding
        rows."""
        offsets_n = first_n - self.first_rows_n
        return jnp.arange(self.num_rows) + offsets_n.at[self.tiles_t].get(mode="clip")

    def places(self, kv: PagedKV) -> Places:
        positions_t = self.row_positions
        logical_t = self.tables_np.at[self.tiles_t, positions_t // kv.page_size].get(mode="clip")
        pages_t = kv.physical_page(logical_t, self.row_depths)
        return Places(pages_t, positions_t % kv.page_size, self.valid_t)


@struct.dataclass
class MixedBatch:
    """One loop of decode rows and of prompt rows; the decode rows are packed first."""

    rows: RowBatch
    tiles: TileBatch

    @property
    def parts(self) -> tuple[RowBatch, TileBatch]:
        return self.rows, self.tiles


def _places(kv, tables_rp, positions_r, depths_r, valid_r) -> Places:
    logical = jnp.take_along_axis(
        tables_rp, positions_r[:, None] // kv.page_size, axis=1, mode="clip"
    )
    pages_r = kv.physical_page(logical[:, 0], depths_r)
    return Places(pages_r, positions_r % kv.page_size, valid_r)
