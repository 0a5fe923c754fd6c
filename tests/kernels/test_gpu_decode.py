"""The Triton kernels of decode steps on a GPU, against the float32 reference on the same GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.kernels.kv_update import finalize_kv, rotate_and_write
from rlt_jax.kernels.paged_decode import paged_decode, write_and_decode
from rlt_jax.kernels.paged_decode.triton import make_sharing
from rlt_jax.kernels.paged_decode.triton_splits import DecodeConfig
from rlt_jax.kernels.paged_kv import PagedKV, RowBatch
from rlt_jax.kernels.residual_norm import residual_norm
from rlt_jax.kernels.selection import REFERENCE, Kernels
from tests.kernels.support import (
    Shape,
    angles,
    bits,
    make_requests,
    places_of,
    relative,
    rows_of,
)

pytestmark = pytest.mark.gpu

TRITON = Kernels("triton", "triton", "triton", "triton")
LENGTHS = (1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1025)
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3}
LAYER = 1

SHAPES = [
    Shape(heads=4, kv_heads=4, head_dim=128),
    Shape(heads=4, kv_heads=4, head_dim=128, page_size=64, planes=1),
    Shape(heads=6, kv_heads=2, head_dim=64, page_size=32),
    Shape(heads=20, kv_heads=4, head_dim=96),
    Shape(heads=5, kv_heads=5, head_dim=96, planes=1),
    Shape(heads=8, kv_heads=1, head_dim=8, page_size=4),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])

decode = jax.jit(paged_decode, static_argnames="kernels")
fused = jax.jit(write_and_decode, static_argnames="kernels", donate_argnums=3)
write = jax.jit(rotate_and_write, static_argnames="kernels", donate_argnums=3)
finalize = jax.jit(finalize_kv, static_argnames="kernels", donate_argnums=0)


@dataclasses.dataclass
class Inputs:
    """A projection of each row over poisoned pages, in the dtype under test."""

    qkv: jax.Array
    cos: jax.Array
    sin: jax.Array
    kv: PagedKV
    batch: RowBatch

    @property
    def q(self):
        return self.qkv[:, : self.qkv.shape[1] - 2 * self.kv.kv_heads]

    def as_float32(self) -> "Inputs":
        def up(tree):
            return jax.tree.map(lambda a: a.astype(jnp.float32), tree)

        return dataclasses.replace(
            self, qkv=up(self.qkv), cos=up(self.cos), sin=up(self.sin), kv=up(self.kv)
        )

    def copied_kv(self) -> PagedKV:
        return jax.tree.map(jnp.copy, self.kv)


def make_inputs(shape: Shape, dtype: str, lengths=LENGTHS, invalid=(), seed=0) -> Inputs:
    """The rows of `invalid` have tables full of pages that nobody wrote."""
    shape = dataclasses.replace(shape, requests=len(lengths), tokens=max(lengths))
    requests = make_requests(shape, lengths, seed, layer=LAYER)
    rng = np.random.default_rng(seed + 1)
    valid = np.ones(len(lengths), bool)
    for row in invalid:
        requests.tables[row] = requests.pool.shape[1] // shape.planes - 1
        valid[row] = False
    channels = shape.heads + 2 * shape.kv_heads
    qkv = rng.standard_normal((len(lengths), channels, shape.head_dim))
    cos, sin = angles(len(lengths), shape.head_dim, np.float32, rng)
    qkv, cos, sin, pool = (jnp.asarray(a, dtype) for a in (qkv, cos, sin, requests.pool))
    batch = jax.tree.map(jnp.asarray, rows_of(requests, valid))
    return Inputs(qkv, cos, sin, PagedKV(pool, shape.planes), batch)


def take(inputs: Inputs, rows) -> Inputs:
    """The same requests as other rows of another batch."""
    rows = jnp.asarray(rows)
    taken = {
        name: jax.tree.map(lambda a: a[rows], getattr(inputs, name))
        for name in ("qkv", "cos", "sin", "batch")
    }
    return dataclasses.replace(inputs, **taken)


def run(inputs: Inputs, kernels=TRITON):
    return decode(inputs.q, inputs.kv, jnp.int32(LAYER), inputs.batch, kernels=kernels)


def run_fused(inputs: Inputs, kernels=TRITON):
    return fused(
        inputs.qkv,
        inputs.cos,
        inputs.sin,
        inputs.copied_kv(),
        jnp.int32(LAYER),
        inputs.batch,
        kernels=kernels,
    )


def assert_same_pool(kv: PagedKV, reference: PagedKV, tolerance: float):
    """Equal where something was written, and NaN in the same places: nowhere else was."""
    ours, theirs = (np.asarray(x.pool.astype(jnp.float32)) for x in (kv, reference))
    written = ~np.isnan(theirs)
    assert np.array_equal(~np.isnan(ours), written)
    assert relative(ours[written], theirs[written]) <= tolerance


@each_dtype
@each_shape
def test_decode_equals_the_float32_reference(shape, dtype):
    inputs = make_inputs(shape, dtype, invalid=(2, 7))
    out = run(inputs)
    assert out.dtype == dtype
    assert relative(out, run(inputs.as_float32(), REFERENCE)) <= TOLERANCE[dtype]
    assert not np.asarray(out[jnp.array([2, 7])], np.float32).any()


@each_dtype
@each_shape
def test_the_fused_write_equals_the_float32_reference(shape, dtype):
    inputs = make_inputs(shape, dtype, invalid=(3,), seed=5)
    out, kv = run_fused(inputs)
    expected, expected_kv = run_fused(inputs.as_float32(), REFERENCE)
    assert relative(out, expected) <= TOLERANCE[dtype]
    assert not np.asarray(out[3], np.float32).any()
    assert_same_pool(kv, expected_kv, TOLERANCE[dtype])


@each_dtype
def test_a_fused_write_attends_to_what_it_wrote(dtype):
    inputs = make_inputs(SHAPES[0], dtype, seed=8)
    out, kv = run_fused(inputs)
    places = places_of(inputs.batch, inputs.kv)
    rows = inputs.qkv, inputs.cos, inputs.sin, inputs.copied_kv(), jnp.int32(LAYER), places
    q_rhx, written = write(*rows, kernels=TRITON)
    assert np.array_equal(bits(kv.pool), bits(written.pool))
    again = decode(q_rhx, written, jnp.int32(LAYER), inputs.batch, kernels=TRITON)
    assert relative(out, again) <= TOLERANCE[dtype]


@each_dtype
def test_long_rows(dtype):
    """Longer than max_splits whole splits: the splits of such a row grow."""
    shape = Shape(heads=2, kv_heads=2, head_dim=128, planes=1)
    lengths = (65_536, 65_535, DecodeConfig().split_tokens * DecodeConfig().max_splits + 1, 300)
    inputs = make_inputs(shape, dtype, lengths)
    expected = run(inputs.as_float32(), REFERENCE)
    for row, length in enumerate(lengths):
        out = run(take(inputs, [row]))[0]
        assert relative(out, expected[row]) <= TOLERANCE[dtype], length


@each_dtype
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]], ids=str)
@pytest.mark.parametrize("operation", [run, lambda x: run_fused(x)[0]], ids=["decode", "fused"])
def test_a_row_has_the_same_bits_in_any_company(operation, shape, dtype):
    """Alone; sharing its programs; with one program, which folds up to 11 parts in registers."""
    lengths = (*LENGTHS, 2500)
    inputs = make_inputs(shape, dtype, lengths)
    count = len(lengths)
    alone = np.concatenate([bits(operation(take(inputs, [row]))) for row in range(count)])
    for bucket in (8, 32, 128):
        rows = (np.arange(bucket) * 7 + bucket) % count
        crowd = take(inputs, rows)
        valid = np.arange(bucket) % 5 != 3
        if operation is not run:  # no two rows may write the same place
            valid &= np.arange(bucket) < count
        crowd.batch = dataclasses.replace(crowd.batch, valid_r=jnp.asarray(valid))
        assert (make_sharing(crowd.kv, crowd.batch) is None) == (bucket == 128)
        out = bits(operation(crowd))
        assert np.array_equal(out[valid], alone[rows[valid]]), bucket


def test_without_valid_rows_nothing_is_read_or_written():
    inputs = make_inputs(SHAPES[0], "bfloat16", (40, 600, 3), invalid=(0, 1, 2))
    out, kv = run_fused(inputs)
    assert not np.asarray(out, np.float32).any()
    assert np.array_equal(bits(kv.pool), bits(inputs.kv.pool))


@each_dtype
@each_shape
def test_rotate_and_write(shape, dtype):
    inputs = make_inputs(shape, dtype, invalid=(4,), seed=2)

    def both(inputs, kernels):
        places = places_of(inputs.batch, inputs.kv)
        rows = inputs.qkv, inputs.cos, inputs.sin, inputs.copied_kv(), jnp.int32(LAYER), places
        return write(*rows, kernels=kernels)

    q, kv = both(inputs, TRITON)
    expected_q, expected_kv = both(inputs.as_float32(), REFERENCE)
    real = np.asarray(inputs.batch.valid_r)
    assert np.isfinite(np.asarray(q, np.float32)).all()
    assert relative(q[real], expected_q[real]) <= TOLERANCE[dtype]
    assert_same_pool(kv, expected_kv, TOLERANCE[dtype])


@each_dtype
def test_finalize_moves_bits(dtype):
    inputs = make_inputs(SHAPES[0], dtype, invalid=(1,))
    batch = inputs.batch
    rows = batch.tables_rp, batch.positions_r, batch.depths_r, batch.valid_r
    kv = finalize(inputs.copied_kv(), *rows, kernels=TRITON)
    expected = finalize(inputs.copied_kv(), *rows, kernels=REFERENCE)
    changed = bits(expected.pool) != bits(inputs.kv.pool)
    assert changed.any()
    assert np.array_equal(bits(kv.pool), bits(expected.pool))


@each_dtype
@pytest.mark.parametrize("rows, width", [(1, 2048), (8, 2048), (128, 2048), (5, 1000), (3, 96)])
def test_residual_norm(rows, width, dtype):
    rng = np.random.default_rng(width)
    hidden, branch = (jnp.asarray(rng.standard_normal((rows, width)), dtype) for _ in range(2))
    weights = jnp.asarray(rng.standard_normal((4, width)), dtype)

    def both(kernels, dtype):
        hidden_, branch_, weights_ = (a.astype(dtype) for a in (hidden, branch, weights))
        seam = functools.partial(residual_norm, eps=1e-6, kernels=kernels)
        return jax.jit(lambda h, b, w: seam(h, b, (w, 1), (w, 2)))(hidden_, branch_, weights_)

    for ours, theirs in zip(both(TRITON, dtype), both(REFERENCE, "float32")):
        assert ours.dtype == dtype
        assert relative(ours, theirs) <= TOLERANCE[dtype]


@each_dtype
def test_the_pool_stays_where_it_is(dtype):
    inputs = make_inputs(SHAPES[0], dtype)
    kv = inputs.copied_kv()
    address = kv.pool.unsafe_buffer_pointer()
    rows = inputs.qkv, inputs.cos, inputs.sin
    batch = inputs.batch
    places = places_of(batch, kv)
    exits = batch.tables_rp, batch.positions_r, batch.depths_r, batch.valid_r
    for layer in (0, 1):
        _, kv = fused(*rows, kv, jnp.int32(layer), batch, kernels=TRITON)
        assert kv.pool.unsafe_buffer_pointer() == address
        _, kv = write(*rows, kv, jnp.int32(layer), places, kernels=TRITON)
        assert kv.pool.unsafe_buffer_pointer() == address
        kv = finalize(kv, *exits, kernels=TRITON)
        assert kv.pool.unsafe_buffer_pointer() == address


# Offsets are 64 bits wide above 4 GiB only, so each kernel compiles differently there.
LARGE_POOLS = {
    "bfloat16 above 2**31 elements": ("bfloat16", (2, 17_000, 2, 16, 16, 128)),
    "float32 above 4 GiB": ("float32", (2, 9_000, 2, 16, 16, 128)),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_pool(shape, dtype):
    """Random numbers of size 0.5 .. 1, of random sign: bits, without larger temporaries."""
    if dtype == "bfloat16":
        random = jax.random.bits(jax.random.key(3), shape, jnp.uint16)
        return jax.lax.bitcast_convert_type(
            random & np.uint16(0x807F) | np.uint16(0x3F00), jnp.bfloat16
        )
    random = jax.random.bits(jax.random.key(3), shape, jnp.uint32)
    return jax.lax.bitcast_convert_type(
        random & np.uint32(0x807FFFFF) | np.uint32(0x3F000000), jnp.float32
    )


@pytest.mark.parametrize("name", LARGE_POOLS)
def test_large_pools(name):
    dtype, shape = LARGE_POOLS[name]
    lengths, planes = np.array([1025, 33, 700, 256]), 4
    logical, width = shape[1] // planes, 65
    rng = np.random.default_rng(0)
    # The far end of the pool, where offsets are largest, and the near one.
    near_and_far = np.r_[0:200, logical - 200 : logical - 4]
    tables = rng.permutation(near_and_far)[: 4 * width].reshape(4, width)
    tables[:, 0] = logical - 1 - np.arange(4)
    batch = RowBatch(
        *(jnp.asarray(a, jnp.int32) for a in (tables, lengths - 1, [1, 2, 3, 4])),
        jnp.ones(4, bool),
    )
    qkv = jnp.asarray(rng.standard_normal((4, 48, 128)), dtype)
    cos, sin = (jnp.asarray(a, dtype) for a in angles(4, 128, np.float32, rng))
    layer = jnp.int32(LAYER)
    kv = PagedKV(random_pool(shape, dtype), planes)
    address = kv.pool.unsafe_buffer_pointer()

    out, kv = fused(qkv, cos, sin, kv, layer, batch, kernels=TRITON)
    assert kv.pool.unsafe_buffer_pointer() == address
    places = places_of(batch, kv)
    no_pool = PagedKV(jnp.zeros((2, 4, *shape[2:]), dtype), 1)
    at = dataclasses.replace(
        places, pages_t=jnp.arange(4, dtype=jnp.int32), offsets_t=jnp.zeros(4, jnp.int32)
    )
    q_rhx, written = write(qkv, cos, sin, no_pool, layer, at, kernels=TRITON)
    own = kv.pool[LAYER, places.pages_t, :, :, places.offsets_t]
    assert np.array_equal(bits(own), bits(written.pool[LAYER, :, :, :, 0]))
    expected = decode(q_rhx.astype(jnp.float32), kv, layer, batch, kernels=REFERENCE)
    assert relative(out, expected) <= TOLERANCE[dtype]
    again = decode(q_rhx, kv, layer, batch, kernels=TRITON)
    assert relative(again, expected) <= TOLERANCE[dtype]

    exits = batch.tables_rp, batch.positions_r, batch.depths_r, batch.valid_r
    kv = finalize(kv, *exits, kernels=TRITON)
    assert kv.pool.unsafe_buffer_pointer() == address
    deepest = dataclasses.replace(batch, depths_r=jnp.full(4, planes, jnp.int32))
    deep = places_of(deepest, kv)
    assert np.array_equal(bits(kv.pool[LAYER, deep.pages_t, :, :, deep.offsets_t]), bits(own))
