"""Paged causal attention of prompt tiles as a Pallas-Triton kernel (FlashAttention-2 style).

One program a (tile, head): the tile's rows stay in registers while the keys and values of its
plane come by in blocks, each key through the block table. The blocks lie at absolute positions
and a block past a row's own position changes nothing in it, so a row's bits depend on its own
context only, whatever tile it is in.

Arrays are named by their axes: m rows of a tile, c keys of a block, and those of paged_kv.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rlt_jax.kernels.compat import WHOLE, dot, exp2, load, store, triton_call
from rlt_jax.kernels.paged_kv import PagedKV, TileBatch

_SMALLEST_DOT = 16  # of any side


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """key_block: keys a step; a power of two, as the page size must be. tile_programs: programs of
    a head, as a multiple of the tiles that full ones would make of the batch."""

    key_block: int = 128
    num_warps: int = 8
    num_stages: int = 3
    tile_programs: int = 2

    @classmethod
    def of(cls, dtype, head_dim: int) -> "PrefillConfig":
        if jnp.dtype(dtype).itemsize <= 2:
            return cls() if head_dim <= 128 else cls(key_block=64, num_stages=2)
        # Without tensor cores, products are unrolled over the threads: more of them, less each.
        return cls(key_block=32, num_warps=8, num_stages=2)


def paged_prefill(
    q_thx: jax.Array,
    kv: PagedKV,
    layer: jax.Array,
    batch: TileBatch,
    interpret: bool,
    config: PrefillConfig | None = None,
) -> jax.Array:
    heads, head_dim = q_thx.shape[1:]
    config = config or PrefillConfig.of(q_thx.dtype, head_dim)
    lengths_n = jnp.where(batch.counts_n > 0, batch.starts_n + batch.counts_n, 0)
    order_n = jnp.argsort(-lengths_n)  # most keys first, no tiles last
    tiles = (batch.first_rows_n, batch.starts_n, batch.counts_n, batch.depths_n)
    tiles_n4 = jnp.stack(tiles, axis=1)[order_n].astype(jnp.int32)
    layer_and_tiles = jnp.stack([layer.reshape(()), jnp.sum(batch.counts_n > 0)]).astype(jnp.int32)
    # Most of n may be no tiles, and a program that has none still takes its turn.
    programs = config.tile_programs * pl.cdiv(batch.num_rows, batch.tile_rows)
    kernel = functools.partial(
        _kernel,
        planes=kv.planes,
        rows=_block(batch.tile_rows),
        columns=_block(head_dim),
        config=config,
        interpret=interpret,
    )
    return triton_call(
        kernel,
        # Heads run fastest: the programs of a tile are neighbours in time.
        grid=(heads, min(programs, len(order_n))),
        out_shape=jax.ShapeDtypeStruct(q_thx.shape, q_thx.dtype),
        in_specs=[WHOLE] * 6,
        out_specs=WHOLE,
        # The output takes q's place: what no tile writes stays as defined as it was.
        input_output_aliases={4: 0},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="paged_prefill",
    )(
        layer_and_tiles,
        order_n.astype(jnp.int32),
        tiles_n4,
        batch.tables_np,
        q_thx,
        kv.pool,
    )


def _block(size: int) -> int:
    return max(_SMALLEST_DOT, pl.next_power_of_2(size))


def _kernel(
    layer_and_tiles_ref,  # [2]: layer, tiles that there are
    order_ref,  # [n]
    tiles_ref,  # [n, 4]: first row, start, count, depth; by descending length
    tables_ref,  # [n, p]
    q_ref,  # [t, h, x]
    pool_ref,  # [layers, physical pages, 2, k, page_size, x]
    out_ref,  # [t, h, x], the same memory as q_ref
    *,
    planes: int,
    rows: int,
    columns: int,
    config: PrefillConfig,
    interpret: bool,
):
    head, first, programs = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    layer, tiles = layer_and_tiles_ref[0], layer_and_tiles_ref[1]
    column_x = jnp.arange(columns)

    def attend(i, nothing):
        tile = first + i * programs
        first_row, start, count, depth = (tiles_ref[tile, i] for i in range(4))
        read_block = functools.partial(
            _read_block,
            pool_ref,
            tables_ref,
            row=order_ref[tile],
            layer=layer,
            physical_page=functools.partial(PagedKV(None, planes).physical_page, depth=depth),
            head=lax.div(head, q_ref.shape[1] // pool_ref.shape[3]),
            column_x=column_x,
            dtype=q_ref.dtype,
        )
        row_m = first_row + jnp.arange(rows)
        index = (row_m[:, None], head, column_x[None, :])
        own_mx = (jnp.arange(rows) < count)[:, None] & (column_x < q_ref.shape[2])[None, :]
        q_mx = load(q_ref.at[index], mask=own_mx, other=0)
        scale = math.log2(math.e) * q_ref.shape[2] ** -0.5
        step = functools.partial(_step, q_mx, scale, functools.partial(exp2, interpret=interpret))
        out_mx = _attend_tile(step, q_mx.shape, read_block, start, count, config.key_block)
        store(out_ref.at[index], out_mx.astype(out_ref.dtype), mask=own_mx)
        return nothing

    steps = lax.div(jnp.maximum(tiles - first, 0) + programs - 1, jnp.int32(programs))
    lax.fori_loop(0, steps, attend, jnp.int32(0))


def _attend_tile(step, shape, read_block, start, count, key_block: int):
    """float32 [m, x]; count > 0."""
    rows, columns = shape
    position_m = start + jnp.arange(rows)
    offset_c = jnp.arange(key_block)

    def add_block(i, carry):
        position_c = i * key_block + offset_c
        seen_mc = position_c[None, :] <= position_m[:, None]
        return step(carry, *read_block(i, offset_c, position_c < start + count), seen_mc)

    carry = (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, columns), jnp.float32),
    )
    blocks = lax.div(start + count + key_block - 1, jnp.int32(key_block))
    _, total_m, mixed_mx = lax.fori_loop(0, blocks, add_block, carry)
    return mixed_mx / total_m[:, None]


def _read_block(
    pool_ref, tables_ref, i, offset_c, valid_c, *, row, layer, physical_page, head, column_x, dtype
):
    """Keys and values [c, x] of block i; zeros where invalid."""
    page_size, head_dim = pool_ref.shape[4:]
    block = offset_c.size
    if page_size < block:
        table_at = tables_ref.at[row, i * (block // page_size) + lax.div(offset_c, page_size)]
        logical_c = load(table_at, mask=valid_c, other=0)
        page_c1 = physical_page(logical_c)[:, None]
        offset_c = lax.rem(offset_c, page_size)
    else:
        blocks_a_page = page_size // block
        page_c1 = physical_page(tables_ref[row, lax.div(i, blocks_a_page)])
        offset_c = lax.rem(i, blocks_a_page) * block + offset_c

    mask_cx = valid_c[:, None] & (column_x < head_dim)[None, :]
    places = (
        pool_ref.at[layer, page_c1, side, head, offset_c[:, None], column_x[None, :]]
        for side in (0, 1)
    )
    return [load(place, mask=mask_cx, other=0).astype(dtype) for place in places]


def _step(q_mx, scale, exp2, carry, keys_cx, values_cx, seen_mc):
    """Online softmax in base 2. Every row sees position 0, so its peak is finite from the first
    block on, and a block that it does not see leaves it as it is, to the bit."""
    peak_m, total_m, mixed_mx = carry
    precision = lax.Precision.HIGHEST if q_mx.dtype == jnp.float32 else None
    scores_mc = dot(q_mx, keys_cx, trans_b=True, precision=precision)
    scores_mc = jnp.where(seen_mc, scores_mc, -jnp.inf)
    new_peak_m = jnp.maximum(peak_m, jnp.max(scores_mc, axis=1) * scale)
    decay_m = exp2(peak_m - new_peak_m)
    weights_mc = exp2(scores_mc * scale - new_peak_m[:, None])
    total_m = total_m * decay_m + jnp.sum(weights_mc, axis=1)
    mixed_mx = mixed_mx * decay_m[:, None]
    mixed_mx += dot(weights_mc.astype(values_cx.dtype), values_cx, precision=precision)
    return new_peak_m, total_m, mixed_mx
