"""Where the rows of a batch lie, against a loop in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_jax.kernels.paged_kv import PagedKV, RowBatch, TileBatch

PAGE, WIDTH, TILES, ROWS = 4, 6, 5, 40
TOKENS = PAGE * WIDTH


@jax.jit
def where(batch, kv):
    places = batch.places(kv)
    if isinstance(batch, RowBatch):
        return places
    return places, batch.first_rows_n, batch.tiles_t, batch.row_positions, batch.row_depths


def pool(planes: int) -> PagedKV:
    return PagedKV(jnp.zeros((1, 40 * planes, 2, 1, PAGE, 2)), planes)


def test_the_pool_knows_its_sizes():
    kv = pool(4)
    assert (kv.num_pages, kv.kv_heads, kv.page_size) == (160, 1, PAGE)
    pages = [int(kv.physical_page(7, depth)) for depth in (1, 2, 4, 5)]
    assert pages == [28, 29, 31, 31]
    assert int(pool(1).physical_page(7, 3)) == 7


TILE = st.tuples(st.integers(0, TOKENS - 8), st.integers(1, 8), st.integers(1, 4))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(tiles=st.lists(TILE, max_size=TILES), planes=st.sampled_from([1, 4]))
def test_packed_rows(tiles, planes):
    tables = np.random.default_rng(0).permutation(40)[: TILES * WIDTH].reshape(TILES, WIDTH)
    empty = [(0, 0, 0)] * (TILES - len(tiles))
    starts, counts, depths = (np.array(x, np.int32) for x in zip(*(tiles + empty)))
    batch = TileBatch(tables.astype(np.int32), starts, counts, depths, ROWS, 8)
    found = jax.tree.map(np.asarray, where(batch, pool(planes)))
    places, first_rows, of, positions, row_depths = found
    row = 0
    for n, (start, count, depth) in enumerate(tiles):
        assert first_rows[n] == row
        for position in range(start, start + count):
            page = tables[n, position // PAGE] * planes + min(depth, planes) - 1
            assert (of[row], positions[row], row_depths[row]) == (n, position, depth)
            assert places.valid_t[row]
            assert (places.pages_t[row], places.offsets_t[row]) == (page, position % PAGE)
            row += 1
    assert (of[row:] == TILES).all() and not places.valid_t[row:].any()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, TOKENS - 1), st.integers(1, 4), st.booleans()),
        min_size=TILES,
        max_size=TILES,
    ),
    planes=st.sampled_from([1, 4]),
)
def test_decode_rows(rows, planes):
    tables = np.random.default_rng(1).permutation(40)[: TILES * WIDTH].reshape(TILES, WIDTH)
    positions, depths, valid = (np.array(x) for x in zip(*rows))
    batch = RowBatch(
        tables.astype(np.int32), positions.astype(np.int32), depths.astype(np.int32), valid
    )
    places = jax.tree.map(np.asarray, where(batch, pool(planes)))
    logical = tables[np.arange(TILES), positions // PAGE]
    assert np.array_equal(places.pages_t, logical * planes + np.minimum(depths, planes) - 1)
    assert np.array_equal(places.offsets_t, positions % PAGE)
    assert np.array_equal(places.valid_t, valid)
