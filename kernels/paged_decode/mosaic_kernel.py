"""The two warpgroups of a pair in the Mosaic decode kernel: one fetches, the other attends."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rlt_jax.kernels.paged_decode import mosaic_lanes

MASKED = -1e30  # finite, so that places without a token give exp(0) and not NaN
QUERY_ROWS = 64  # of the tensor core's product
COPIED_ROWS = 8  # at a time, by TMA into the layout that wgmma reads
_WGMMA = plgpu.Layout.WGMMA
# Of a thread that fetches and of one that attends, for each number of pairs.
_REGISTERS = {1: None, 2: (40, 216), 3: (24, 136)}


def decode_body(shape, planes: int, *refs, **scratch):
    warpgroup = lax.axis_index("warpgroup")
    pairs = shape.config.pairs
    registers = _REGISTERS[pairs]

    @pl.when(warpgroup < pairs)
    def _():
        if registers:
            plgpu.set_max_registers(registers[1], action="increase")
        Attending(shape, planes, warpgroup, refs, scratch).run()

    @pl.when(warpgroup >= pairs)
    def _():
        if registers:
            plgpu.set_max_registers(registers[0], action="decrease")
        Fetching(shape, planes, warpgroup - pairs, refs, scratch).run()


class _Warpgroup:
    """What both sides of a pair know: which items are theirs, and the pair's memory."""

    def __init__(self, shape, planes: int, pair, refs, scratch):
        self.shape, self.planes, self.pair, self.scratch = shape, planes, pair, scratch
        (
            self.layer,
            self.entries,
            self.count,
            self.tables,
            self.queries,
            self.pool,
            self.finished,
            self.sums,
            self.peaks,
            self.totals,
            *self.out,
        ) = refs

    def run(self):
        lane = self.pair * self.shape.blocks + lax.axis_index("block")
        items = self.count[0] * self.shape.groups
        lanes = jnp.int32(self.shape.lanes)
        mine = lax.div(items - lane + lanes - 1, lanes)
        start = jnp.int32(0)
        tiles = lax.fori_loop(0, mine, lambda i, n: self.item(i, lane + i * lanes, n), start)
        self.end(mine, tiles)

    def entry(self, item, *fields):
        index = lax.div(item, jnp.int32(self.shape.groups))
        return [self.entries[index, field] for field in fields]

    def group(self, item):
        return lax.rem(item, jnp.int32(self.shape.groups))

    def slot(self, tiles):
        slots = self.shape.slots
        return self.pair * slots + lax.rem(tiles, jnp.int32(slots))

    def one(self, name, index=None):
        """This pair's part of the scratch, or a slot of it."""
        return self.scratch[name].at[self.pair if index is None else index]


class Fetching(_Warpgroup):
    def item(self, i, item, tiles):
        shape = self.shape
        row, first_page, tokens, plane = self.entry(item, 0, 2, 3, 5)
        group = self.group(item)
        pages = lax.div(tokens + shape.page_size - 1, jnp.int32(shape.page_size))

        @pl.when(i > 0)
        def _():
            plgpu.barrier_wait(self.one("q_free"))

        first_query = (row * shape.groups + group) * shape.queries
        first_copied = lax.div(first_query, jnp.int32(COPIED_ROWS)) * COPIED_ROWS
        plgpu.copy_gmem_to_smem(
            self.queries.at[pl.ds(first_copied, shape.copied_queries)],
            self.one("q_smem").at[pl.ds(0, shape.copied_queries)],
            self.one("q_filled"),
        )
        last_page = first_page + jnp.maximum(pages, 1) - 1

        def tile(t, state):
            tiles, logical = state
            # Read a tile ahead: it comes from global memory.
            next_logical = self.tables[row, jnp.minimum(first_page + t + 1, last_page)]
            physical = self.layer[0] * shape.pages + logical * self.planes + plane
            for side, name in enumerate("kv"):
                self.copy_tile(name, (physical * 2 + side) * shape.groups + group, tiles)
            return tiles + 1, next_logical

        return lax.fori_loop(0, pages, tile, (tiles, self.tables[row, first_page]))[0]

    def copy_tile(self, name, tile, tiles):
        slot, rows = self.slot(tiles), self.shape.config.tile_rows

        @pl.when(tiles >= self.shape.slots)
        def _():
            plgpu.barrier_wait(self.one(f"{name}_free", slot))

        plgpu.copy_gmem_to_smem(
            self.pool.at[pl.ds(tile * rows, rows)],
            self.one(f"{name}_smem", slot),
            self.one(f"{name}_filled", slot),
        )

    def end(self, items, tiles):
        """Waits until all is read: memory goes back with its barriers at rest."""

        @pl.when(items > 0)
        def _():
            plgpu.barrier_wait(self.one("q_free"))

        def wait(t, _):
            for name in "kv":
                plgpu.barrier_wait(self.one(f"{name}_free", self.slot(t)))

        lax.fori_loop(jnp.maximum(tiles - self.shape.slots, 0), tiles, wait, None)


class Attending(_Warpgroup):
    def end(self, items, tiles):
        pass

    def item(self, i, item, tiles):
        shape = self.shape
        row, split, tokens, splits = self.entry(item, 0, 1, 3, 4)
        group = self.group(item)
        plgpu.barrier_wait(self.one("q_filled"))
        q_qx = plgpu.load(self.one("q_smem"), layout=_WGMMA)
        plgpu.commit_smem()  # the next copy must not come before this read
        plgpu.barrier_arrive(self.one("q_free"))
        first_query = (row * shape.groups + group) * shape.queries
        first = lax.rem(first_query, jnp.int32(COPIED_ROWS))
        page = jnp.int32(shape.page_size)
        whole, rest = lax.div(tokens, page), lax.rem(tokens, page)
        state = (tiles, *self.nothing())
        state = lax.fori_loop(0, whole, lambda _, s: self.tile(q_qx, first, s), state)
        ragged = (rest > 0).astype(jnp.int32)
        state = lax.fori_loop(0, ragged, lambda _, s: self.tile(q_qx, first, s, rest), state)
        tiles, peak_q, total_q, sum_qx = state
        part = (row, split, group)
        if shape.portable:
            self.sums[part], self.peaks[part], self.totals[part] = sum_qx, peak_q, total_q
            return tiles
        refs = [ref.at[part] for ref in (self.sums, self.peaks, self.totals)]
        mosaic_lanes.store_rows(*refs, sum_qx, peak_q, total_q, first, shape.queries)
        finished = self.finished.at[pl.ds(row * shape.groups + group, 1)]
        is_last = mosaic_lanes.count_finished(
            finished, self.scratch["last_smem"], self.pair, splits
        )

        @pl.when(is_last)
        def _():
            self.combine(row, group, splits)

        return tiles

    def nothing(self):
        per_query = _WGMMA.reduce(1)
        return (
            plgpu.layout_cast(jnp.full((QUERY_ROWS,), MASKED, jnp.float32), per_query),
            plgpu.layout_cast(jnp.zeros((QUERY_ROWS,), jnp.float32), per_query),
            plgpu.layout_cast(jnp.zeros((QUERY_ROWS, self.shape.head_dim), jnp.float32), _WGMMA),
        )

    def tile(self, q_qx, first, state, rest=None):
        """Adds a page. first: row of the first query; rest: tokens there are, if not all."""
        tiles, peak_q, total_q, sum_qx = state
        slot = self.slot(tiles)
        plgpu.barrier_wait(self.one("k_filled", slot))
        scores_qt = self.scores(q_qx, self.one("k_smem", slot))
        plgpu.barrier_arrive(self.one("k_free", slot))
        scores_qt = jnp.where(self.own_head(first, rest), scores_qt * self.shape.scale, MASKED)
        new_peak_q = jnp.maximum(peak_q, scores_qt.max(axis=1))
        decay_q = jnp.exp2(peak_q - new_peak_q)
        weights_qt = jnp.exp2(scores_qt - lax.broadcast_in_dim(new_peak_q, scores_qt.shape, [0]))
        total_q = total_q * decay_q + weights_qt.sum(axis=1)
        sum_qx *= lax.broadcast_in_dim(decay_q, sum_qx.shape, [0])
        weights_qt = weights_qt.astype(jnp.bfloat16)
        plgpu.barrier_wait(self.one("v_filled", slot))
        if rest is not None:
            self.clear_unwritten(slot, rest)

        sum_qx = self.add_values(sum_qx, weights_qt, self.one("v_smem", slot))
        plgpu.barrier_arrive(self.one("v_free", slot))
        return tiles + 1, new_peak_q, total_q, sum_qx

    def read(self, smem):
        value = smem[...]
        plgpu.commit_smem()
        return value

    def scores(self, q_qx, k_smem):
        if self.shape.portable:
            return jnp.dot(q_qx, self.read(k_smem).T, preferred_element_type=jnp.float32)

        def multiply(scores_ref):
            plgpu.wgmma(scores_ref, q_qx, k_smem.transpose((1, 0)))
            return scores_ref[...]

        size = (QUERY_ROWS, self.shape.config.tile_rows)
        return pl.run_scoped(multiply, plgpu.ACC(size, jnp.float32))

    def add_values(self, sum_qx, weights_qt, v_smem):
        if self.shape.portable:
            v_tx = self.read(v_smem)
            return sum_qx + jnp.dot(weights_qt, v_tx, preferred_element_type=jnp.float32)
        multiply = pl.run_state(lambda sum_ref: plgpu.wgmma(sum_ref, weights_qt, v_smem))
        return multiply(plgpu.ACC.init(sum_qx))

    def own_head(self, first, rest):
        """Which products are of a query with a token of its own K/V head."""
        shape = self.shape
        size = (QUERY_ROWS, shape.config.tile_rows)
        query_qt = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=_WGMMA)
        token_qt = plgpu.broadcasted_iota(jnp.int32, size, 1, layout=_WGMMA)
        per_head = shape.heads // shape.kv_heads
        # Powers of two. Rows around the group's queries hold others, or anything.
        head_qt = (query_qt - first) >> (per_head.bit_length() - 1)
        own_qt = head_qt == token_qt >> (shape.page_size.bit_length() - 1)
        if rest is not None:
            own_qt &= (token_qt & (shape.page_size - 1)) < rest
        return own_qt

    def clear_unwritten(self, slot, rest):
        """Zeros in V where no token is: 0 * NaN must not reach the sum."""
        v_smem = self.one("v_smem", slot)
        size = (self.shape.config.tile_rows, self.shape.head_dim)
        token_tx = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=_WGMMA)
        written_tx = (token_tx & (self.shape.page_size - 1)) < rest
        v_tx = plgpu.load(v_smem, layout=_WGMMA)
        v_smem[...] = jnp.where(written_tx, v_tx, jnp.zeros_like(v_tx))
        plgpu.commit_smem()

    def combine(self, row, group, splits):
        """Adds the splits of a row and group in ascending order."""
        queries = self.shape.queries
        if queries % 4 == 0:
            layout = mosaic_lanes.rows_layout(self.shape.head_dim)
            self.combine_queries((row, group), (), splits, (queries,), layout, layout.reduce(1))
            return
        layout = mosaic_lanes.row_layout(self.shape.head_dim)
        for query in range(queries):  # each with its peak and total as scalars
            self.combine_queries((row, group), (query,), splits, (), layout, None)

    def combine_queries(self, place, query, splits, size_q, layout, per_query):
        at_once = self.shape.config.combine_splits
        size_qx = (*size_q, self.shape.head_dim)
        row, group = place

        def load(ref, split, layout):
            ref = ref.at[(row, split, group, *query)]
            return plgpu.load(ref, layout=layout, optimized=False)

        def spread(a_q, size):
            return lax.broadcast_in_dim(a_q, size, range(a_q.ndim))

        def add(i, state):
            splits_at = [i * at_once + j for j in range(at_once)]
            # What lies behind the last split may never have been written: not even read.
            found = [jnp.minimum(split, splits - 1) for split in splits_at]
            sums = [load(self.sums, split, layout) for split in found]
            peaks = [load(self.peaks, split, per_query) for split in found]
            totals = [load(self.totals, split, per_query) for split in found]
            for split, sum_qx, peak_q, total_q in zip(splits_at, sums, peaks, totals):
                state = merge(state, split < splits, sum_qx, peak_q, total_q)
            return state

        def merge(state, seen, sum_qx, peak_q, total_q):
            old_peak_q, old_total_q, old_sum_qx = state
            seen_q = spread(seen, size_q)
            peak_q = jnp.where(seen_q, peak_q, MASKED)
            new_peak_q = jnp.maximum(old_peak_q, peak_q)
            decay_q = jnp.exp2(old_peak_q - new_peak_q)
            weight_q = jnp.where(seen_q, jnp.exp2(peak_q - new_peak_q), 0.0)
            total_q = old_total_q * decay_q + total_q * weight_q
            sum_qx = old_sum_qx * spread(decay_q, size_qx) + sum_qx * spread(weight_q, size_qx)
            return new_peak_q, total_q, sum_qx

        def full(size, value, layout):
            array = jnp.full(size, value, jnp.float32)
            return array if layout is None else plgpu.layout_cast(array, layout)

        start = (
            full(size_q, MASKED, per_query),
            full(size_q, 0, per_query),
            full(size_qx, 0, layout),
        )
        steps = lax.div(splits + at_once - 1, jnp.int32(at_once))
        _, total_q, sum_qx = lax.fori_loop(0, steps, add, start)
        total_q = jnp.where(total_q == 0, 1.0, total_q)
        [out] = self.out
        out[(row, group, *query)] = (sum_qx / spread(total_q, size_qx)).astype(out.dtype)
