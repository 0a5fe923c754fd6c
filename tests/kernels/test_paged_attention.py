"""Paged attention, K/V writes and finalization against a dense float64 NumPy attention.

Every pool starts as NaN in each entry that the rows under test do not own: other layers, other
planes, unowned pages, positions past the context. Whatever reads one of them shows it.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_jax.kernels.paged_attention import (
    PagedKV,
    TileBatch,
    finalize_kv,
    paged_attention,
    write_kv,
)
from rlt_jax.kernels.paged_attention.reference import CHUNK_TOKENS

LAYERS = 2
# Around the ends of the chunks that the context is walked in.
LENGTHS = [1, *(CHUNK_TOKENS * i + d for i in (1, 2) for d in (-1, 0, 1)), 3 * CHUNK_TOKENS + 1]

attend = jax.jit(paged_attention)
write = jax.jit(write_kv)
finalize = jax.jit(finalize_kv)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What decides the compiled program (planes 4: LAST_EXITED; 1: SHARED)."""

    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 8
    page_size: int = 16
    rows: int = 1
    planes: int = 4
    tiles: int = len(LENGTHS)
    pages_a_tile: int = 0  # the width of a block table; 0: enough for the longest context

    def __str__(self):
        return (
            f"{self.heads}over{self.kv_heads}x{self.head_dim}_page{self.page_size}"
            f"_rows{self.rows}_planes{self.planes}"
        )

    @property
    def width(self) -> int:
        return self.pages_a_tile or -(-max(LENGTHS) // self.page_size)

    @property
    def pool_shape(self) -> tuple[int, ...]:
        spare = 3  # pages that nobody owns
        pages = (self.tiles * self.width + spare) * self.planes
        return (LAYERS, pages, 2, self.kv_heads, self.page_size, self.head_dim)


SHAPES = [
    Shape(),
    Shape(heads=4),
    Shape(heads=4, kv_heads=1, head_dim=16, page_size=4),
    Shape(heads=6, kv_heads=2, rows=16),
    Shape(rows=16, head_dim=16, page_size=4),
    Shape(rows=16, planes=1, heads=4, kv_heads=2),
    Shape(planes=1, page_size=4, head_dim=16),
    Shape(page_size=1),
    Shape(page_size=1, rows=16, planes=1, heads=4),
    Shape(page_size=48, heads=4),  # no divisor of the chunk
]


@dataclasses.dataclass
class Rows:
    """A batch whose tile n is the last `counts[n]` positions of a context of `lengths[n]`."""

    shape: Shape
    q: np.ndarray
    pool: np.ndarray
    batch: TileBatch
    pages: np.ndarray  # of each tile: all that it owns, [width]
    lengths: np.ndarray
    counts: np.ndarray
    keys: list[np.ndarray]  # of each tile: [length, kv_heads, head_dim]
    values: list[np.ndarray]

    def run(self, layer: int = 1) -> np.ndarray:
        kv = PagedKV(jnp.asarray(self.pool), self.shape.planes)
        return np.asarray(attend(self.q, kv, jnp.int32(layer), self.batch))

    def expected(self) -> np.ndarray:
        out = np.zeros(self.q.shape)
        for n, length in enumerate(self.lengths):
            first = length - self.counts[n]
            for row in range(self.counts[n]):
                seen = first + row + 1
                keys, values = self.keys[n][:seen], self.values[n][:seen]
                out[n, row] = dense_attention(self.q[n, row], keys, values)
        return out


def dense_attention(q_hx: np.ndarray, keys_tkx: np.ndarray, values_tkx: np.ndarray) -> np.ndarray:
    """One query over its whole history, in float64."""
    group = q_hx.shape[0] // keys_tkx.shape[1]
    out = []
    for head, q in enumerate(q_hx.astype(np.float64)):
        keys = keys_tkx[:, head // group].astype(np.float64)
        scores = keys @ q / math.sqrt(q.size)
        weights = np.exp(scores - scores.max())
        out.append(weights / weights.sum() @ values_tkx[:, head // group].astype(np.float64))
    return np.array(out)


def dense_scores(rows: Rows, tile: int) -> np.ndarray:
    """Magnitudes of a tile's scores, by query head and position."""
    keys = np.repeat(rows.keys[tile], rows.shape.heads // rows.shape.kv_heads, axis=1)
    scores = np.einsum("qhx,thx->qht", rows.q[tile].astype(np.float64), keys)
    return np.abs(scores) / math.sqrt(rows.shape.head_dim)


def block_tables(shape: Shape, rng) -> np.ndarray:
    """Every tile's own pages, scattered over the pool; the last page of the pool is nobody's."""
    pages = shape.pool_shape[1] // shape.planes - 1
    return rng.permutation(pages)[: shape.tiles * shape.width].reshape(shape.tiles, shape.width)


def nan_pool(shape: Shape) -> np.ndarray:
    return np.full(shape.pool_shape, np.nan, np.float32)


def plane_index(shape: Shape, page: int, depth: int) -> int:
    """Where the layout puts a logical page at a depth (from 1)."""
    return page * shape.planes + min(depth, shape.planes) - 1


def make_rows(shape: Shape, lengths, seed: int = 0, depths=None, counts=None, layer: int = 1):
    """Random contexts of these lengths; a tile's K/V lie at its own depth in `layer` only."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths)
    depths = rng.integers(1, 5, shape.tiles) if depths is None else np.asarray(depths)
    if counts is None:
        counts = np.minimum(rng.integers(1, shape.rows + 1, shape.tiles), lengths)
    tables, pool, keys, values = block_tables(shape, rng), nan_pool(shape), [], []
    pages = tables.copy()
    for n, length in enumerate(lengths):
        kv = rng.standard_normal((2, length, shape.kv_heads, shape.head_dim)).astype(np.float32)
        keys.append(kv[0] * 2)
        values.append(kv[1])
        for t in range(length):
            page = plane_index(shape, tables[n, t // shape.page_size], depths[n])
            pool[layer, page, 0, :, t % shape.page_size] = keys[n][t]
            pool[layer, page, 1, :, t % shape.page_size] = values[n][t]
        tables[n, -(-length // shape.page_size) :] = pool.shape[1] // shape.planes - 1
    rows = np.arange(shape.rows)
    batch = TileBatch(
        tables_np=tables.astype(np.int32),
        positions_nq=((lengths - counts)[:, None] + rows).astype(np.int32),
        valid_nq=rows < np.asarray(counts)[:, None],
        depths_n=depths.astype(np.int32),
    )
    q = rng.standard_normal((shape.tiles, shape.rows, shape.heads, shape.head_dim))
    return Rows(shape, q.astype(np.float32), pool, batch, pages, lengths, counts, keys, values)


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def error(a, b) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


# --- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_equals_a_dense_one(shape):
    """Mixed depths, scattered pages, contexts around the chunks' ends, NaN all around."""
    rows = make_rows(shape, LENGTHS)
    out = rows.run()
    assert out.shape == rows.q.shape and out.dtype == np.float32
    assert error(out, rows.expected()) <= 1e-5
    assert not out[~np.asarray(rows.batch.valid_nq)].any()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_attention_reads_the_layer_it_is_told(layer):
    rows = make_rows(SHAPES[0], LENGTHS, seed=layer, layer=layer)
    assert error(rows.run(layer), rows.expected()) <= 1e-5
    assert np.isnan(rows.run(1 - layer)).any()


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0, 1e4])
def test_scores_of_any_size_give_a_softmax(scale):
    """From an even average to one key taking all; exp never overflows."""
    rows = make_rows(SHAPES[1], LENGTHS, seed=3)
    rows.q = (rows.q * scale).astype(np.float32)
    # An f32 score of s is off by some ulps of s, and a weight by a factor of their exponential.
    largest = max(dense_scores(rows, n).max() for n in range(rows.shape.tiles))
    assert error(rows.run(), rows.expected()) <= max(1e-5, 2 * largest * 2.0**-23)


@pytest.mark.parametrize("planes", [1, 4])
def test_attention_in_bfloat16_rounds_only_what_it_returns(planes):
    """bf16 K, V and q are exact in f32: with f32 sums only the result is rounded."""
    rows = make_rows(Shape(planes=planes, heads=4), LENGTHS, seed=5)
    for tile in range(rows.shape.tiles):
        rows.keys[tile] = rows.keys[tile].astype(jnp.bfloat16)
        rows.values[tile] = rows.values[tile].astype(jnp.bfloat16)
    rows.q = rows.q.astype(jnp.bfloat16)
    rows.pool = rows.pool.astype(jnp.bfloat16)
    out = rows.run()
    assert out.dtype == jnp.bfloat16
    exact = rows.expected()
    assert (np.abs(out.astype(np.float64) - exact) <= 2.0**-8 * np.abs(exact) + 2e-6).all()


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[6]], ids=str)
@pytest.mark.parametrize("position, depth", [(0, 0), (77, 3), (2**30, 9)])
def test_inactive_rows_give_zeros_and_read_nothing(shape, position, depth):
    rows = make_rows(shape, LENGTHS)
    batch = dataclasses.replace(
        rows.batch,
        positions_nq=np.full_like(rows.batch.positions_nq, position),
        valid_nq=np.zeros_like(rows.batch.valid_nq),
        depths_n=np.full_like(rows.batch.depths_n, depth),
    )
    rows.batch, rows.pool = batch, nan_pool(shape)
    assert not bits(rows.run()).any()


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[6]], ids=str)
def test_inactive_tiles_beside_active_ones_give_zeros_and_change_nothing(shape):
    rows = make_rows(shape, LENGTHS)
    whole = rows.run()
    off = np.arange(shape.tiles) % 2 == 0
    for n in np.flatnonzero(off):  # their pages become poison
        for page in rows.pages[n]:
            rows.pool[:, page * shape.planes : (page + 1) * shape.planes] = np.nan
    valid = rows.batch.valid_nq & ~off[:, None]
    rows.batch = dataclasses.replace(rows.batch, valid_nq=valid)
    out = rows.run()
    assert not bits(out[off]).any()
    assert np.array_equal(bits(out[~off]), bits(whole[~off]))


NEIGHBOURS = st.lists(
    st.tuples(st.integers(0, max(LENGTHS)), st.integers(1, 4)), min_size=7, max_size=7
)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[6]], ids=str)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(neighbours=NEIGHBOURS, length=st.sampled_from([5, 127, 128, 130, 260]))
def test_a_row_is_bitwise_the_same_in_any_company(shape, neighbours, length):
    """Longer, shorter or inactive neighbours; and whichever tile of the batch it is."""
    mine = make_rows(shape, [length] * shape.tiles, seed=1, depths=[2] * shape.tiles)
    alone = dataclasses.replace(mine.batch, valid_nq=mine.batch.valid_nq.copy())
    alone.valid_nq[1:] = False
    mine.batch = alone
    expected = bits(mine.run()[0])
    assert expected.any()

    for at in (0, 5):
        lengths, depths = (list(x) for x in zip(*neighbours))
        lengths.insert(at, length)
        depths.insert(at, 2)
        lengths = np.array(lengths)
        crowd = make_rows(shape, np.maximum(lengths, 1), seed=2, depths=depths)
        crowd.batch.valid_nq[lengths == 0] = False
        copy_tile(mine, 0, crowd, at)
        assert np.array_equal(bits(crowd.run()[at]), expected)


def copy_tile(source: Rows, i: int, target: Rows, j: int):
    """Puts tile i of one batch in place of tile j of another, context and all."""
    planes = source.shape.planes
    for here, there in zip(source.pages[i] * planes, target.pages[j] * planes):
        target.pool[:, there : there + planes] = source.pool[:, here : here + planes]
    target.q[j] = source.q[i]
    target.batch.tables_np[j] = target.pages[j]
    for name in ("positions_nq", "valid_nq", "depths_n"):
        getattr(target.batch, name)[j] = getattr(source.batch, name)[i]


# --- writes --------------------------------------------------------------------------------------


def random_pool(shape: Shape, rng, dtype=np.float32) -> np.ndarray:
    """Any finite values at all, and NaN (quiet ones: no arithmetic makes another)."""
    width = np.dtype(dtype).itemsize
    pool = rng.integers(0, 2 ** (8 * width), shape.pool_shape, f"u{width}").view(dtype)
    with np.errstate(invalid="ignore"):
        pool[np.isnan(pool)] = np.nan
    return pool


def small(**fields) -> Shape:
    return Shape(tiles=4, pages_a_tile=40 // fields.get("page_size", 16) + 1, **fields)


WRITE_SHAPES = [
    small(page_size=page, rows=rows, planes=planes, kv_heads=kv_heads)
    for page, rows, planes, kv_heads in [(1, 1, 4, 2), (4, 16, 4, 1), (16, 16, 1, 2), (4, 1, 1, 1)]
]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", WRITE_SHAPES, ids=str)
def test_write_touches_exactly_the_addressed_entries(shape, dtype):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        pool = random_pool(shape, rng, dtype)
        tables = block_tables(shape, rng).astype(np.int32)
        starts = rng.integers(0, 40 - shape.rows, shape.tiles)
        valid = rng.random((shape.tiles, shape.rows)) < (0.6 if seed else 0)
        positions = (starts[:, None] + np.arange(shape.rows)).astype(np.int32)
        positions[~valid] = rng.choice([0, 3, 10**6], (~valid).sum())
        depths = rng.integers(1, 5, shape.tiles).astype(np.int32)
        k, v = rng.standard_normal(
            (2, shape.tiles, shape.rows, shape.kv_heads, shape.head_dim)
        ).astype(dtype)
        layer = seed % LAYERS

        expected = pool.copy()
        for n, row in np.argwhere(valid):
            page, offset = divmod(positions[n, row], shape.page_size)
            page = plane_index(shape, tables[n, page], depths[n])
            expected[layer, page, 0, :, offset] = k[n, row]
            expected[layer, page, 1, :, offset] = v[n, row]
        batch = TileBatch(tables, positions, valid, depths)
        out = write(PagedKV(jnp.asarray(pool), shape.planes), jnp.int32(layer), k, v, batch)
        assert out.planes == shape.planes
        assert np.array_equal(bits(out.pool), bits(expected))
        assert seed == 0 or not np.array_equal(bits(pool), bits(expected))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", WRITE_SHAPES, ids=str)
def test_finalize_copies_the_exit_depth_into_deeper_planes_only(shape, dtype):
    """Bit-equal copies at every layer; rows at full depth, invalid rows and SHARED copy nothing."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        pool = random_pool(shape, rng, dtype)
        tables = block_tables(shape, rng).astype(np.int32)
        positions = rng.integers(0, 40, shape.tiles).astype(np.int32)
        exits = rng.permutation([1, 2, 3, 4]).astype(np.int32)
        valid = rng.random(shape.tiles) < (0.7 if seed else 0)
        positions[~valid], exits[~valid] = rng.choice([0, 10**6]), rng.choice([0, 1])

        expected = pool.copy()
        for n in np.flatnonzero(valid):
            page, offset = divmod(positions[n], shape.page_size)
            source = plane_index(shape, tables[n, page], exits[n])
            for depth in range(exits[n] + 1, shape.planes + 1):
                target = plane_index(shape, tables[n, page], depth)
                expected[:, target, :, :, offset] = pool[:, source, :, :, offset]
        kv = PagedKV(jnp.asarray(pool), shape.planes)
        out = finalize(kv, tables, positions, exits, valid)
        assert np.array_equal(bits(out.pool), bits(expected))
        copies = shape.planes > 1 and (valid & (exits < 4)).any()
        assert copies == (not np.array_equal(bits(pool), bits(expected)))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(exits=st.lists(st.integers(1, 4), min_size=20, max_size=20))
def test_a_query_at_depth_d_sees_version_min_of_d_and_the_exit_depth(exits):
    """Tokens written loop by loop and finalized, then read back at every depth."""
    shape = small(page_size=4, planes=4)
    rng = np.random.default_rng(0)
    table = block_tables(shape, rng)[:1].astype(np.int32)
    kv = PagedKV(jnp.asarray(nan_pool(shape)), 4)
    k, v = rng.standard_normal((2, 20, 4, 1, 1, shape.kv_heads, shape.head_dim), np.float32)
    for t, exit_depth in enumerate(exits):
        position = np.array([[t]], np.int32)
        for depth in range(1, exit_depth + 1):
            batch = one_row(table, t, depth)
            kv = write(kv, jnp.int32(1), k[t, depth - 1], v[t, depth - 1], batch)
        kv = finalize(kv, table, position[0], np.array([exit_depth], np.int32), np.array([True]))
    q = rng.standard_normal((1, 1, shape.heads, shape.head_dim), np.float32)
    for depth in range(1, 5):
        out = attend(q, kv, jnp.int32(1), one_row(table, 19, depth))
        versions = [min(depth, e) - 1 for e in exits]
        keys, values = (np.stack([x[t, i, 0, 0] for t, i in enumerate(versions)]) for x in (k, v))
        assert error(np.asarray(out)[0, 0], dense_attention(q[0, 0], keys, values)) <= 1e-5


def one_row(table: np.ndarray, position: int, depth: int) -> TileBatch:
    return TileBatch(
        tables_np=table,
        positions_nq=np.array([[position]], np.int32),
        valid_nq=np.array([[True]]),
        depths_n=np.array([depth], np.int32),
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_temporaries_do_not_depend_on_the_pool(dtype):
    """Donated, the pool is written in place; nothing is done to all of it. (On a CPU the pool is
    float32 for rows of either dtype: see DTypePolicy.on.)"""
    planes = 4

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def temporaries(pages):
        kv = PagedKV(array(2, pages * planes, 2, 2, 16, 8, dtype=jnp.float32), planes)
        rows = array(4, 1, 2, 8, dtype=dtype)
        valid = array(4, 1, dtype=bool)
        batch = TileBatch(array(4, 5), array(4, 1), valid, array(4))
        ends = array(4, 5), array(4), array(4), array(4, dtype=bool)
        lowered = {
            "write": jax.jit(write_kv, donate_argnums=0).lower(kv, array(), rows, rows, batch),
            "finalize": jax.jit(finalize_kv, donate_argnums=0).lower(kv, *ends),
            "attend": attend.lower(rows, kv, array(), batch),
        }
        analyses = {name: x.compile().memory_analysis() for name, x in lowered.items()}
        return {name: x.temp_size_in_bytes for name, x in analyses.items()}

    assert temporaries(20) == temporaries(80)


# --- by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "planes, expected",
    [
        (2, 20.0),  # LAST_EXITED: A as of loop 1: equal keys, (10 + 30) / 2
        (1, 22.6894),  # SHARED: A's last version: (e^2 * 20 + e * 30) / (e^2 + e)
    ],
)
def test_two_tokens_two_loops_by_hand(planes, expected):
    """A = (K 1, V 10) at loop 1 and (K 2, V 20) at loop 2; B = (Q 1, K 1, V 30) at its loop 1."""

    def scalar(x):
        return np.array([x, 0], np.float32).reshape(1, 1, 1, 2)

    kv = PagedKV(jnp.full((1, 2 * planes, 2, 1, 2, 2), jnp.nan), planes)
    table, layer = np.array([[1]], np.int32), jnp.int32(0)
    for position, depth, key, value in [(0, 1, 1, 10), (0, 2, 2, 20), (1, 1, 1, 30)]:
        batch = one_row(table, position, depth)
        kv = write(kv, layer, scalar(key), scalar(value), batch)
        if (position, depth) == (0, 2):  # A exits at full depth: nothing to copy
            ends = np.array([0], np.int32), np.array([2], np.int32), np.array([True])
            kv = finalize(kv, table, *ends)
    out = attend(scalar(2**0.5), kv, layer, one_row(table, 1, 1))
    assert np.asarray(out).ravel() == pytest.approx([expected, 0], abs=1e-4)
