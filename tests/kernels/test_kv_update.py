"""K/V writes and finalization: exactly the addressed entries change, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_jax.kernels.kv_update import finalize_kv
from rlt_jax.kernels.paged_decode import write_and_decode
from rlt_jax.kernels.paged_kv import PagedKV, RowBatch, TileBatch
from rlt_jax.kernels.paged_prefill import paged_prefill
from tests.kernels.support import (
    IMPLEMENTATIONS,
    LAYERS,
    Shape,
    angles,
    bits,
    block_tables,
    decode,
    dense_attention,
    error,
    finalize,
    nan_pool,
    no_rotation,
    one_row,
    places_of,
    plane_index,
    random_pool,
    write,
)

TOKENS = 40


def small(**fields) -> Shape:
    return Shape(requests=4, tokens=TOKENS + 1, **fields)


SHAPES = [
    small(page_size=1),
    small(page_size=4, kv_heads=1),
    small(planes=1),
    small(page_size=4, kv_heads=1, planes=1, head_dim=24),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_kind = pytest.mark.parametrize("name", IMPLEMENTATIONS)
each_dtype = pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
# Interpreted kernels take longer: both dtypes in one shape, one in the others.
CASES = [
    (name, shape, dtype)
    for name in IMPLEMENTATIONS
    for i, shape in enumerate(SHAPES)
    for dtype in (np.float32, jnp.bfloat16)
    if name == "reference" or (i == 1) or (i == 3 and dtype == jnp.bfloat16)
]
each_case = pytest.mark.parametrize(
    "name, shape, dtype", CASES, ids=lambda x: str(getattr(x, "__name__", x))
)


@each_case
def test_a_write_touches_exactly_the_addressed_entries(name, shape, dtype):
    """By decode rows and by packed prompt rows alike; q comes back as it was: no rotation."""
    heads, kv_heads = shape.heads, shape.kv_heads
    for seed in range(4):
        rng = np.random.default_rng(seed)
        pool, tables = random_pool(shape, rng, dtype), block_tables(shape, rng)
        batch, rows, where = (decode_rows if seed % 2 else packed_rows)(tables, rng, seed != 0)
        qkv = rng.standard_normal((rows, heads + 2 * kv_heads, shape.head_dim)).astype(dtype)
        layer = seed % LAYERS
        expected = pool.copy()
        for row, (n, position, depth) in where.items():
            page, offset = divmod(position, shape.page_size)
            page = plane_index(shape, tables[n, page], depth)
            expected[layer, page, 0, :, offset] = qkv[row, heads : heads + kv_heads]
            expected[layer, page, 1, :, offset] = qkv[row, heads + kv_heads :]
        kv = PagedKV(jnp.asarray(pool), shape.planes)
        turn = no_rotation(rows, shape.head_dim, dtype)
        q, out = write(
            qkv, *turn, kv, jnp.int32(layer), places_of(batch, kv), kernels=IMPLEMENTATIONS[name]
        )
        assert out.planes == shape.planes
        assert np.array_equal(bits(out.pool), bits(expected))
        assert np.array_equal(bits(q), bits(qkv[:, :heads]))
        assert seed == 0 or not np.array_equal(bits(pool), bits(expected))


def decode_rows(tables, rng, any_valid):
    """A batch, how many rows it has, and {row: (request, position, depth)} of the valid ones."""
    positions, depths = rng.integers(0, TOKENS, 4), rng.integers(1, 5, 4)
    valid = (rng.random(4) < 0.7) & any_valid
    batch = RowBatch(
        tables,
        np.where(valid, positions, rng.choice([0, 3, 10**6], 4)).astype(np.int32),
        depths.astype(np.int32),
        valid,
    )
    return batch, 4, {n: (n, positions[n], depths[n]) for n in np.flatnonzero(valid)}


def packed_rows(tables, rng, any_valid):
    rows, tile = 48, 16
    counts = np.sort(rng.integers(1, tile + 1, 4))[::-1] * np.array([1, 1, 0, 0]) * any_valid
    starts, depths = rng.integers(0, TOKENS - tile, 4), rng.integers(1, 5, 4)
    as_ints = (x.astype(np.int32) for x in (starts, counts, depths))
    where, row = {}, 0
    for n in range(4):
        for i in range(counts[n]):
            where[row] = (n, starts[n] + i, depths[n])
            row += 1
    return TileBatch(tables, *as_ints, num_rows=rows, tile_rows=tile), rows, where


@each_kind
@each_dtype
def test_q_and_k_are_rotated_and_v_is_not(name, dtype):
    shape, rng = small(head_dim=24, heads=4), np.random.default_rng(3)
    tables = block_tables(shape, rng)
    batch = RowBatch(tables, *np.array([[1, 9, 22, 39], [1, 2, 3, 4]], np.int32), np.ones(4, bool))
    qkv = rng.standard_normal((4, 8, 24)).astype(dtype)
    turn = angles(4, 24, dtype, rng)
    kv = PagedKV(jnp.asarray(nan_pool(shape).astype(dtype)), 4)
    places = places_of(batch, kv)
    q, kv = write(qkv, *turn, kv, jnp.int32(1), places, kernels=IMPLEMENTATIONS[name])

    cos, sin = (x.astype(np.float64)[:, None] for x in turn)
    first, second = np.split(qkv[:, :6].astype(np.float64), 2, axis=-1)
    exact = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    written = np.asarray(kv.pool)[1, places.pages_t, :, :, places.offsets_t]  # [r, 2, k, x]
    tolerance = 1e-6 if dtype == np.float32 else 1e-2
    assert q.dtype == dtype
    assert error(q, exact[:, :4]) <= tolerance
    assert error(written[:, 0], exact[:, 4:]) <= tolerance
    assert np.array_equal(bits(written[:, 1]), bits(qkv[:, 6:]))


@each_case
def test_finalize_copies_the_exit_depth_into_deeper_planes_only(name, shape, dtype):
    """Bit-equal copies at every layer; rows at full depth, invalid rows and SHARED copy nothing."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        pool, tables = random_pool(shape, rng, dtype), block_tables(shape, rng)
        positions = rng.integers(0, TOKENS, 4).astype(np.int32)
        exits = rng.permutation([1, 2, 3, 4]).astype(np.int32)
        valid = rng.random(4) < (0.7 if seed else 0)
        positions[~valid], exits[~valid] = rng.choice([0, 10**6]), rng.choice([0, 1])

        expected = pool.copy()
        for n in np.flatnonzero(valid):
            page, offset = divmod(positions[n], shape.page_size)
            source = plane_index(shape, tables[n, page], exits[n])
            for depth in range(exits[n] + 1, shape.planes + 1):
                target = plane_index(shape, tables[n, page], depth)
                expected[:, target, :, :, offset] = pool[:, source, :, :, offset]
        kv = PagedKV(jnp.asarray(pool), shape.planes)
        out = finalize(kv, tables, positions, exits, valid, kernels=IMPLEMENTATIONS[name])
        assert np.array_equal(bits(out.pool), bits(expected))
        copies = shape.planes > 1 and (valid & (exits < 4)).any()
        assert copies == (not np.array_equal(bits(pool), bits(expected)))


@each_kind
@settings(max_examples=5, deadline=None, derandomize=True)
@given(exits=st.lists(st.integers(1, 4), min_size=12, max_size=12))
def test_a_query_at_depth_d_sees_version_min_of_d_and_the_exit_depth(name, exits):
    """Tokens written loop by loop and finalized, then read back at every depth."""
    kernels, shape = IMPLEMENTATIONS[name], small(page_size=4)
    rng = np.random.default_rng(0)
    table = block_tables(shape, rng)[:1]
    kv, layer = PagedKV(jnp.asarray(nan_pool(shape)), 4), jnp.int32(1)
    qkv = rng.standard_normal((12, 4, 1, 6, shape.head_dim), np.float32)
    turn = no_rotation(1, shape.head_dim, np.float32)
    for t, exit_depth in enumerate(exits):
        for depth in range(1, exit_depth + 1):
            places = places_of(one_row(table, t, depth), kv)
            _, kv = write(qkv[t, depth - 1], *turn, kv, layer, places, kernels=kernels)
        ends = np.array([t], np.int32), np.array([exit_depth], np.int32), np.array([True])
        kv = finalize(kv, table, *ends, kernels=kernels)
    q = rng.standard_normal((1, shape.heads, shape.head_dim), np.float32)
    for depth in range(1, 5):
        out = decode(q, kv, layer, one_row(table, 11, depth), kernels=kernels)
        seen = np.stack([qkv[t, min(depth, e) - 1, 0] for t, e in enumerate(exits)])
        assert error(out[0], dense_attention(q[0], seen[:, 2:4], seen[:, 4:])) <= 1e-5


@each_dtype
def test_temporaries_do_not_depend_on_the_pool(dtype):
    """Donated, the pool is written in place; nothing is done to all of it. (On a CPU the pool is
    float32 for rows of either dtype: see DTypePolicy.on.)"""
    planes = 4

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def temporaries(pages):
        kv = PagedKV(array(2, pages * planes, 2, 2, 16, 8, dtype=jnp.float32), planes)
        qkv, turn = array(4, 6, 8, dtype=dtype), [array(4, 4, dtype=dtype)] * 2
        valid = array(4, dtype=bool)
        rows = RowBatch(array(4, 5), array(4), array(4), valid)
        tiles = TileBatch(array(4, 5), array(4), array(4), array(4), 4, 16)
        q, layer = array(4, 2, 8, dtype=dtype), array()

        def in_place(f, argument):
            return jax.jit(f, donate_argnums=argument)

        lowered = {
            "decode": in_place(write_and_decode, 3).lower(qkv, *turn, kv, layer, rows),
            "prefill": jax.jit(paged_prefill).lower(q, kv, layer, tiles),
            "finalize": in_place(finalize_kv, 0).lower(kv, array(4, 5), array(4), array(4), valid),
        }
        analyses = {name: x.compile().memory_analysis() for name, x in lowered.items()}
        return {name: x.temp_size_in_bytes for name, x in analyses.items()}

    assert temporaries(20) == temporaries(80)
