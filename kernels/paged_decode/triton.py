"""Paged decode attention as Pallas-Triton kernels (flash decoding).

A row's context is cut into splits at absolute positions, whose length depends on nothing but the
row's own length. Each split gives a part: an unnormalised sum, its peak and its total weight. Parts
are folded one after the other in ascending order: in registers where a row has one program, else
out of memory by the program that finishes a row and head last. Which program that is, which one
handles which split, and how many there are, never shows in the result: a row's bits are the same in
any company.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rlt_jax.kernels.compat import WHOLE, atomic_add, barrier, load, store, triton_call
from rlt_jax.kernels.kv_update.triton import load_rotated
from rlt_jax.kernels.paged_decode.triton_splits import (
    DecodeConfig,
    Part,
    Row,
    Shape,
    attend_lane,
    attention,
    fold,
    where,
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
    part_heads = (rows, shape.max_parts, shape.heads)
    parts = [
        jax.ShapeDtypeStruct((*part_heads, *width), jnp.float32)
        for width in ((), (), (shape.width,))
        if sharing
    ]
    written = [jax.ShapeDtypeStruct(operands[at].shape, operands[at].dtype) for at in in_place]
    outputs = [out, *parts, *written]

    def kernel(*refs):
        row_refs, input_refs, pool_ref = refs[:5], refs[5:pool_at], refs[pool_at]
        filled_ref = refs[pool_at + 1] if sharing else None
        out_ref, *other_refs = refs[len(operands) :]
        part_refs, written_refs = other_refs[: len(parts)], other_refs[len(parts) :]
        row = Row(shape, row_refs, filled_ref, own_apart=writes)
        written_pool_ref = written_refs[0] if writes else None
        attend = functools.partial(body, row, input_refs, pool_ref, written_pool_ref)

        @pl.when(row.lane < row.parts)
        def _():
            if sharing:
                attend(functools.partial(_store_parts, row, part_refs), ())
                _finish(row, part_refs, written_refs[-1], out_ref, interpret)
            else:
                for block, part in enumerate(attend(_fold_parts, _no_parts(shape))):
                    _store_out(row, block, part.quotient_hx, out_ref)

        _finish_empty(row, out_ref)

    out_rhx, *others = triton_call(
        kernel,
        # The heads of a page lie side by side.
        grid=(shape.kv_heads, config.columns(rows, shape.kv_heads)),
        out_shape=outputs,
        in_specs=[WHOLE] * len(operands),
        out_specs=[WHOLE] * len(outputs),
        num_warps=config.num_warps,
        num_stages=config.num_stages if shape.uses_dot else 1,
        interpret=interpret,
        name=body.__name__[1:],
        input_output_aliases={at: 1 + len(parts) + i for i, at in enumerate(in_place)},
    )(*operands)
    sharing = sharing and Sharing(sharing.filled, others[-1])
    return out_rhx, others[len(parts)] if writes else None, sharing


def _paged_decode(row: Row, input_refs, pool_ref, _, take, taken):
    (q_ref,) = input_refs

    def load_q(heads, at_x, mask):
        return load(q_ref.at[row.row, heads, at_x], mask=mask, other=0).astype(jnp.float32)

    return attend_lane(row, attention(row, pool_ref, load_q), take, taken)


def _write_and_decode(row: Row, input_refs, pool_ref, written_pool_ref, take, taken):
    """The row's own token comes from its projection, never from the pool."""
    qkv_ref, cos_ref, sin_ref = input_refs

    def load_q(heads, at_x, mask):
        return load_rotated(
            qkv_ref, cos_ref, sin_ref, row.row, heads, at_x, row.shape.head_dim, mask
        )

    attends = attention(row, pool_ref, load_q)

    def take_own():
        own_kv = _own_token(row, qkv_ref, load_q)
        _write(row, written_pool_ref, own_kv)
        return take(taken, 0, attends.one_token(*own_kv))

    is_mine = lax.rem(row.splits, jnp.int32(row.lanes)) == row.lane
    return attend_lane(row, attends, take, lax.cond(is_mine, take_own, lambda: taken))


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


def _no_parts(shape: Shape):
    blocks = pl.cdiv(shape.group, shape.block_heads)
    return (Part.nothing(shape.block_heads, shape.width),) * blocks


def _fold_parts(folded, _, parts):
    """`take` of a row's only program."""
    return tuple(map(fold, folded, parts))


def _store_parts(row: Row, part_refs, taken, at, parts):
    """`take` of one program among several."""
    for block, part in enumerate(parts):
        heads_h, real_h = row.heads(block, row.shape.block_heads)
        masks = real_h, real_h, real_h[:, None]
        for place, values, mask in zip(_places(row, part_refs, at, heads_h), part, masks):
            store(place, values, mask=mask)
    return taken


def _places(row: Row, part_refs, at, heads_h):
    """Where the part of these heads lies in memory."""
    peaks_ref, totals_ref, sums_ref = part_refs
    here, at_x = (row.row, at, heads_h), jnp.arange(row.shape.width)
    sums = sums_ref.at[row.row, at, heads_h[:, None], at_x[None]]
    return peaks_ref.at[here], totals_ref.at[here], sums


def _finish(row: Row, part_refs, arrivals_ref, out_ref, interpret):
    """Folds the parts of the row's heads, in the program that comes last."""
    if not interpret:  # there, programs run one after the other
        barrier()  # every thread's parts are stored before this program counts, or folds them
    arrived = atomic_add(arrivals_ref, (row.row, row.kv_head), jnp.int32(1))

    @pl.when(arrived == jnp.minimum(row.parts, row.lanes) - 1)
    def _():
        for head in range(row.shape.group):
            _store_out(row, head, _fold_stored(row, head, part_refs).quotient_hx, out_ref)
        arrivals_ref[row.row, row.kv_head] = jnp.int32(0)


def _fold_stored(row: Row, head: int, part_refs) -> Part:
    """A head's parts: some are read at once, then folded one by one."""
    at_once, last = row.shape.config.combine_splits, row.parts - 1
    heads_h, _ = row.heads(head, 1)

    def step(i, folded):
        ats = [i * at_once + j for j in range(at_once)]
        # Past the end the last one again: loads under a mask would wait for each other.
        places = [_places(row, part_refs, jnp.minimum(at, last), heads_h) for at in ats]
        parts = [Part(*map(load, place)) for place in places]
        for at, part in zip(ats, parts):
            folded = where((at <= last)[None], fold(folded, part), folded)
        return folded

    steps = lax.div(last + at_once, jnp.int32(at_once))
    return lax.fori_loop(0, steps, step, Part.nothing(1, row.shape.width))


def _finish_empty(row: Row, out_ref):
    @pl.when((row.parts == 0) & (row.lane == 0))
    def _():
        for head in range(row.shape.group):
            _store_out(row, head, jnp.zeros((1, row.shape.width), jnp.float32), out_ref)


def _store_out(row: Row, block: int, out_hx, out_ref):
    heads_h, real_h = row.heads(block, out_hx.shape[0])
    at_x = jnp.arange(row.shape.width)[None]
    place = out_ref.at[row.row, heads_h[:, None], at_x]
    mask = real_h[:, None] & (at_x < row.shape.head_dim)
    store(place, out_hx.astype(out_ref.dtype), mask=mask)
