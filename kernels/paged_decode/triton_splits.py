"""Attention of one row and K/V head over one split of the context, inside a Triton program."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rlt_jax.kernels.compat import dot, load
from rlt_jax.kernels.paged_kv import PagedKV, RowBatch

MASKED = -1e30  # finite, so that places without a token give exp(0) and not NaN
_LOG2_E = math.log2(math.e)
_VECTOR_BYTES = 16  # of one load of one thread
_DOT_ROWS = 16  # the fewest rows that the tensor cores take
_RUN = 8  # consecutive tokens of a page that one thread copies


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How the work is cut. `programs` alone leaves the bits as they are; whatever else is chosen by
    shape must not be chosen by the number of rows.

    tokens: of a tile, read at once by a program. split_tokens: of a split, a multiple of it;
    doubled in rows that would have more than max_splits. num_stages: iterations that Triton keeps
    in flight by asynchronous copies (DotAttention only).
    programs: as many as are resident together; fewer rows and heads than that share the splits of
    each row among several lanes. dot_group: query heads per K/V head from which on the tensor cores
    multiply. combine_splits: parts read at once in the end.
    """

    tokens: int = 32
    split_tokens: int = 256
    max_splits: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 512
    dot_group: int = 1
    combine_splits: int = 8

    def __post_init__(self):
        if self.split_tokens % self.tokens:
            raise ValueError(
                f"split_tokens = {self.split_tokens}: must be a multiple of tokens = {self.tokens}"
            )

    def columns(self, rows: int, kv_heads: int) -> int:
        """Programs of each K/V head: as many as there are rows, or enough for two of each."""
        columns = self.programs // kv_heads
        return columns if columns >= 2 * rows else rows


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static side of a call."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    planes: int
    table_tokens: int
    q_dtype: jnp.dtype
    kv_dtype: jnp.dtype
    config: DecodeConfig

    @classmethod
    def of(cls, kv: PagedKV, batch: RowBatch, heads: int, q_dtype, config) -> "Shape":
        return cls(
            heads=heads,
            kv_heads=kv.kv_heads,
            head_dim=kv.pool.shape[5],
            page_size=kv.page_size,
            planes=kv.planes,
            table_tokens=batch.tables_rp.shape[1] * kv.page_size,
            q_dtype=jnp.dtype(q_dtype),
            kv_dtype=jnp.dtype(kv.pool.dtype),
            config=config,
        )

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def uses_dot(self) -> bool:
        # Tensor cores have no float32 product of full precision.
        return self.kv_dtype.itemsize == 2 and self.group >= self.config.dot_group

    @property
    def width(self) -> int:
        """head_dim as the kernels see it."""
        return max(pl.next_power_of_2(self.head_dim), _DOT_ROWS if self.uses_dot else 1)

    @property
    def block_heads(self) -> int:
        """Heads of a Part as a split gives it: all of a group in a matrix, or one."""
        return max(pl.next_power_of_2(self.group), _DOT_ROWS) if self.uses_dot else 1

    @property
    def scale(self) -> float:
        """Of the scores, whose exponentials are powers of two."""
        return self.head_dim**-0.5 * _LOG2_E

    @property
    def max_parts(self) -> int:
        splits = min(pl.cdiv(self.table_tokens, self.config.split_tokens), self.config.max_splits)
        return splits + 1

    def split_tokens(self, length):
        """Tokens of a split of a row of this length (traced)."""
        tokens = jnp.int32(self.config.split_tokens)
        most = self.config.split_tokens * self.config.max_splits
        while most < self.table_tokens:
            tokens = jnp.where(length > most, tokens * 2, tokens)
            most *= 2
        return tokens

    def divide_by_page(self, tokens):
        """(page of the block table, offset in it) of token positions, which are not negative."""
        size = self.page_size
        if size & (size - 1):
            return lax.div(tokens, jnp.int32(size)), lax.rem(tokens, jnp.int32(size))
        return tokens >> (size.bit_length() - 1), tokens & (size - 1)


class Part(NamedTuple):
    """What some heads h give over some tokens, float32: the peak [h] of their scores and, relative
    to it, the total weight [h] and the weighted sum of values [h, x]."""

    peak_h: jax.Array
    total_h: jax.Array
    sum_hx: jax.Array

    @classmethod
    def nothing(cls, heads: int, width: int) -> "Part":
        zeros_h, zeros_hx = (jnp.zeros(shape, jnp.float32) for shape in ((heads,), (heads, width)))
        return cls(zeros_h + MASKED, zeros_h, zeros_hx)

    @property
    def quotient_hx(self):
        return self.sum_hx / self.total_h[:, None]


def where(which_h, part: Part, other: Part) -> Part:
    return Part(
        jnp.where(which_h, part.peak_h, other.peak_h),
        jnp.where(which_h, part.total_h, other.total_h),
        jnp.where(which_h[:, None], part.sum_hx, other.sum_hx),
    )


def fold(old: Part, new: Part) -> Part:
    """Both together, in whatever layout: one product and one sum an element, which a compiler can
    contract in one way only."""
    is_old_h = old.peak_h >= new.peak_h
    high, low = where(is_old_h, old, new), where(is_old_h, new, old)
    weight_h = jnp.exp2(low.peak_h - high.peak_h)
    total_h = high.total_h + low.total_h * weight_h
    return Part(high.peak_h, total_h, high.sum_hx + low.sum_hx * weight_h[:, None])


class Row:
    """What a program knows of its row, K/V head and lane.

    splits: of the row's context, without its own token where that is apart. parts: results to be
    added up, one of a token apart and one of each split, in this order. Of the splits, the lane-th
    and every lanes-th after it are this program's; the token goes to the next lane after the last
    split's. A program without a row has no parts, and no row to answer for.
    """

    def __init__(self, shape: Shape, batch_refs, filled_ref, own_apart: bool):
        layer_ref, tables_ref, positions_ref, depths_ref, valid_ref = batch_refs
        self.kv_head = pl.program_id(0)
        self.shape = shape
        self.layer = layer_ref[0]
        self.tables_ref = tables_ref
        self._take_row(filled_ref, positions_ref.shape[0])
        self.position = positions_ref[self.row]
        self.depth = depths_ref[self.row]
        self.own_apart = own_apart
        length = self.position + 1
        self.split_tokens = shape.split_tokens(length)
        self.end = self.position if own_apart else length
        self.splits = lax.div(self.end + self.split_tokens - 1, self.split_tokens)
        is_valid = self.has_row & valid_ref[self.row]
        self.parts = jnp.where(is_valid, self.splits + own_apart, 0)

    def _take_row(self, filled_ref, rows: int) -> None:
        """Each of the first `filled` rows has as many columns of the grid as all of them can have
        while every other row keeps one."""
        column = pl.program_id(1)
        columns = self.shape.config.columns(rows, self.shape.kv_heads)
        if filled_ref is None:
            self.row, self.lane, self.lanes, self.has_row = column, jnp.int32(0), 1, True
            return
        filled = filled_ref[0]
        divisor = jnp.maximum(filled, 1)
        self.lanes = lax.div(columns - rows + filled, divisor)
        is_filled = column < filled * self.lanes
        row = jnp.where(is_filled, lax.rem(column, divisor), column - filled * (self.lanes - 1))
        self.has_row = row < rows
        self.row = jnp.minimum(row, rows - 1)
        self.lane = jnp.where(is_filled, lax.div(column, divisor), row - self.row)

    def heads(self, block: int, block_heads: int):
        """(numbers of a block's query heads [h], which of them the group has [h])."""
        in_group_h = block * block_heads + jnp.arange(block_heads)
        return self.kv_head * self.shape.group + in_group_h, in_group_h < self.shape.group

    def pages(self, entries):
        """Physical pages of entries of the row's block table; for those past its end, some page.
        Without a mask, which would wait for the row's position."""
        last = self.shape.table_tokens // self.shape.page_size - 1
        return self.physical_page(load(self.tables_ref.at[self.row, jnp.minimum(entries, last)]))

    def physical_page(self, logical):
        return PagedKV(None, self.shape.planes).physical_page(logical, self.depth)


def attend_lane(row: Row, attends, take, taken):
    """Attends over each split of this lane; `take` takes their parts, one by one.

    take(taken, place in the order of parts, a Part for each block of heads) -> taken. One loop over
    the tiles of all splits: copies go on where one split ends and the next begins.
    """
    tokens = jnp.int32(attends.tokens)
    split_tiles = lax.div(row.split_tokens, tokens)
    splits = lax.div(row.splits - row.lane + row.lanes - 1, jnp.int32(row.lanes))
    last_split = row.lane + (splits - 1) * row.lanes
    last_tokens = jnp.minimum(row.end - last_split * row.split_tokens, row.split_tokens)
    last_tiles = lax.div(last_tokens + tokens - 1, tokens)
    tiles = jnp.where(splits > 0, (splits - 1) * split_tiles + last_tiles, 0)

    def places(split, tile):
        return attends.places(split * row.split_tokens + tile * tokens)

    def step(i, carry):
        split, tile, found, state, taken = carry
        is_last = tile == split_tiles - 1
        following = jnp.where(is_last, split + row.lanes, split), jnp.where(is_last, 0, tile + 1)
        ahead = places(*following)
        nothing = attends.nothing()
        state = jax.tree.map(lambda old, new: jnp.where(tile == 0, new, old), state, nothing)
        seen = split * row.split_tokens + tile * tokens + attends.offsets < row.end
        state = attends.add(state, found, seen)
        taken = lax.cond(
            is_last | (i == tiles - 1),
            lambda: take(taken, split + row.own_apart, attends.parts(state)),
            lambda: taken,
        )
        return *following, ahead, state, taken

    first = row.lane, jnp.int32(0)
    start = (*first, places(*first), attends.nothing(), taken)
    return lax.fori_loop(0, tiles, step, start)[-1]


def attention(row: Row, pool_ref, load_q):
    """load_q(heads, at_x, mask): float32 elements of the row's queries, in a block of any shape."""
    kind = DotAttention if row.shape.uses_dot else VectorAttention
    return kind(row, pool_ref, load_q)


class VectorAttention:
    """Multiplies and adds in float32; a K/V tile [w, s, x] serves the query heads in turn.

    A thread holds the same of the s slots in each of the w wraps, so a slot has a softmax of its
    own and warps wait for each other at the end of a split only. The state is, for each query
    head of the group, (peaks [s, 1], totals [s, 1], sums [s, x]).
    """

    def __init__(self, row: Row, pool_ref, load_q):
        shape = row.shape
        self.row, self.shape, self.pool_ref = row, shape, pool_ref
        self.at_x = jnp.arange(shape.width)
        self.in_head_x = self.at_x < shape.head_dim
        threads_a_token = max(1, shape.width * shape.kv_dtype.itemsize // _VECTOR_BYTES)
        slots = max(1, shape.config.num_warps * 32 // threads_a_token)
        self.slots = min(slots, shape.config.tokens)
        wraps = shape.config.tokens // self.slots
        self.tokens = shape.config.tokens
        self.offsets = jnp.arange(wraps)[:, None] * self.slots + jnp.arange(self.slots)[None]
        first_head = row.kv_head * shape.group
        self.queries_gx = [
            load_q(first_head + i, self.at_x, self.in_head_x) * shape.scale
            for i in range(shape.group)
        ]

    def places(self, start):
        """(physical page, offset in it) of each token of a tile."""
        entries, in_page = self.shape.divide_by_page(start + self.offsets)
        return self.row.pages(entries), in_page

    def nothing(self):
        empty = (
            jnp.full((self.slots, 1), MASKED, jnp.float32),
            jnp.zeros((self.slots, 1), jnp.float32),
            jnp.zeros((self.slots, self.shape.width), jnp.float32),
        )
        return (empty,) * self.shape.group

    def one_token(self, k_x, v_x):
        """The parts of one token."""
        k_x, v_x = k_x.astype(jnp.float32), v_x.astype(jnp.float32)
        scores = (jnp.sum(k_x * q_x, keepdims=True) for q_x in self.queries_gx)
        return tuple(Part(score_h, jnp.ones_like(score_h), v_x[None]) for score_h in scores)

    def add(self, state, found, seen_ws):
        """The state after a tile, whose tokens lie at the places `found`."""
        k_wsx, v_wsx = (self._tile(side, *found, seen_ws).astype(jnp.float32) for side in (0, 1))
        added = []
        for q_x, (peak_s1, total_s1, sum_sx) in zip(self.queries_gx, state):
            scores_ws = jnp.where(seen_ws, jnp.sum(k_wsx * q_x[None, None], axis=2), MASKED)
            scores_ws1 = scores_ws[:, :, None]
            new_peak_s1 = jnp.maximum(peak_s1, jnp.max(scores_ws1, axis=0))
            decay_s1 = jnp.exp2(peak_s1 - new_peak_s1)
            weights_ws1 = jnp.exp2(scores_ws1 - new_peak_s1[None])
            total_s1 = total_s1 * decay_s1 + jnp.sum(weights_ws1, axis=0)
            sum_sx = sum_sx * decay_s1 + jnp.sum(weights_ws1 * v_wsx, axis=0)
            added.append((new_peak_s1, total_s1, sum_sx))
        return tuple(added)

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

    def parts(self, state):
        """A Part of each head."""
        parts = []
        for peak_s1, total_s1, sum_sx in state:
            peak_h = jnp.max(peak_s1, axis=0)
            weight_s1 = jnp.exp2(peak_s1 - peak_h[None])
            total_h = jnp.sum(total_s1 * weight_s1, axis=0)
            parts.append(Part(peak_h, total_h, jnp.sum(sum_sx * weight_s1, axis=0)[None]))
        return tuple(parts)


class DotAttention:
    """Tensor cores: the query heads of a group are the rows of a matrix, padded to 16.

    At one query head 15 rows of 16 are wasted, but a decode waits for memory, and Triton copies
    the tiles of a product asynchronously, an iteration ahead. The state is (peaks [g], totals
    [g, t], sums [g, x]): totals are added up in the end, since warps must meet for that.
    """

    def __init__(self, row: Row, pool_ref, load_q):
        shape = row.shape
        self.row, self.shape, self.pool_ref = row, shape, pool_ref
        self.at_x = jnp.arange(shape.width)[None]
        self.in_head_x = self.at_x < shape.head_dim
        self.tokens = max(shape.config.tokens, _DOT_ROWS)
        self.runs = self.tokens // _RUN
        self.in_runs = shape.page_size % _RUN == 0 == self.tokens % shape.page_size
        at_t = jnp.arange(self.tokens)
        self.offsets = at_t % self.runs * _RUN + at_t // self.runs if self.in_runs else at_t
        self.rows = shape.block_heads
        at_g = jnp.arange(self.rows)[:, None]
        real_g = at_g < shape.group
        if shape.group == 1:  # fifteen of sixteen rows need no load
            q_gx = jnp.where(real_g, load_q(row.kv_head, self.at_x, self.in_head_x), 0)
        else:
            q_gx = load_q(row.kv_head * shape.group + at_g, self.at_x, real_g & self.in_head_x)
        self.q_gx = q_gx.astype(shape.q_dtype).astype(shape.kv_dtype)

    def places(self, start):
        """(physical page, offset in it) of each token of a tile."""
        if not self.in_runs:
            entries, in_page = self.shape.divide_by_page(start + self.offsets)
            return self.row.pages(entries), in_page
        entries, _ = self.shape.divide_by_page(start + jnp.arange(self.runs) * _RUN)
        pages_r = self.row.pages(entries)
        pages_t = jnp.broadcast_to(pages_r[None], (_RUN, self.runs)).reshape(self.tokens)
        return pages_t, self.shape.divide_by_page(self.offsets)[1]

    def nothing(self):
        return (
            jnp.full((self.rows,), MASKED, jnp.float32),
            jnp.zeros((self.rows, self.tokens), jnp.float32),
            jnp.zeros((self.rows, self.shape.width), jnp.float32),
        )

    def one_token(self, k_x, v_x):
        """The part of one token."""
        k_x, v_x = k_x.astype(jnp.float32), v_x.astype(jnp.float32)
        peak_g = jnp.sum(self.q_gx.astype(jnp.float32) * k_x[None], axis=1) * self.shape.scale
        sum_gx = jnp.broadcast_to(v_x[None], (self.rows, self.shape.width))
        return (Part(peak_g, jnp.ones_like(peak_g), sum_gx),)

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

    def add(self, state, found, seen_t):
        """The state after a tile, whose tokens lie at the places `found`."""
        peak_g, total_gt, sum_gx = state
        k_tx, v_tx = (self._tile(side, *found, seen_t) for side in (0, 1))
        multiply = functools.partial(dot, precision=lax.Precision.HIGHEST)
        scores_gt = multiply(self.q_gx, k_tx, trans_b=True) * self.shape.scale
        scores_gt = jnp.where(seen_t[None], scores_gt, MASKED)
        new_peak_g = jnp.maximum(peak_g, jnp.max(scores_gt, axis=1))
        decay_g = jnp.exp2(peak_g - new_peak_g)
        weights_gt = jnp.exp2(scores_gt - new_peak_g[:, None])
        total_gt = total_gt * decay_g[:, None] + weights_gt
        mixed_gx = multiply(weights_gt.astype(v_tx.dtype), v_tx)
        return new_peak_g, total_gt, sum_gx * decay_g[:, None] + mixed_gx

    def parts(self, state):
        """One Part of all heads."""
        peak_g, total_gt, sum_gx = state
        return (Part(peak_g, jnp.sum(total_gt, axis=1), sum_gx),)
