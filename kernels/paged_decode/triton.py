"""Paged decode attention as Pallas-Triton kernels (flash decoding).

A row's context is cut into splits at absolute positions whose length depends on nothing but the
row's own length. Each split gives an unnormalised sum, its peak and its total weight; a second
kernel adds a row's splits in ascending order. Which program handles which split, and how many
programs there are, never shows in the result: a row's bits are the same in any company.

Inside a split every warp keeps a softmax of its own over the few token slots it reads ([slot]
peaks and totals, [slot, x] sums): warps wait for each other at the end of the split only.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rlt_jax.kernels.compat import WHOLE, dot, load, store, triton_call
from rlt_jax.kernels.kv_update.triton import load_rotated
from rlt_jax.kernels.paged_kv import PagedKV, RowBatch

_MASKED = -1e30  # finite, so that slots without a token give exp(0) and not NaN
_LOG2_E = math.log2(math.e)
_VECTOR_BYTES = 16  # of one load of one thread
_DOT_ROWS = 16  # the fewest rows that the tensor cores take


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How the work is cut. Only `programs`, `min_lanes` and `heads_first` leave the bits alone.

    tokens: read at once by a program. split_tokens: of a split; doubled in rows that would have
    more than max_splits. prefetch: what is loaded an iteration ahead: "none", "pages" (the block
    table's entries) or "tiles" (K and V too). programs: wanted at least, by giving each row and
    head several lanes; min_lanes: of those at least. heads_first: neighbouring programs read
    the heads of a page, and not the same head of all rows. dot_group: query heads per K/V head
    from which on the tensor cores multiply. combine_*: of the second kernel; combine_splits are
    added at once.
    """

    tokens: int = 64
    split_tokens: int = 256
    max_splits: int = 64
    prefetch: str = "pages"
    num_warps: int = 4
    num_stages: int = 1
    programs: int = 132 * 8
    min_lanes: int = 4
    heads_first: bool = True
    dot_group: int = 4
    combine_splits: int = 8
    combine_warps: int = 2

    def lanes(self, rows: int, kv_heads: int, splits: int) -> int:
        wanted = pl.next_power_of_2(pl.cdiv(self.programs, rows * kv_heads))
        return min(max(wanted, self.min_lanes), splits)


DEFAULT = DecodeConfig()


def paged_decode(q_rhx, kv: PagedKV, layer, batch: RowBatch, interpret, config=DEFAULT):
    rows, heads, head_dim = q_rhx.shape
    shape = _Shape.of(kv, batch, heads, q_rhx.dtype, config)
    if rows == 0:
        return q_rhx
    parts = _call_splits(
        _decode_kernel,
        shape,
        rows,
        operands=(*_batch_operands(layer, batch), q_rhx, kv.pool),
        interpret=interpret,
        name="paged_decode",
    )
    return _combine(parts, batch, shape, interpret)


def write_and_decode(
    qkv_rcx, cos_ry, sin_ry, kv: PagedKV, layer, batch: RowBatch, interpret, config=DEFAULT
):
    rows, channels, head_dim = qkv_rcx.shape
    heads = channels - 2 * kv.kv_heads
    shape = _Shape.of(kv, batch, heads, qkv_rcx.dtype, config)
    if rows == 0:
        return jnp.zeros((0, heads, head_dim), qkv_rcx.dtype), kv
    *parts, pool = _call_splits(
        _write_and_decode_kernel,
        shape,
        rows,
        operands=(*_batch_operands(layer, batch), qkv_rcx, cos_ry, sin_ry, kv.pool),
        interpret=interpret,
        name="write_and_decode",
        pool_out=jax.ShapeDtypeStruct(kv.pool.shape, kv.pool.dtype),
    )
    return _combine(parts, batch, shape, interpret), kv.replace(pool=pool)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The static side of a call."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    planes: int
    table_pages: int
    q_dtype: jnp.dtype
    kv_dtype: jnp.dtype
    config: DecodeConfig

    @classmethod
    def of(cls, kv: PagedKV, batch: RowBatch, heads: int, q_dtype, config) -> "_Shape":
        page_size, head_dim = kv.pool.shape[4:]
        table_pages = batch.tables_rp.shape[1]
        return cls(
            heads,
            kv.kv_heads,
            head_dim,
            page_size,
            kv.planes,
            table_pages,
            jnp.dtype(q_dtype),
            kv.pool.dtype,
            config,
        )

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def uses_dot(self) -> bool:
        return self.group >= self.config.dot_group

    @property
    def width(self) -> int:
        """head_dim as the kernels see it."""
        return max(pl.next_power_of_2(self.head_dim), _DOT_ROWS if self.uses_dot else 1)

    @property
    def slots(self) -> int:
        """Tokens that the warps of a program read with one load instruction."""
        threads_a_token = max(1, self.width * self.kv_dtype.itemsize // _VECTOR_BYTES)
        slots = max(1, self.config.num_warps * 32 // threads_a_token)
        return min(slots, self.config.tokens)

    @property
    def max_splits(self) -> int:
        table_tokens = self.table_pages * self.page_size
        return min(pl.cdiv(table_tokens, self.config.split_tokens), self.config.max_splits)

    def split_tokens(self, length):
        """Tokens of a split of a row of this length (traced)."""
        tokens = jnp.int32(self.config.split_tokens)
        most = self.config.split_tokens * self.config.max_splits
        while most < self.table_pages * self.page_size:
            tokens = jnp.where(length > most, tokens * 2, tokens)
            most *= 2
        return tokens

    def divide_by_page(self, tokens):
        """(page of the block table, offset in it) of token positions, which are not negative."""
        size = self.page_size
        if size & (size - 1):
            return lax.div(tokens, jnp.int32(size)), lax.rem(tokens, jnp.int32(size))
        return tokens >> size.bit_length() - 1, tokens & size - 1


def _batch_operands(layer, batch: RowBatch):
    return (
        jnp.reshape(layer, (1,)),
        batch.tables_rp,
        batch.positions_r,
        batch.depths_r,
        batch.valid_r,
    )


def _call_splits(body, shape: _Shape, rows, operands, interpret, name, pool_out=None):
    """Runs `body` for each row, K/V head and lane. Returns (sums, peaks, totals[, pool])."""
    splits = shape.max_splits
    lanes = shape.config.lanes(rows, shape.kv_heads, splits)
    sizes = (shape.kv_heads, lanes, rows) if shape.config.heads_first else None
    outs = [
        jax.ShapeDtypeStruct((rows, splits, shape.heads, shape.width), jnp.float32),
        jax.ShapeDtypeStruct((rows, splits, shape.heads), jnp.float32),
        jax.ShapeDtypeStruct((rows, splits, shape.heads), jnp.float32),
    ]
    if pool_out is not None:
        outs.append(pool_out)
    return triton_call(
        functools.partial(body, shape=shape, lanes=lanes),
        grid=sizes or (rows, shape.kv_heads, lanes),
        out_shape=outs,
        in_specs=[WHOLE] * len(operands),
        out_specs=[WHOLE] * len(outs),
        num_warps=shape.config.num_warps,
        num_stages=shape.config.num_stages,
        interpret=interpret,
        name=name,
        input_output_aliases={} if pool_out is None else {len(operands) - 1: 3},
    )(*operands)


class _Row:
    """What a program knows of its row, K/V head and lane."""

    def __init__(self, shape: _Shape, layer_ref, tables_ref, positions_ref, depths_ref, valid_ref):
        if shape.config.heads_first:
            self.kv_head, self.lane, self.row = (pl.program_id(i) for i in range(3))
        else:
            self.row, self.kv_head, self.lane = (pl.program_id(i) for i in range(3))
        self.shape = shape
        self.layer = layer_ref[0]
        self.tables_ref = tables_ref
        self.position = positions_ref[self.row]
        self.length = jnp.where(valid_ref[self.row], self.position + 1, 0)
        self.depth = depths_ref[self.row]
        self.split_tokens = shape.split_tokens(self.length)
        self.splits = lax.div(self.length + self.split_tokens - 1, self.split_tokens)

    def places(self, tokens, end):
        """(physical page, offset in it) of each token before `end`."""
        entries, offsets = self.shape.divide_by_page(tokens)
        logical = load(self.tables_ref.at[self.row, entries], mask=tokens < end, other=0)
        return self.physical_page(logical), offsets

    def physical_page(self, logical):
        return PagedKV(None, self.shape.planes).physical_page(logical, self.depth)

    def for_each_split(self, lanes, attend):
        """Calls `attend(split)` for every split of this lane."""

        def step(i, nothing):
            attend(self.lane + i * lanes)
            return nothing

        steps = lax.div(jnp.maximum(self.splits - self.lane, 0) + lanes - 1, jnp.int32(lanes))
        lax.fori_loop(0, steps, step, jnp.int32(0))


def _decode_kernel(
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
    row = _Row(shape, layer_ref, tables_ref, positions_ref, depths_ref, valid_ref)

    @pl.when(row.lane < row.splits)
    def _():
        attention = _attention(
            row,
            pool_ref,
            lambda heads, at_x, mask: load(
                q_ref.at[row.row, heads, at_x], mask=mask, other=0
            ).astype(jnp.float32),
        )

        def attend(split):
            first = split * row.split_tokens
            end = jnp.minimum(first + row.split_tokens, row.length)
            state = attention.attend(first, end, attention.nothing())
            attention.store(state, split, part_refs)

        row.for_each_split(lanes, attend)


def _write_and_decode_kernel(
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
    row = _Row(shape, layer_ref, tables_ref, positions_ref, depths_ref, valid_ref)

    def rotated(heads, at_x, mask):
        return load_rotated(qkv_ref, cos_ref, sin_ref, row.row, heads, at_x, shape.head_dim, mask)

    @pl.when(row.lane < row.splits)
    def _():
        attention = _attention(row, pool_in_ref, rotated)
        at_x = jnp.arange(shape.width)
        in_head_x = at_x < shape.head_dim
        k_x = rotated(shape.heads + row.kv_head, at_x, in_head_x)
        v_head = shape.heads + shape.kv_heads + row.kv_head
        v_x = load(qkv_ref.at[row.row, v_head, at_x], mask=in_head_x, other=0)
        # Attention sees what the pool will hold.
        k_x, v_x = (a.astype(shape.q_dtype).astype(shape.kv_dtype) for a in (k_x, v_x))

        def attend(split):
            first = split * row.split_tokens
            end = jnp.minimum(first + row.split_tokens, row.position)
            own = attention.one_token(k_x, v_x, seen=split == row.splits - 1)
            attention.store(attention.attend(first, end, own), split, part_refs)

        row.for_each_split(lanes, attend)

        @pl.when(lax.rem(row.splits - 1, jnp.int32(lanes)) == row.lane)
        def _():
            entry, offset = shape.divide_by_page(row.position)
            page = row.physical_page(row.tables_ref[row.row, entry])
            for side, new_x in enumerate((k_x, v_x)):
                place = pool_ref.at[row.layer, page, side, row.kv_head, offset, at_x]
                store(place, new_x, mask=in_head_x)


def _attention(row: _Row, pool_ref, load_q):
    kind = _DotAttention if row.shape.uses_dot else _VectorAttention
    return kind(row, pool_ref, load_q)


class _VectorAttention:
    """Multiply and add in float32; each K/V tile [wrap, slot, x] serves the query heads in turn.

    The state is, for each query head of the group, ([slot] peaks, [slot] totals, [slot, x] sums).
    """

    def __init__(self, row: _Row, pool_ref, load_q):
        shape = row.shape
        self.row, self.shape, self.pool_ref = row, shape, pool_ref
        self.at_x = jnp.arange(shape.width)
        self.in_head_x = self.at_x < shape.head_dim
        self.wraps = max(1, shape.config.tokens // shape.slots)
        self.tokens = self.wraps * shape.slots
        self.first_head = row.kv_head * shape.group
        scale = shape.head_dim**-0.5 * _LOG2_E
        self.queries_gx = [
            load_q(self.first_head + i, self.at_x, self.in_head_x) * scale
            for i in range(shape.group)
        ]

    def nothing(self):
        slots, width = self.shape.slots, self.shape.width
        empty = (
            jnp.full((slots,), _MASKED, jnp.float32),
            jnp.zeros((slots,), jnp.float32),
            jnp.zeros((slots, width), jnp.float32),
        )
        return (empty,) * self.shape.group

    def one_token(self, k_x, v_x, seen):
        """The state after one token, in the first slot, if it is seen at all."""
        mine = (jnp.arange(self.shape.slots) == 0) & seen
        k_x, v_x = k_x.astype(jnp.float32), v_x.astype(jnp.float32)
        sums = jnp.where(mine[:, None], v_x[None], 0.0)
        total = jnp.where(mine, 1.0, 0.0)
        return tuple(
            (jnp.where(mine, jnp.sum(k_x * q_x), _MASKED), total, sums) for q_x in self.queries_gx
        )

    def attend(self, first, end, state):
        """Adds tokens first .. end - 1."""
        steps = lax.div(jnp.maximum(end - first, 0) + self.tokens - 1, jnp.int32(self.tokens))
        prefetch = self.shape.config.prefetch

        def places(i):
            return self.row.places(self._tokens(first, i), end)

        def tiles(i, found):
            return [self._tile(side, *found, self._tokens(first, i) < end) for side in (0, 1)]

        def without(i, state):
            return self._add(state, self._tokens(first, i) < end, *tiles(i, places(i)))

        def with_pages(i, carry):
            found, state = carry
            ahead = places(i + 1)
            return ahead, self._add(state, self._tokens(first, i) < end, *tiles(i, found))

        def with_tiles(i, carry):
            found, (k, v), state = carry
            further = places(i + 2)
            ahead = tiles(i + 1, found)
            return further, ahead, self._add(state, self._tokens(first, i) < end, k, v)

        if prefetch == "none":
            return lax.fori_loop(0, steps, without, state)
        if prefetch == "pages":
            return lax.fori_loop(0, steps, with_pages, (places(0), state))[-1]
        start = (places(1), tiles(0, places(0)), state)
        return lax.fori_loop(0, steps, with_tiles, start)[-1]

    def _tokens(self, first, i):
        wraps = jnp.arange(self.wraps)[:, None] * self.shape.slots
        return first + i * self.tokens + wraps + jnp.arange(self.shape.slots)[None]

    def _tile(self, side, pages, offsets, seen):
        place = self.pool_ref.at[
            self.row.layer,
            pages[:, :, None],
            side,
            self.row.kv_head,
            offsets[:, :, None],
            self.at_x[None, None],
        ]
        # Zeros where nothing was written: 0 * NaN must not reach the sum.
        return load(place, mask=seen[:, :, None] & self.in_head_x[None, None], other=0)

    def _add(self, state, seen, k_wsx, v_wsx):
        k_wsx, v_wsx = k_wsx.astype(jnp.float32), v_wsx.astype(jnp.float32)
        added = []
        for q_x, (peak, total, sums) in zip(self.queries_gx, state):
            scores = jnp.where(seen, jnp.sum(k_wsx * q_x[None, None], axis=2), _MASKED)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=0))
            decay = jnp.exp2(peak - new_peak)
            weights = jnp.exp2(scores - new_peak[None])
            total = total * decay + jnp.sum(weights, axis=0)
            sums = sums * decay[:, None] + jnp.sum(weights[:, :, None] * v_wsx, axis=0)
            added.append((new_peak, total, sums))
        return tuple(added)

    def store(self, state, split, part_refs):
        sums_ref, peaks_ref, totals_ref = part_refs
        for i, (peaks, totals, sums) in enumerate(state):
            peak = jnp.max(peaks)
            weights = jnp.exp2(peaks - peak)
            index = (self.row.row, split, self.first_head + i)
            sums_ref[(*index, slice(None))] = jnp.sum(sums * weights[:, None], axis=0)
            peaks_ref[index] = peak
            totals_ref[index] = jnp.sum(totals * weights)


class _DotAttention:
    """Query heads of a group as rows of a matrix: the tensor cores multiply.

    The state is ([g] peaks, [g] totals, [g, x] sums), g padded.
    """

    def __init__(self, row: _Row, pool_ref, load_q):
        shape = row.shape
        self.row, self.shape, self.pool_ref = row, shape, pool_ref
        self.at_x = jnp.arange(shape.width)[None]
        self.in_head_x = self.at_x < shape.head_dim
        self.tokens = max(shape.config.tokens, _DOT_ROWS)
        self.rows = max(pl.next_power_of_2(shape.group), _DOT_ROWS)
        at_g = jnp.arange(self.rows)[:, None]
        self.in_q = (at_g < shape.group) & self.in_head_x
        self.heads_g = row.kv_head * shape.group + at_g
        q_gx = load_q(self.heads_g, self.at_x, self.in_q)
        self.q_gx = q_gx.astype(shape.q_dtype).astype(shape.kv_dtype)
        self.scale = shape.head_dim**-0.5 * _LOG2_E

    def nothing(self):
        return (
            jnp.full((self.rows,), _MASKED, jnp.float32),
            jnp.zeros((self.rows,), jnp.float32),
            jnp.zeros((self.rows, self.shape.width), jnp.float32),
        )

    def one_token(self, k_x, v_x, seen):
        k_x, v_x = k_x.astype(jnp.float32), v_x.astype(jnp.float32)
        scores = jnp.sum(self.q_gx.astype(jnp.float32) * k_x[None], axis=1) * self.scale
        peaks = jnp.where(seen, scores, _MASKED)
        totals = jnp.where(seen, jnp.ones_like(scores), 0.0)
        return peaks, totals, jnp.where(seen, v_x[None], 0.0) + jnp.zeros((self.rows, 1))

    def attend(self, first, end, state):
        steps = lax.div(jnp.maximum(end - first, 0) + self.tokens - 1, jnp.int32(self.tokens))

        def step(i, carry):
            found, state = carry
            ahead = places(i + 1)
            seen = tokens(i) < end
            return ahead, self._add(state, seen, *(self._tile(s, *found, seen) for s in (0, 1)))

        def tokens(i):
            return first + i * self.tokens + jnp.arange(self.tokens)

        def places(i):
            return self.row.places(tokens(i), end)

        return lax.fori_loop(0, steps, step, (places(0), state))[-1]

    def _tile(self, side, pages, offsets, seen):
        place = self.pool_ref.at[
            self.row.layer,
            pages[:, None],
            side,
            self.row.kv_head,
            offsets[:, None],
            self.at_x,
        ]
        return load(place, mask=seen[:, None] & self.in_head_x, other=0)

    def _add(self, state, seen, k_tx, v_tx):
        peaks, totals, sums = state
        multiply = functools.partial(dot, precision=lax.Precision.HIGHEST)
        scores = multiply(self.q_gx, k_tx, trans_b=True) * self.scale
        scores = jnp.where(seen[None], scores, _MASKED)
        new_peaks = jnp.maximum(peaks, jnp.max(scores, axis=1))
        decay = jnp.exp2(peaks - new_peaks)
        weights = jnp.exp2(scores - new_peaks[:, None])
        totals = totals * decay + jnp.sum(weights, axis=1)
        mixed = multiply(weights.astype(v_tx.dtype), v_tx)
        return new_peaks, totals, sums * decay[:, None] + mixed

    def store(self, state, split, part_refs):
        peaks, totals, sums = state
        sums_ref, peaks_ref, totals_ref = part_refs
        row, heads_g = self.row.row, self.heads_g
        in_group = jnp.arange(self.rows) < self.shape.group
        store(sums_ref.at[row, split, heads_g, self.at_x], sums, mask=in_group[:, None])
        heads_g = self.row.kv_head * self.shape.group + jnp.arange(self.rows)
        store(peaks_ref.at[row, split, heads_g], peaks, mask=in_group)
        store(totals_ref.at[row, split, heads_g], totals, mask=in_group)


def _combine(parts, batch: RowBatch, shape: _Shape, interpret):
    rows = batch.positions_r.shape[0]
    return triton_call(
        functools.partial(_combine_kernel, shape=shape),
        grid=(shape.heads, rows),
        out_shape=jax.ShapeDtypeStruct((rows, shape.heads, shape.head_dim), shape.q_dtype),
        in_specs=[WHOLE] * 5,
        out_specs=WHOLE,
        num_warps=shape.config.combine_warps,
        num_stages=1,
        interpret=interpret,
        name="combine_splits",
    )(batch.positions_r, batch.valid_r, *parts)


def _combine_kernel(positions_ref, valid_ref, sums_ref, peaks_ref, totals_ref, out_ref, *, shape):
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
        real = at_s < splits
        peaks = load(peaks_ref.at[row, at_s, head], mask=real, other=_MASKED)
        totals = load(totals_ref.at[row, at_s, head], mask=real, other=0)
        sums = load(sums_ref.at[row, at_s[:, None], head, at_x[None]], mask=real[:, None], other=0)
        new_peak = jnp.maximum(peak, jnp.max(peaks))
        decay, weights = jnp.exp2(peak - new_peak), jnp.exp2(peaks - new_peak)
        total = total * decay + jnp.sum(totals * weights)
        return new_peak, total, sum_x * decay + jnp.sum(sums * weights[:, None], axis=0)

    start = (jnp.float32(_MASKED), jnp.float32(0), jnp.zeros((shape.width,), jnp.float32))
    steps = lax.div(splits + at_once - 1, jnp.int32(at_once))
    _, total, sum_x = lax.fori_loop(0, steps, step, start)
    out_x = sum_x / jnp.where(total == 0, 1.0, total)
    store(out_ref.at[row, head, at_x], out_x.astype(out_ref.dtype), mask=at_x < shape.head_dim)
