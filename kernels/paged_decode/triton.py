"""Paged decode attention as Pallas-Triton kernels (flash decoding).

A row's context is cut into splits at absolute positions, whose length depends on nothing but the
row's own length. Each split gives an unnormalised sum, its peak and its total weight; the program
that finishes a row and head last adds their splits in ascending order. Which program that is,
which one handles which split, and how many there are, never shows in the result: a row's bits are
the same in any company.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rlt_jax.kernels.compat import WHOLE, atomic_add, barrier, load, store, triton_call
from rlt_jax.kernels.kv_update.triton import load_rotated
from rlt_jax.kernels.paged_decode.triton_splits import (
    MASKED,
    DecodeConfig,
    Row,
    Shape,
    attend_lane,
    attention,
)
from rlt_jax.kernels.paged_kv import PagedKV, RowBatch

DEFAULT = DecodeConfig()


def paged_decode(q_rhx, kv: PagedKV, layer, batch: RowBatch, interpret, config=DEFAULT):
    rows, heads, _ = q_rhx.shape
    if rows == 0:
        return q_rhx
    shape = Shape.of(kv, batch, heads, q_rhx.dtype, config)
    operands = (*_batch_operands(layer, batch), q_rhx, kv.pool, make_arrivals(kv, batch))
    return _call(paged_decode_splits, shape, rows, operands, interpret)[0]


def write_and_decode(
    qkv_rcx, cos_ry, sin_ry, kv: PagedKV, layer, batch: RowBatch, interpret, config=DEFAULT
):
    rows, channels, head_dim = qkv_rcx.shape
    heads = channels - 2 * kv.kv_heads
    if rows == 0:
        return jnp.zeros((0, heads, head_dim), qkv_rcx.dtype), kv
    shape = Shape.of(kv, batch, heads, qkv_rcx.dtype, config)
    shared = kv.scratch is not None
    arrivals_rk = kv.scratch if shared else make_arrivals(kv, batch)
    operands = (*_batch_operands(layer, batch), qkv_rcx, cos_ry, sin_ry, kv.pool, arrivals_rk)
    out_rhx, *_, arrivals_rk, pool = _call(
        write_and_decode_splits, shape, rows, operands, interpret, writes=True
    )
    return out_rhx, kv.replace(pool=pool, scratch=arrivals_rk if shared else None)


def make_arrivals(kv: PagedKV, batch: RowBatch) -> jax.Array:
    """Counters of the programs that have finished a row and head, zero between calls."""
    return jnp.zeros((batch.positions_r.shape[0], kv.kv_heads), jnp.int32)


def _batch_operands(layer, batch: RowBatch):
    layer = jnp.reshape(layer, (1,))
    return layer, batch.tables_rp, batch.positions_r, batch.depths_r, batch.valid_r


def _call(body, shape: Shape, rows, operands, interpret, writes=False):
    """Runs `body` for each row, K/V head and lane. Returns (out_rhx, ...[, pool])."""
    config, splits = shape.config, shape.max_splits
    lanes = config.lanes(rows, shape.kv_heads, splits)
    out = jax.ShapeDtypeStruct((rows, shape.heads, shape.head_dim), shape.q_dtype)
    parts = [
        jax.ShapeDtypeStruct((rows, splits, shape.heads, *width), jnp.float32)
        for width in ((shape.width,), (), ())
    ]
    pool, arrivals = operands[-2:]
    outs = [out, *parts, jax.ShapeDtypeStruct(arrivals.shape, arrivals.dtype)]
    aliases = {len(operands) - 1: len(outs) - 1}
    if writes:
        aliases[len(operands) - 2] = len(outs)
        outs.append(jax.ShapeDtypeStruct(pool.shape, pool.dtype))
    return triton_call(
        functools.partial(body, shape=shape, lanes=lanes, interpret=interpret),
        # The heads of a page lie side by side; lanes without a split come last.
        grid=(shape.kv_heads, rows, lanes),
        out_shape=outs,
        in_specs=[WHOLE] * len(operands),
        out_specs=[WHOLE] * len(outs),
        num_warps=config.num_warps,
        num_stages=config.num_stages if shape.uses_dot else 1,
        interpret=interpret,
        name=body.__name__,
        input_output_aliases=aliases,
    )(*operands)


def paged_decode_splits(
    layer_ref,
    tables_ref,
    positions_ref,
    depths_ref,
    valid_ref,
    q_ref,
    pool_ref,
    _,
    out_ref,
    *work_refs,
    shape,
    lanes,
    interpret,
):
    *part_refs, arrivals_ref = work_refs
    row = Row(shape, layer_ref, tables_ref, positions_ref, depths_ref, valid_ref)

    def load_q(heads, at_x, mask):
        return load(q_ref.at[row.row, heads, at_x], mask=mask, other=0).astype(jnp.float32)

    @pl.when(row.lane < row.splits)
    def _():
        attend_lane(row, attention(row, pool_ref, load_q), lanes, row.length, None, part_refs)
        _finish(row, lanes, part_refs, arrivals_ref, out_ref, interpret)

    _finish_empty(row, out_ref)


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
    _,
    out_ref,
    *work_refs,
    shape,
    lanes,
    interpret,
):
    """As above, but the row's own token comes from its projection, never from the pool."""
    *part_refs, arrivals_ref, pool_ref = work_refs
    row = Row(shape, layer_ref, tables_ref, positions_ref, depths_ref, valid_ref)

    def load_q(heads, at_x, mask):
        return load_rotated(qkv_ref, cos_ref, sin_ref, row.row, heads, at_x, shape.head_dim, mask)

    @pl.when(row.lane < row.splits)
    def _():
        attends = attention(row, pool_in_ref, load_q)
        own_kv = _own_token(row, qkv_ref, load_q)
        own_entry, own_offset = row.shape.divide_by_page(row.position)
        own_page = row.physical_page(row.tables_ref[row.row, own_entry])
        own_state = attends.one_token(*own_kv)
        attend_lane(row, attends, lanes, row.position, own_state, part_refs)

        @pl.when(lax.rem(row.splits - 1, jnp.int32(lanes)) == row.lane)
        def _():
            _write(row, pool_ref, (own_page, own_offset), own_kv)

        _finish(row, lanes, part_refs, arrivals_ref, out_ref, interpret)

    _finish_empty(row, out_ref)


def _own_token(row: Row, qkv_ref, load_rotated_head):
    """The row's own K and V [x], as the pool will hold them."""
    shape = row.shape
    at_x = jnp.arange(shape.width)
    in_head_x = at_x < shape.head_dim
    k_head = shape.heads + row.kv_head
    k_x = load_rotated_head(k_head, at_x, in_head_x)
    v_x = load(qkv_ref.at[row.row, k_head + shape.kv_heads, at_x], mask=in_head_x, other=0)
    return tuple(a.astype(shape.q_dtype).astype(shape.kv_dtype) for a in (k_x, v_x))


def _write(row: Row, pool_ref, own_place, own_kv):
    page, offset = own_place
    at_x = jnp.arange(row.shape.width)
    for side, own_x in enumerate(own_kv):
        place = pool_ref.at[row.layer, page, side, row.kv_head, offset, at_x]
        store(place, own_x, mask=at_x < row.shape.head_dim)


def _finish(row: Row, lanes, part_refs, arrivals_ref, out_ref, interpret):
    """Adds the splits of the row's heads, in the program that comes last."""
    if not interpret:  # there, programs run one after the other
        barrier()  # every thread's parts are stored before this program counts
    arrived = atomic_add(arrivals_ref, (row.row, row.kv_head), jnp.int32(1))

    @pl.when(arrived == jnp.minimum(row.splits, lanes) - 1)
    def _():
        for i in range(row.shape.group):
            head = row.kv_head * row.shape.group + i
            _store_head(row, head, _add_splits(row, head, part_refs), out_ref)
        arrivals_ref[row.row, row.kv_head] = jnp.int32(0)


def _finish_empty(row: Row, out_ref):
    @pl.when((row.splits == 0) & (row.lane == 0))
    def _():
        for i in range(row.shape.group):
            head = row.kv_head * row.shape.group + i
            _store_head(row, head, jnp.zeros((row.shape.width,), jnp.float32), out_ref)


def _store_head(row: Row, head, out_x, out_ref):
    at_x = jnp.arange(row.shape.width)
    place = out_ref.at[row.row, head, at_x]
    store(place, out_x.astype(out_ref.dtype), mask=at_x < row.shape.head_dim)


def _add_splits(row: Row, head, part_refs):
    """A head's splits, some at a time, in ascending order."""
    sums_ref, peaks_ref, totals_ref = part_refs
    at_once = row.shape.config.combine_splits
    at_x = jnp.arange(row.shape.width)

    def step(i, state):
        peak, total, sum_x = state
        at_s = i * at_once + jnp.arange(at_once)
        real_s = at_s < row.splits
        peak_s = load(peaks_ref.at[row.row, at_s, head], mask=real_s, other=MASKED)
        total_s = load(totals_ref.at[row.row, at_s, head], mask=real_s, other=0)
        sums = sums_ref.at[row.row, at_s[:, None], head, at_x[None]]
        sum_sx = load(sums, mask=real_s[:, None], other=0)
        new_peak = jnp.maximum(peak, jnp.max(peak_s))
        decay, weight_s = jnp.exp2(peak - new_peak), jnp.exp2(peak_s - new_peak)
        total = total * decay + jnp.sum(total_s * weight_s)
        return new_peak, total, sum_x * decay + jnp.sum(sum_sx * weight_s[:, None], axis=0)

    start = (jnp.float32(MASKED), jnp.float32(0), jnp.zeros((row.shape.width,), jnp.float32))
    steps = lax.div(row.splits + at_once - 1, jnp.int32(at_once))
    _, total, sum_x = lax.fori_loop(0, steps, step, start)
    return sum_x / total
