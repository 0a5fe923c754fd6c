"""Paged decode attention as Pallas-Triton kernels (flash decoding).

A row's context is cut into splits at absolute positions, whose length depends on nothing but the
row's own length. Each split gives an unnormalised sum, its peak and its total weight; the program
that finishes a row and head last adds their splits in ascending order. Which program that is,
which one handles which split, and how many there are, never shows in the result: a row's bits are
the same in any company.
"""

from typing import NamedTuple

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


class Sharing(NamedTuple):
    """Where rows have several programs. filled: int32 [1], rows up to the last valid one.
    arrivals_rk: int32 [r, k], programs that have finished a row and head, zero between calls."""

    filled: jax.Array
    arrivals_rk: jax.Array


def make_sharing(kv: PagedKV, batch: RowBatch, config=DEFAULT) -> Sharing | None:
    """None where each row has one program."""
    rows = batch.positions_r.shape[0]
    if config.columns(rows, kv.kv_heads) == rows:
        return None
    number_r = jnp.where(batch.valid_r, jnp.arange(1, rows + 1, dtype=jnp.int32), 0)
    filled = jnp.max(number_r, keepdims=True, initial=0)
    return Sharing(filled, jnp.zeros((rows, kv.kv_heads), jnp.int32))


def paged_decode(q_rhx, kv: PagedKV, layer, batch: RowBatch, interpret, config=DEFAULT):
    rows, heads, _ = q_rhx.shape
    if rows == 0:
        return q_rhx
    shape = Shape.of(kv, batch, heads, q_rhx.dtype, config)
    sharing = make_sharing(kv, batch, config)
    return _call(_paged_decode, shape, layer, batch, (q_rhx,), kv.pool, sharing, interpret)[0]


def write_and_decode(
    qkv_rcx, cos_ry, sin_ry, kv: PagedKV, layer, batch: RowBatch, interpret, config=DEFAULT
):
    rows, channels, head_dim = qkv_rcx.shape
    heads = channels - 2 * kv.kv_heads
    if rows == 0:
        return jnp.zeros((0, heads, head_dim), qkv_rcx.dtype), kv
    shape = Shape.of(kv, batch, heads, qkv_rcx.dtype, config)
    sharing = kv.scratch or make_sharing(kv, batch, config)
    inputs = (qkv_rcx, cos_ry, sin_ry)
    out_rhx, pool, sharing = _call(
        _write_and_decode, shape, layer, batch, inputs, kv.pool, sharing, interpret
    )
    return out_rhx, kv.replace(pool=pool, scratch=sharing if kv.scratch else None)


def _call(body, shape: Shape, layer, batch: RowBatch, inputs, pool, sharing, interpret):
    """Runs `body` for each K/V head, row and lane: (out_rhx, the pool and sharing after it)."""
    config, rows = shape.config, batch.positions_r.shape[0]
    writes = body is _write_and_decode
    row_operands = (batch.tables_rp, batch.positions_r, batch.depths_r, batch.valid_r)
    operands = (jnp.reshape(layer, (1,)), *row_operands, *inputs, pool, *(sharing or ()))
    pool_at = len(operands) - (3 if sharing else 1)
    in_place = [pool_at] * writes + [len(operands) - 1] * bool(sharing)  # the pool, the arrivals
    out = jax.ShapeDtypeStruct((rows, shape.heads, shape.head_dim), shape.q_dtype)
    parts = [
        jax.ShapeDtypeStruct((rows, shape.max_parts, shape.heads, *width), jnp.float32)
        for width in ((shape.width,), (), ())
    ]
    written = [jax.ShapeDtypeStruct(operands[at].shape, operands[at].dtype) for at in in_place]

    def kernel(*refs):
        row_refs, input_refs, pool_ref = refs[:5], refs[5:pool_at], refs[pool_at]
        filled_ref = refs[pool_at + 1] if sharing else None
        out_ref, *part_refs = refs[len(operands) :][:4]
        written_refs = refs[len(operands) + 4 :]
        row = Row(shape, row_refs, filled_ref, own_apart=writes)

        @pl.when(row.lane < row.parts)
        def _():
            body(row, input_refs, pool_ref, part_refs, written_refs[0] if writes else None)
            _finish(row, part_refs, written_refs[-1] if sharing else None, out_ref, interpret)

        _finish_empty(row, out_ref)

    out_rhx, _, _, _, *written = triton_call(
        kernel,
        # The heads of a page lie side by side.
        grid=(shape.kv_heads, config.columns(rows, shape.kv_heads)),
        out_shape=[out, *parts, *written],
        in_specs=[WHOLE] * len(operands),
        out_specs=[WHOLE] * (4 + len(written)),
        num_warps=config.num_warps,
        num_stages=config.num_stages if shape.uses_dot else 1,
        interpret=interpret,
        name=body.__name__[1:],
        input_output_aliases={at: 4 + i for i, at in enumerate(in_place)},
    )(*operands)
    sharing = sharing and Sharing(sharing.filled, written[-1])
    return out_rhx, written[0] if writes else None, sharing


def _paged_decode(row: Row, input_refs, pool_ref, part_refs, _):
    (q_ref,) = input_refs

    def load_q(heads, at_x, mask):
        return load(q_ref.at[row.row, heads, at_x], mask=mask, other=0).astype(jnp.float32)

    attend_lane(row, attention(row, pool_ref, load_q), part_refs)


def _write_and_decode(row: Row, input_refs, pool_ref, part_refs, written_pool_ref):
    """The row's own token comes from its projection, never from the pool."""
    qkv_ref, cos_ref, sin_ref = input_refs

    def load_q(heads, at_x, mask):
        return load_rotated(
            qkv_ref, cos_ref, sin_ref, row.row, heads, at_x, row.shape.head_dim, mask
        )

    attends = attention(row, pool_ref, load_q)

    @pl.when(lax.rem(row.splits, jnp.int32(row.lanes)) == row.lane)
    def _():
        own_kv = _own_token(row, qkv_ref, load_q)
        attends.store(attends.one_token(*own_kv), row.splits, part_refs)
        _write(row, written_pool_ref, own_kv)

    attend_lane(row, attends, part_refs)


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
    entry, offset = row.shape.divide_by_page(row.position)
    page = row.pages(entry)
    at_x = jnp.arange(row.shape.width)
    for side, own_x in enumerate(own_kv):
        place = pool_ref.at[row.layer, page, side, row.kv_head, offset, at_x]
        store(place, own_x, mask=at_x < row.shape.head_dim)


def _finish(row: Row, part_refs, arrivals_ref, out_ref, interpret):
    """Adds the parts of the row's heads, in the program that comes last."""
    if not interpret:  # there, programs run one after the other
        barrier()  # every thread's parts are stored before this program counts, or adds them

    def add():
        for i in range(row.shape.group):
            head = row.kv_head * row.shape.group + i
            _store_head(row, head, _add_parts(row, head, part_refs), out_ref)

    if arrivals_ref is None:  # a row's only one
        return add()
    arrived = atomic_add(arrivals_ref, (row.row, row.kv_head), jnp.int32(1))

    @pl.when(arrived == jnp.minimum(row.parts, row.lanes) - 1)
    def _():
        add()
        arrivals_ref[row.row, row.kv_head] = jnp.int32(0)


def _finish_empty(row: Row, out_ref):
    @pl.when((row.parts == 0) & (row.lane == 0))
    def _():
        for i in range(row.shape.group):
            head = row.kv_head * row.shape.group + i
            _store_head(row, head, jnp.zeros((row.shape.width,), jnp.float32), out_ref)


def _store_head(row: Row, head, out_x, out_ref):
    at_x = jnp.arange(row.shape.width)
    place = out_ref.at[row.row, head, at_x]
    store(place, out_x.astype(out_ref.dtype), mask=at_x < row.shape.head_dim)


def _add_parts(row: Row, head, part_refs):
    """A head's parts, some at a time, in ascending order."""
    sums_ref, peaks_ref, totals_ref = part_refs
    at_once = row.shape.config.combine_splits
    at_x = jnp.arange(row.shape.width)

    def step(i, state):
        peak, total, sum_x = state
        at_s = i * at_once + jnp.arange(at_once)
        real_s = at_s < row.parts
        peak_s = load(peaks_ref.at[row.row, at_s, head], mask=real_s, other=MASKED)
        total_s = load(totals_ref.at[row.row, at_s, head], mask=real_s, other=0)
        sums = sums_ref.at[row.row, at_s[:, None], head, at_x[None]]
        sum_sx = load(sums, mask=real_s[:, None], other=0)
        new_peak = jnp.maximum(peak, jnp.max(peak_s))
        decay, weight_s = jnp.exp2(peak - new_peak), jnp.exp2(peak_s - new_peak)
        total = total * decay + jnp.sum(total_s * weight_s)
        return new_peak, total, sum_x * decay + jnp.sum(sum_sx * weight_s[:, None], axis=0)

    start = (jnp.float32(MASKED), jnp.float32(0), jnp.zeros((row.shape.width,), jnp.float32))
    steps = lax.div(row.parts + at_once - 1, jnp.int32(at_once))
    _, total, sum_x = lax.fori_loop(0, steps, step, start)
    return sum_x / total
