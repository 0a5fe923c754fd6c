"""Paged decode attention, alone and fused with the write, against a dense one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_jax.kernels.paged_decode.triton import make_sharing, paged_decode, write_and_decode
from rlt_jax.kernels.paged_decode.triton_splits import DecodeConfig, Part, fold
from rlt_jax.kernels.paged_kv import PagedKV, RowBatch
from tests.kernels.support import (
    IMPLEMENTATIONS,
    LAYERS,
    LENGTHS,
    Requests,
    Shape,
    angles,
    bits,
    block_tables,
    decode,
    error,
    fused_decode,
    make_requests,
    nan_pool,
    no_rotation,
    one_row,
    places_of,
    plane_index,
    prepared,
    random_pool,
    relative,
    rows_of,
    write,
)

SHAPES = [
    Shape(),
    Shape(heads=4, page_size=4, planes=1, head_dim=16),
    Shape(heads=4, kv_heads=1, head_dim=16, page_size=4),
    Shape(heads=6, kv_heads=2),
    Shape(page_size=1),
    Shape(page_size=48, heads=4),  # no divisor of the chunk
]
TRITON_SHAPES = [
    SHAPES[0],
    SHAPES[1],
    Shape(heads=4, kv_heads=1, head_dim=24, page_size=64),  # a group for the tensor cores
]
CASES = [("reference", s) for s in SHAPES] + [("triton", s) for s in TRITON_SHAPES]
# The dearest checks: one shape with equal heads, one with groups.
FEW = [("reference", SHAPES[1]), ("reference", SHAPES[3]), ("triton", TRITON_SHAPES[0])]

each_case = pytest.mark.parametrize("name, shape", CASES, ids=str)
few_cases = pytest.mark.parametrize("name, shape", FEW, ids=str)
each_kind = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def queries(shape: Shape, seed: int = 7) -> np.ndarray:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((shape.requests, shape.heads, shape.head_dim))
    return q.astype(np.float32)


def run(name: str, q_rhx, requests: Requests, batch=None, layer: int = 1) -> np.ndarray:
    batch = rows_of(requests) if batch is None else batch
    out = decode(q_rhx, requests.kv, jnp.int32(layer), batch, kernels=IMPLEMENTATIONS[name])
    return np.asarray(out)


def expected(q_rhx, requests: Requests) -> np.ndarray:
    rows = enumerate(requests.lengths)
    return np.stack([requests.attention(n, length - 1, q_rhx[n]) for n, length in rows])


@each_case
def test_decode_equals_a_dense_attention(name, shape):
    """Mixed depths, scattered pages, contexts around the chunks' ends, NaN all around."""
    requests, q = make_requests(shape, LENGTHS), queries(shape)
    out = run(name, q, requests)
    assert out.shape == q.shape and out.dtype == np.float32
    assert error(out, expected(q, requests)) <= 1e-5


@each_kind
@pytest.mark.parametrize("layer", range(LAYERS))
def test_decode_reads_the_layer_it_is_told(name, layer):
    requests, q = make_requests(Shape(), LENGTHS, seed=layer, layer=layer), queries(Shape())
    assert error(run(name, q, requests, layer=layer), expected(q, requests)) <= 1e-5
    assert np.isnan(run(name, q, requests, layer=1 - layer)).any()


@each_kind
@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0, 1e4])
def test_scores_of_any_size_give_a_softmax(name, scale):
    """From an even average to one key taking all; exp never overflows."""
    requests = make_requests(Shape(), LENGTHS, seed=3)
    q = (queries(Shape()) * scale).astype(np.float32)
    # An f32 score of s is off by some ulps of s, and a weight by a factor of their exponential.
    largest = max(requests.largest_score(n, q[n]) for n in range(len(LENGTHS)))
    bound = max(1e-5, 2 * largest * 2.0**-23)
    assert error(run(name, q, requests), expected(q, requests)) <= bound


@each_kind
@pytest.mark.parametrize("shape", [Shape(planes=1, heads=4), TRITON_SHAPES[2]], ids=str)
def test_decode_in_bfloat16(name, shape):
    """The reference rounds only what it returns; tensor cores take rounded weights too."""
    requests, q = make_requests(shape, LENGTHS, seed=5), queries(shape).astype(jnp.bfloat16)
    requests.to_bfloat16()
    out, exact = run(name, q, requests), expected(q, requests)
    assert out.dtype == jnp.bfloat16
    assert relative(out, exact) <= (2e-3 if name == "reference" else 5e-3)
    if name == "reference":
        assert (np.abs(out.astype(np.float64) - exact) <= 2.0**-8 * np.abs(exact) + 2e-6).all()


@few_cases
@pytest.mark.parametrize("position, depth", [(0, 0), (77, 3), (2**30, 9)])
def test_inactive_rows_give_zeros_and_read_nothing(name, shape, position, depth):
    requests = make_requests(shape, LENGTHS)
    requests.pool = nan_pool(shape)
    batch = rows_of(requests, valid=np.zeros(len(LENGTHS), bool)).replace(
        positions_r=np.full(len(LENGTHS), position, np.int32),
        depths_r=np.full(len(LENGTHS), depth, np.int32),
    )
    assert not bits(run(name, queries(shape), requests, batch)).any()


@few_cases
def test_inactive_rows_beside_active_ones_give_zeros_and_change_nothing(name, shape):
    requests, q = make_requests(shape, LENGTHS), queries(shape)
    whole = run(name, q, requests)
    off = np.arange(len(LENGTHS)) % 2 == 0
    for n in np.flatnonzero(off):
        requests.poison(n)
    out = run(name, q, requests, rows_of(requests, valid=~off))
    assert not bits(out[off]).any()
    assert np.array_equal(bits(out[~off]), bits(whole[~off]))


NEIGHBOURS = st.lists(
    st.tuples(st.integers(0, max(LENGTHS)), st.integers(1, 4)),
    min_size=len(LENGTHS) - 1,
    max_size=len(LENGTHS) - 1,
)


@few_cases
@settings(max_examples=12, deadline=None, derandomize=True)
@given(neighbours=NEIGHBOURS, length=st.sampled_from([5, 127, 128, 130, 260]))
def test_a_row_is_bitwise_the_same_in_any_company(name, shape, neighbours, length):
    """Longer, shorter or inactive neighbours; and whichever row of the batch it is."""
    n = len(LENGTHS)
    mine, q = make_requests(shape, [length] * n, seed=1, depths=[2] * n), queries(shape)
    alone = bits(run(name, q, mine, rows_of(mine, valid=np.arange(n) == 0))[0])
    assert alone.any()
    for at in (0, 5):
        lengths, depths = (list(x) for x in zip(*neighbours))
        lengths.insert(at, length)
        depths.insert(at, 2)
        crowd = make_requests(shape, np.maximum(lengths, 1), seed=2, depths=depths)
        crowd.take(at, mine, 0)
        crowd_q = queries(shape, seed=8)
        crowd_q[at] = q[0]
        out = run(name, crowd_q, crowd, rows_of(crowd, valid=np.array(lengths) > 0))
        assert np.array_equal(bits(out[at]), alone)


# Of each K/V head: one program for each row, which folds parts in registers; two, out of memory;
# as many as the rows up to the last valid one leave.
COLUMNS = [len(LENGTHS), 2 * len(LENGTHS), 2 * len(LENGTHS) + 3, 5 * len(LENGTHS)]


def outs_of(columns_of_each, requests: Requests, writes: bool, is_valid=None, **config):
    """The bits of every row, for each number of columns."""
    shape, dtype, n = requests.shape, requests.pool.dtype, len(LENGTHS)
    rng, batch, layer = np.random.default_rng(3), rows_of(requests, is_valid), jnp.int32(1)
    channels = shape.heads + 2 * shape.kv_heads
    qkv = rng.standard_normal((n, channels, shape.head_dim)).astype(dtype)
    turn = angles(n, shape.head_dim, dtype, rng)
    outs = []
    for columns in columns_of_each:
        of_call = DecodeConfig(programs=columns * shape.kv_heads, **config)
        sharing = make_sharing(requests.kv, batch, of_call)
        assert (sharing is None) == (columns == n)
        if writes:
            run_it = jax.jit(functools.partial(write_and_decode, interpret=True, config=of_call))
            out, kv = run_it(qkv, *turn, requests.kv.replace(scratch=sharing), layer, batch)
            assert sharing is None or not np.any(kv.scratch.arrivals_rk)
        else:
            run_it = jax.jit(functools.partial(paged_decode, interpret=True, config=of_call))
            out = run_it(qkv[:, : shape.heads], requests.kv, layer, batch)
        outs.append(bits(out))
    return outs


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("valid", ["all", "every other", "the first", "the last"])
def test_how_many_programs_share_a_row_does_not_show(writes, valid):
    chosen = {"all": slice(None), "every other": slice(0, None, 2), "the first": 0, "the last": -1}
    is_valid = np.zeros(len(LENGTHS), bool)
    is_valid[chosen[valid]] = True
    requests = make_requests(Shape(), LENGTHS, seed=3)
    outs = outs_of(COLUMNS, requests, writes, is_valid, split_tokens=64)
    assert outs[0][is_valid].any() and not outs[0][~is_valid].any()
    assert all(np.array_equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize(
    "shape, dtype, max_splits",
    [
        (Shape(heads=4), np.float32, 64),
        (Shape(), jnp.bfloat16, 64),
        (TRITON_SHAPES[2], jnp.bfloat16, 5),
    ],
    ids=lambda x: str(getattr(x, "__name__", x)),
)
def test_parts_folded_in_registers_have_the_bits_of_stored_ones(shape, dtype, max_splits, writes):
    """Up to 13 splits, more than are read at once; doubled; none before a row's first token."""
    requests = make_requests(shape, LENGTHS, seed=4)
    requests.pool = requests.pool.astype(dtype)
    config = {"split_tokens": 32, "max_splits": max_splits, "combine_splits": 4}
    folded, stored = outs_of(COLUMNS[:2], requests, writes, **config)
    assert folded.any(axis=(1, 2)).all()
    assert np.array_equal(folded, stored)


@pytest.mark.parametrize("columns, stored", [(COLUMNS[0], False), (COLUMNS[1], True)])
def test_a_rows_only_program_stores_no_parts(columns, stored):
    shape = Shape()
    requests, config = make_requests(shape, LENGTHS), DecodeConfig(programs=columns * 2)
    call = functools.partial(paged_decode, interpret=True, config=config)
    args = queries(shape), requests.kv, jnp.int32(1), rows_of(requests)
    (kernel,) = (e for e in jax.make_jaxpr(call)(*args).eqns if e.primitive.name == "pallas_call")
    assert len(kernel.outvars) == (5 if stored else 1)  # peaks, totals, sums, arrivals


def random_part(peak_h, seed: int) -> Part:
    rng, peak_h = np.random.default_rng(seed), np.array(peak_h, np.float32)
    total_h, sum_hx = rng.uniform(1, 9, peak_h.shape), rng.standard_normal((*peak_h.shape, 4))
    return Part(*(jnp.asarray(a, jnp.float32) for a in (peak_h, total_h, sum_hx)))


@pytest.mark.parametrize("nothing_first", [True, False])
def test_folding_nothing_leaves_a_part_as_it_is(nothing_first):
    part = random_part([-3e4, -1.0, 0.0, 700.0], seed=0)
    nothing = Part.nothing(4, 4)
    folded = fold(nothing, part) if nothing_first else fold(part, nothing)
    assert all(np.array_equal(bits(a), bits(b)) for a, b in zip(folded, part))
    assert all(np.array_equal(a, b) for a, b in zip(fold(nothing, nothing), nothing))


def test_a_fold_weighs_parts_by_their_peaks():
    """Equal peaks, either higher, far apart."""
    old, new = random_part([2, 1, -1, 500, -500], 1), random_part([2, -1, 1, -500, 500], 2)
    folded = fold(old, new)
    (p, t, s), (p2, t2, s2) = (tuple(np.asarray(a, np.float64) for a in x) for x in (old, new))
    peak = np.maximum(p, p2)
    weight, weight2 = 2.0 ** (p - peak), 2.0 ** (p2 - peak)
    assert np.array_equal(folded.peak_h, peak)
    assert error(folded.total_h, t * weight + t2 * weight2) <= 1e-6
    assert error(folded.sum_hx, s * weight[:, None] + s2 * weight2[:, None]) <= 1e-6


@pytest.mark.parametrize("max_splits", [1, 2, 3])
def test_rows_of_too_many_splits_double_them(max_splits):
    shape = Shape()
    requests, q = make_requests(shape, LENGTHS, seed=2), queries(shape)
    config = DecodeConfig(split_tokens=32, max_splits=max_splits)
    run_it = jax.jit(functools.partial(paged_decode, interpret=True, config=config))
    out = np.asarray(run_it(q, requests.kv, jnp.int32(1), rows_of(requests)))
    assert error(out, expected(q, requests)) <= 1e-5


def test_splits_are_of_whole_tiles():
    with pytest.raises(ValueError, match="split_tokens = 48: must be a multiple of tokens = 32"):
        DecodeConfig(split_tokens=48)


# --- fused with the write ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, shape, dtype",
    [
        ("reference", Shape(), np.float32),
        ("triton", Shape(), np.float32),
        ("triton", Shape(), jnp.bfloat16),
        ("triton", TRITON_SHAPES[2], jnp.bfloat16),
    ],
    ids=lambda x: str(getattr(x, "__name__", x)),
)
def test_the_fused_kernel_is_rotation_write_and_decode(name, dtype, shape):
    """As the reference does them one by one; the pool holds NaN where the row's own K/V go."""
    rng = np.random.default_rng(9)
    n = len(LENGTHS)
    requests = make_requests(shape, LENGTHS, seed=4)
    own = [
        (requests.tables[i, (t - 1) // shape.page_size], (t - 1) % shape.page_size)
        for i, t in enumerate(LENGTHS)
    ]
    for i, (page, offset) in enumerate(own):
        requests.pool[1, plane_index(shape, page, requests.depths[i]), :, :, offset] = np.nan
    requests.pool = requests.pool.astype(dtype)
    channels = shape.heads + 2 * shape.kv_heads
    qkv = rng.standard_normal((n, channels, shape.head_dim)).astype(dtype)
    turn = angles(n, shape.head_dim, dtype, rng)
    valid = np.arange(n) != 3
    batch, layer = rows_of(requests, valid), jnp.int32(1)

    out, kv = fused_decode(qkv, *turn, requests.kv, layer, batch, kernels=IMPLEMENTATIONS[name])
    places = places_of(batch, requests.kv)
    q, kv_expected = write(qkv, *turn, requests.kv, layer, places)
    exact = np.asarray(decode(q, kv_expected, layer, batch))

    tolerance = 1e-5 if dtype == np.float32 else 1e-2
    assert out.dtype == dtype and kv.pool.dtype == dtype and kv.planes == shape.planes
    assert relative(out, exact) <= tolerance
    assert not bits(np.asarray(out)[3]).any()
    written = np.zeros(shape.pool_shape, bool)
    for i, (page, offset) in enumerate(own):
        if valid[i]:
            written[1, plane_index(shape, page, requests.depths[i]), :, :, offset] = True
    assert np.array_equal(bits(kv.pool)[~written], bits(requests.pool)[~written])
    got, wanted = (np.asarray(x.pool)[written] for x in (kv, kv_expected))
    assert error(got, wanted) <= (1e-6 if dtype == np.float32 else 1e-2)
    v_expected = qkv[valid][:, shape.heads + shape.kv_heads :]
    v = [
        np.asarray(kv.pool)[1, plane_index(shape, page, requests.depths[i]), 1, :, offset]
        for i, (page, offset) in enumerate(own)
        if valid[i]
    ]
    assert np.array_equal(bits(np.stack(v)), bits(v_expected))


@each_kind
def test_the_fused_kernel_writes_nothing_for_inactive_rows(name):
    shape, rng = Shape(), np.random.default_rng(0)
    n = shape.requests
    pool, tables = random_pool(shape, rng), block_tables(shape, rng)
    qkv = rng.standard_normal((n, 6, shape.head_dim)).astype(np.float32)
    batch = RowBatch(
        tables,
        rng.choice([0, 3, 10**6], n).astype(np.int32),
        rng.choice([0, 1, 4, 9], n).astype(np.int32),
        np.zeros(n, bool),
    )
    kv, turn = PagedKV(jnp.asarray(pool), 4), no_rotation(n, shape.head_dim, np.float32)
    kernels = IMPLEMENTATIONS[name]
    out, kv = fused_decode(qkv, *turn, kv, jnp.int32(1), batch, kernels=kernels)
    assert not bits(out).any()
    assert np.array_equal(bits(kv.pool), bits(pool))


@each_kind
def test_what_is_prepared_for_many_layers_does_not_show(name):
    shape, kernels = Shape(), IMPLEMENTATIONS[name]
    requests, rng = make_requests(shape, LENGTHS, seed=6), np.random.default_rng(6)
    qkv = rng.standard_normal((shape.requests, 6, shape.head_dim)).astype(np.float32)
    turn, batch = angles(shape.requests, shape.head_dim, np.float32, rng), rows_of(requests)
    shared = prepared(requests.kv, batch, kernels=kernels)
    for _ in range(2):
        args = (qkv, *turn), (jnp.int32(1), batch)
        alone, kv = fused_decode(*args[0], requests.kv, *args[1], kernels=kernels)
        out, shared = fused_decode(*args[0], shared, *args[1], kernels=kernels)
        assert np.array_equal(bits(out), bits(alone))
        assert np.array_equal(bits(shared.pool), bits(kv.pool))
        assert kv.scratch is None


# --- by hand -------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize(
    "planes, wanted",
    [
        (2, 20.0),  # LAST_EXITED: A as of loop 1: equal keys, (10 + 30) / 2
        (1, 22.6894),  # SHARED: A's last version: (e^2 * 20 + e * 30) / (e^2 + e)
    ],
)
def test_two_tokens_two_loops_by_hand(name, planes, wanted):
    """A = (K 1, V 10) at loop 1 and (K 2, V 20) at loop 2; B = (Q 1, K 1, V 30) at its loop 1."""
    kernels = IMPLEMENTATIONS[name]
    kv = PagedKV(jnp.full((1, 2 * planes, 2, 1, 2, 2), jnp.nan), planes)
    table, layer, turn = np.array([[1]], np.int32), jnp.int32(0), no_rotation(1, 2, np.float32)
    for position, depth, key, value in [(0, 1, 1, 10), (0, 2, 2, 20), (1, 1, 1, 30)]:
        qkv = np.array([[[2**0.5, 0], [key, 0], [value, 0]]], np.float32)
        batch = one_row(table, position, depth)
        out, kv = fused_decode(qkv, *turn, kv, layer, batch, kernels=kernels)
    assert np.asarray(out).ravel() == pytest.approx([wanted, 0], abs=1e-4)
