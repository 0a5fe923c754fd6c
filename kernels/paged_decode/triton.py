"""Paged decode attention as Pallas-Triton kernels (flash decoding).

A row's context is cut into splits at absolute positions, whose length depends on nothing but the
row's own length. Each split gives an unnormalised sum, its peak and its total weight; a second
kernel adds a row's splits in ascending order. Which program handles which split, and how many
programs there are, never shows in the result: a row's bits are the same in any company.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rlt_jax.kernels.compat import WHOLE, load, store, triton_call
from rlt_jax.kernels.kv_update.triton import load_rotated
from rlt_jax.kernels.paged_decode.triton_splits import (
    MASKED,
    DecodeConfig,
    Row,
    Shape,
    attention,
)
from rlt_jax.kernels.paged_kv import PagedKV, RowBatch

DEFAULT = DecodeConfig()


def paged_decode(q_rhx, kv: PagedKV, layer, batch: RowBatch, interpret, config=DEFAULT):
    rows, heads, _ = q_rhx.shape
    if rows == 0:
        return q_rhx
    shape = Shape.of(kv, batch, heads, q_rhx.dtype, config)
    operands = (*_batch_operands(layer, batch), q_rhx, kv.pool)
    parts = _call_splits(paged_decode_splits, shape, rows, operands, interpret)
    return _combine(parts, batch, shape, interpret)


def write_and_decode(
    qkv_rcx, cos_ry, sin_ry, kv: PagedKV, layer, batch: RowBatch, interpret, config=DEFAULT
):
    rows, channels, head_dim = qkv_rcx.shape
    heads = channels - 2 * kv.kv_heads
    if rows == 0:
        return jnp.zeros((0, heads, head_dim), qkv_rcx.dtype), kv
    shape = Shape.of(kv, batch, heads, qkv_rcx.dtype, config)
    operands = (*_batch_operands(layer, batch), qkv_rcx, cos_ry, sin_ry, kv.pool)
    *parts, pool = _call_splits(
        write_and_decode_splits, shape, rows, operands, interpret, writes=True
    )
    return _combine(parts, batch, shape, interpret), kv.replace(pool=pool)


def _batch_operands(layer, batch: RowBatch):
    layer = jnp.reshape(layer, (1,))
    return layer, batch.tables_rp, batch.positions_r, batch.depths_r, batch.valid_r


def _call_splits(body, shape: Shape, rows, operands, interpret, writes=False):
    """Runs `body` for each row, K/V head and lane. Returns (sums, peaks, totals[, pool])."""
    config, splits = shape.config, shape.max_splits
    lanes = config.lanes(rows, shape.kv_heads, splits)
    heads_first = (shape.kv_heads, lanes, rows)
    outs = [
        jax.ShapeDtypeStruct((rows, splits, shape.heads, *width), jnp.float32)
        for width in ((shape.width,), (), ())
    ]
    pool = operands[-1]
    if writes:
        outs.append(jax.ShapeDtypeStruct(pool.shape, pool.dtype))
    return triton_call(
        functools.partial(body, shape=shape, lanes=lanes),
        grid=heads_first if config.heads_first else (rows, shape.kv_heads, lanes),
        out_shape=outs,
        in_specs=[WHOLE] * len(operands),
        out_specs=[WHOLE] * len(outs),
        num_warps=config.num_warps,
        num_stages=config.num_stages if shape.uses_dot else 1,
        interpret=interpret,
        name=body.__name__,
        input_output_aliases={len(operands) - 1: 3} if writes else {},
    )(*operands)


def paged_decode_splits(
    layer_ref,
    tables_ref,
    positions_ref,
    depths_ref,
    valid_ref,
    q_ref,
    pool_ref,
    *part_refs,
    shape,
    lanes,
):
    row = Row(shape, layer_ref, tables_ref, positions_ref, depths_ref, valid_ref)

    def load_q(heads, at_x, mask):
        return load(q_ref.at[row.row, heads, at_x], mask=mask, other=0).astype(jnp.float32)

    @pl.when(row.lane < row.splits)
    def _():
        attends = attention(row, pool_ref, load_q)

        def attend(split):
            first = split * row.split_tokens
            end = jnp.minimum(first + row.split_tokens, row.length)
            attends.store(attends.attend(first, end, attends.nothing()), split, part_refs)

        row.for_each_split(lanes, attend)


def write_and_decode_splits(
    layer_ref,
    tables_ref,
    positions_ref,
    depths_ref,
    valid_ref,
    qkv_ref,
    cos_ref,
    sin_ref,
    pool_in_ref,
    *out_refs,
    shape,
    lanes,
):
    """As above, but the row's own token comes from its projection, never from the pool."""
    *part_refs, pool_ref = out_refs
    row = Row(shape, layer_ref, tables_ref, positions_ref, depths_ref, valid_ref)

    def load_q(heads, at_x, mask):
        return load_rotated(qkv_ref, cos_ref, sin_ref, row.row, heads, at_x, shape.head_dim, mask)

    @pl.when(row.lane < row.splits)
    def _():
        attends = attention(row, pool_in_ref, load_q)
        own_kv = _own_token(row, qkv_ref, load_q)
        last = row.splits - 1

        def attend(split):
            first = split * row.split_tokens
            end = jnp.minimum(first + row.split_tokens, row.position)
            own = attends.one_token(*own_kv, seen=split == last)
            attends.store(attends.attend(first, end, own), split, part_refs)

        row.for_each_split(lanes, attend)

        @pl.when(lax.rem(last, jnp.int32(lanes)) == row.lane)
        def _():
            _write(row, pool_ref, own_kv)


def _own_token(row: Row, qkv_ref, load_rotated_head):
    """The row's own K and V [x], as the pool will hold them."""
    shape = row.shape
    at_x = jnp.arange(shape.width)
    in_head_x = at_x < shape.head_dim
    k_head = shape.heads + row.kv_head
    k_x = load_rotated_head(k_head, at_x, in_head_x)
    v_x = load(qkv_ref.at[row.row, k_head + shape.kv_heads, at_x], mask=in_head_x, other=0)
    return tuple(a.astype(shape.q_dtype).astype(shape.kv_dtype) for a in (k_x, v_x))


def _write(row: Row, pool_ref, own_kv):
    shape = row.shape
    at_x = jnp.arange(shape.width)
    entry, offset = shape.divide_by_page(row.position)
    page = row.physical_page(row.tables_ref[row.row, entry])
    for side, own_x in enumerate(own_kv):
        place = pool_ref.at[row.layer, page, side, row.kv_head, offset, at_x]
        store(place, own_x, mask=at_x < shape.head_dim)


def _combine(parts, batch: RowBatch, shape: Shape, interpret):
    rows = batch.positions_r.shape[0]
    return triton_call(
        functools.partial(combine_splits, shape=shape),
        grid=(shape.heads, rows),
        out_shape=jax.ShapeDtypeStruct((rows, shape.heads, shape.head_dim), shape.q_dtype),
        in_specs=[WHOLE] * 5,
        out_specs=WHOLE,
        num_warps=shape.config.combine_warps,
        num_stages=1,
        interpret=interpret,
        name="combine_splits",
    )(batch.positions_r, batch.valid_r, *parts)


def combine_splits(positions_ref, valid_ref, sums_ref, peaks_ref, totals_ref, out_ref, *, shape):
    """Adds a row's splits, some at a time, in ascending order."""
    head, row = pl.program_id(0), pl.program_id(1)
    length = jnp.where(valid_ref[row], positions_ref[row] + 1, 0)
    split_tokens = shape.split_tokens(length)
    splits = lax.div(length + split_tokens - 1, split_tokens)
    at_once = shape.config.combine_splits
    at_x = jnp.arange(shape.width)

    def step(i, state):
        peak, total, sum_x = state
        at_s = i * at_once + jnp.arange(at_once)
        real_s = at_s < splits
        peak_s = load(peaks_ref.at[row, at_s, head], mask=real_s, other=MASKED)
        total_s = load(totals_ref.at[row, at_s, head], mask=real_s, other=0)
        sums = sums_ref.at[row, at_s[:, None], head, at_x[None]]
        sum_sx = load(sums, mask=real_s[:, None], other=0)
        new_peak = jnp.maximum(peak, jnp.max(peak_s))
        decay, weight_s = jnp.exp2(peak - new_peak), jnp.exp2(peak_s - new_peak)
        total = total * decay + jnp.sum(total_s * weight_s)
        return new_peak, total, sum_x * decay + jnp.sum(sum_sx * weight_s[:, None], axis=0)

    start = (jnp.float32(MASKED), jnp.float32(0), jnp.zeros((shape.width,), jnp.float32))
    steps = lax.div(splits + at_once - 1, jnp.int32(at_once))
    _, total, sum_x = lax.fori_loop(0, steps, step, start)
    out_x = sum_x / jnp.where(total == 0, 1.0, total)
    store(out_ref.at[row, head, at_x], out_x.astype(out_ref.dtype), mask=at_x < shape.head_dim)
