"""Paged decode attention as one persistent Pallas Mosaic kernel for Hopper (flash decoding).

A row's context is cut into splits at absolute positions, whose length depends on the row's own
length alone. An item of work is one split of one row for a group of neighbouring K/V heads: in
the pool the heads of a page follow each other, so a page of the whole group is one TMA, and one
tile [heads of the group x tokens of a page, head_dim] of a matrix product. The tile's keys are
multiplied with the group's queries all at once; products of a query with another head's keys are
masked. The tensor core has 64 rows for the queries and most of them stay unused: a decode waits
for memory, and this way nothing is fetched in small pieces.

A block has `pairs` pairs of warpgroups, each with its own ring in shared memory: one fetches
queries and pages, the other attends. A pair takes items lane, lane + lanes, ... of the schedule.
Every item leaves an unnormalised sum, its peak and its total weight in global memory; whoever
finishes the last split of a row and group adds them all in ascending order. So neither the other
rows nor the number of blocks shows in the bits of a row.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rlt_jax.kernels.compat import MOSAIC_CANNOT
from rlt_jax.kernels.paged_decode.mosaic_kernel import (
    COPIED_ROWS,
    MASKED,
    QUERY_ROWS,
    decode_body,
)
from rlt_jax.kernels.paged_kv import PagedKV, RowBatch

_LOG2_E = math.log2(math.e)
_ENTRY = 8  # int32 per schedule entry
_SHARED_BYTES = 224 * 1024  # of a block, beside barriers
_MAX_BARRIERS = 32  # of one kind
_DEFAULT_BLOCKS = 132  # streaming multiprocessors of an H200


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """How the work is cut. tile_rows, split_tokens and max_splits show in the bits, the rest not.

    tile_rows: of a tile: heads of a group times tokens of a page. split_tokens: of a split;
    doubled in rows that would have more than max_splits. pairs: of warpgroups in a block. slots:
    tiles of K, and as many of V, in the ring of each; None: what shared memory holds. blocks:
    None: one for each multiprocessor. combine_splits: added at once.
    """

    tile_rows: int = 64
    split_tokens: int = 256
    max_splits: int = 64
    pairs: int = 2
    slots: int | None = None
    blocks: int | None = None
    combine_splits: int = 4


DEFAULT = MosaicConfig()


@struct.dataclass
class Schedule:
    """The items of a batch, the same for all layers.

    entries_en: int32 [rows * splits, 8]; the first count_1[0] are (row, split, first page, tokens,
    splits of the row, plane, -, -): whole splits first. finished_n: int32 zeros, one for each row
    and group of heads; the kernel counts in them and leaves zeros behind.
    """

    entries_en: jax.Array
    count_1: jax.Array
    finished_n: jax.Array


def unsupported_reason(
    head_dim: int, kv_heads: int, heads: int, page_size: int, dtype: str, config=DEFAULT
) -> str | None:
    """Why the kernel cannot do these shapes, or None."""
    if MOSAIC_CANNOT:
        return MOSAIC_CANNOT
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"rows of {jnp.dtype(dtype).name}, not of bfloat16"
    if head_dim not in (64, 128):
        return f"head_dim {head_dim}, not 64 or 128"
    if page_size not in (16, 32, 64):
        return f"pages of {page_size} tokens, not of 16, 32 or 64"
    if heads % kv_heads:
        return f"{heads} heads over {kv_heads} K/V heads"
    group_heads = config.tile_rows // page_size
    if kv_heads % group_heads:
        return f"{kv_heads} K/V heads, no multiple of {group_heads} at pages of {page_size} tokens"
    queries = group_heads * (heads // kv_heads)
    if queries > QUERY_ROWS or queries & (queries - 1):
        return f"{queries} queries at once, no power of two up to {QUERY_ROWS}"
    return None


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The static side of a call. `queries` are a group's; its K/V heads make up a tile."""

    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    layers: int
    pages: int
    max_splits: int
    blocks: int
    portable: bool  # no inline code, for the interpreter
    config: MosaicConfig

    @classmethod
    def of(cls, q_rhx, kv: PagedKV, batch: RowBatch, interpret, config) -> "_Shape":
        rows, heads, head_dim = q_rhx.shape
        reason = unsupported_reason(
            head_dim, kv.kv_heads, heads, kv.page_size, kv.pool.dtype.name, config
        )
        if reason is None and q_rhx.dtype != kv.pool.dtype:
            reason = f"queries of {q_rhx.dtype.name}, not of {kv.pool.dtype.name}"
        layers, pages, _, kv_heads, page_size, _ = kv.pool.shape
        if reason is None and layers * pages * 2 * kv_heads * page_size >= 2**31:
            reason = "a pool of 2**31 head vectors or more: TMA coordinates are int32"
        if reason:
            raise ValueError(f"The Mosaic decode kernel cannot do this: {reason}")
        return cls(
            rows=rows,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            layers=layers,
            pages=pages,
            max_splits=_max_splits(batch.tables_rp.shape[1] * page_size, config),
            blocks=config.blocks or (2 if interpret else _multiprocessors()),
            portable=bool(interpret),
            config=config,
        )

    @property
    def group_heads(self) -> int:
        return self.config.tile_rows // self.page_size

    @property
    def groups(self) -> int:
        return self.kv_heads // self.group_heads

    @property
    def queries(self) -> int:
        return self.heads // self.groups

    @property
    def copied_queries(self) -> int:
        """TMA copies eight rows at a time, from a multiple of eight."""
        return max(self.queries, COPIED_ROWS)

    @property
    def slots(self) -> int:
        config, row_bytes = self.config, 2 * self.head_dim
        queries_bytes = config.pairs * QUERY_ROWS * row_bytes
        slot_bytes = config.pairs * 2 * config.tile_rows * row_bytes
        fitting = (_SHARED_BYTES - queries_bytes) // slot_bytes
        return config.slots or min(fitting, _MAX_BARRIERS // config.pairs)

    @property
    def part_rows(self) -> int:
        return QUERY_ROWS if self.portable else self.queries

    @property
    def lanes(self) -> int:
        return self.blocks * self.config.pairs

    @property
    def scale(self) -> float:
        """Of the scores, whose exponentials are powers of two."""
        return self.head_dim**-0.5 * _LOG2_E


def _max_splits(table_tokens: int, config: MosaicConfig) -> int:
    return min(pl.cdiv(table_tokens, config.split_tokens), config.max_splits)


@functools.cache
def _multiprocessors() -> int:
    try:
        return jax.devices("gpu")[0].core_count or _DEFAULT_BLOCKS
    except (RuntimeError, AttributeError):
        return _DEFAULT_BLOCKS


def make_schedule(kv: PagedKV, batch: RowBatch, config: MosaicConfig = DEFAULT) -> Schedule:
    """What every layer's paged_decode of this batch can share."""
    table_tokens = batch.tables_rp.shape[1] * kv.page_size
    rows, max_splits = batch.positions_r.shape[0], _max_splits(table_tokens, config)
    lengths_r = jnp.where(batch.valid_r, batch.positions_r + 1, 0)
    tokens_r = jnp.full_like(lengths_r, config.split_tokens)
    most = config.split_tokens * config.max_splits
    while most < table_tokens:
        tokens_r = jnp.where(lengths_r > most, tokens_r * 2, tokens_r)
        most *= 2
    whole_r = lengths_r // tokens_r
    rest_r = lengths_r - whole_r * tokens_r
    # A row without a context is an item without tokens: it writes the zeros.
    partial_r = (rest_r > 0) | (lengths_r == 0)
    ends_2r = jnp.cumsum(jnp.concatenate([whole_r, partial_r.astype(jnp.int32)]))
    at_e = jnp.arange(rows * max_splits)
    found_e = jnp.sum(ends_2r <= at_e[:, None], axis=1, dtype=jnp.int32)
    found_e = jnp.minimum(found_e, 2 * rows - 1)
    row_e, is_partial_e = found_e % rows, found_e >= rows
    since_e = at_e - jnp.where(found_e > 0, ends_2r[found_e - 1], 0)
    split_e = jnp.where(is_partial_e, whole_r[row_e], since_e)
    fields = [
        row_e,
        split_e,
        split_e * tokens_r[row_e] // kv.page_size,
        jnp.where(is_partial_e, rest_r[row_e], tokens_r[row_e]),
        (whole_r + partial_r)[row_e],
        (jnp.minimum(batch.depths_r, kv.planes) - 1)[row_e],
    ]
    entries_en = jnp.stack([*fields, *[jnp.zeros_like(row_e)] * (_ENTRY - len(fields))], axis=1)
    groups = kv.kv_heads * kv.page_size // config.tile_rows
    finished_n = jnp.zeros((rows * groups,), jnp.int32)
    return Schedule(entries_en.astype(jnp.int32), ends_2r[-1:].astype(jnp.int32), finished_n)


def paged_decode(
    q_rhx,
    kv: PagedKV,
    layer,
    batch: RowBatch,
    interpret=False,
    schedule: Schedule | None = None,
    config: MosaicConfig = DEFAULT,
):
    """As paged_decode of this package. schedule: make_schedule of this batch and config."""
    if q_rhx.shape[0] == 0:
        return q_rhx
    shape = _Shape.of(q_rhx, kv, batch, interpret, config)
    if schedule is None:
        schedule = make_schedule(kv, batch, config)
    queries_qx = q_rhx.reshape(-1, shape.head_dim)
    if queries_qx.shape[0] % COPIED_ROWS:
        rest = -queries_qx.shape[0] % COPIED_ROWS
        queries_qx = jnp.pad(queries_qx, ((0, rest), (0, 0)))
    operands = (
        jnp.reshape(layer, (1,)).astype(jnp.int32),
        schedule.entries_en,
        schedule.count_1,
        batch.tables_rp,
        queries_qx,
        kv.pool.reshape(-1, shape.head_dim),
        schedule.finished_n,
    )
    parts = (shape.rows, shape.max_splits, shape.groups, shape.part_rows)
    out_types = [
        jax.ShapeDtypeStruct((*parts, shape.head_dim), jnp.float32),
        jax.ShapeDtypeStruct(parts, jnp.float32),
        jax.ShapeDtypeStruct(parts, jnp.float32),
    ]
    if not shape.portable:
        out = (shape.rows, shape.groups, shape.queries, shape.head_dim)
        out_types.append(jax.ShapeDtypeStruct(out, q_rhx.dtype))
    outs = plgpu.kernel(
        functools.partial(decode_body, shape, kv.planes),
        out_type=out_types,
        grid=(shape.blocks,),
        grid_names=("block",),
        num_threads=2 * config.pairs,
        thread_name="warpgroup",
        kernel_name="mosaic_paged_decode",
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret or None,
    )(*operands)
    if shape.portable:
        return _combine_in_jnp(shape, outs, schedule, q_rhx.dtype)
    return outs[3].reshape(q_rhx.shape)


def _scratch(shape: _Shape):
    config = shape.config
    # The layout that wgmma reads: tiles of 8 rows and 128 bytes, swizzled.
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def tiles(count, rows):
        return plgpu.SMEM((count, rows, shape.head_dim), jnp.bfloat16, transforms=transforms)

    slots = config.pairs * shape.slots

    def barriers(count):
        return plgpu.Barrier(num_barriers=count)

    return {
        "q_smem": tiles(config.pairs, QUERY_ROWS),
        "k_smem": tiles(slots, config.tile_rows),
        "v_smem": tiles(slots, config.tile_rows),
        "last_smem": plgpu.SMEM((config.pairs,), jnp.int32),
        "q_filled": barriers(config.pairs),
        "q_free": barriers(config.pairs),
        "k_filled": barriers(slots),
        "k_free": barriers(slots),
        "v_filled": barriers(slots),
        "v_free": barriers(slots),
    }


def _combine_in_jnp(shape: _Shape, parts, schedule: Schedule, dtype):
    """The last step, for the interpreter."""
    first_n = jnp.arange(shape.rows * shape.groups) * shape.queries % COPIED_ROWS
    query_rsgq = first_n.reshape(shape.rows, 1, shape.groups, 1) + jnp.arange(shape.queries)
    sums = jnp.take_along_axis(parts[0], query_rsgq[..., None], axis=3)
    peaks, totals = (jnp.take_along_axis(part, query_rsgq, axis=3) for part in parts[1:])
    entries_en = schedule.entries_en[: shape.rows * shape.max_splits]
    real_e = jnp.arange(entries_en.shape[0]) < schedule.count_1
    row_e = jnp.where(real_e, entries_en[:, 0], shape.rows)
    splits_r = jnp.zeros((shape.rows,), jnp.int32).at[row_e].set(entries_en[:, 4], mode="drop")
    seen = (jnp.arange(shape.max_splits) < splits_r[:, None])[:, :, None, None]
    peaks = jnp.where(seen, peaks, MASKED)
    weights = jnp.where(seen, jnp.exp2(peaks - peaks.max(axis=1, keepdims=True)), 0)
    total = jnp.sum(jnp.where(seen, totals, 0) * weights, axis=1)[..., None]
    sums = jnp.where(seen[..., None], sums, 0)
    out = jnp.sum(sums * weights[..., None], axis=1) / jnp.where(total == 0, 1, total)
    return out.reshape(shape.rows, shape.heads, shape.head_dim).astype(dtype)
