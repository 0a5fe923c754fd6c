"""The Mosaic decode kernel on a GPU: against float32, at the ends of its splits, in big pools."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rlt_jax.kernels.paged_decode import mosaic, prepare, reference, write_and_decode
from rlt_jax.kernels.paged_kv import PagedKV, RowBatch
from rlt_jax.kernels.selection import REFERENCE, Kernels
from tests.kernels.support import angles, bits, relative

pytestmark = pytest.mark.gpu

LAYERS = 2
LENGTHS = [1, 15, 16, 17, 255, 256, 257, 513, 1025, 3000]


@dataclasses.dataclass(frozen=True)
class Shape:
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    page_size: int = 16
    planes: int = 4

    def __str__(self):
        return (
            f"{self.heads}over{self.kv_heads}x{self.head_dim}"
            f"_page{self.page_size}_planes{self.planes}"
        )


SHAPES = [
    Shape(),
    Shape(planes=1),
    Shape(page_size=32),
    Shape(page_size=64),
    Shape(head_dim=64),
    Shape(head_dim=64, page_size=64, planes=1),
    Shape(heads=32, kv_heads=8),
    Shape(heads=32, kv_heads=8, page_size=64),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)

decode = jax.jit(mosaic.paged_decode, static_argnames="config")


@functools.partial(jax.jit, static_argnames="planes")
def expected(q_rhx, pool, planes, layer, batch):
    kv = PagedKV(pool, planes)
    q_rhx = q_rhx.astype(jnp.float32)
    return reference.paged_decode(q_rhx, kv, layer, batch, lax.Precision.HIGHEST)


def problem(shape: Shape, lengths, seed=0, width=None, layers=LAYERS, layer=1, valid=None):
    """(q, kv, layer, batch); what no row owns or has written is NaN."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths)
    counts = -(-lengths // shape.page_size)
    depths = rng.integers(1, 5, len(lengths)).astype(np.int32)
    logical = rng.permutation(counts.sum() + 1).astype(np.int32)
    tables = np.full((len(lengths), width or counts.max() + 3), logical[-1], np.int32)
    inner = (2, shape.kv_heads, shape.page_size, shape.head_dim)
    pool = np.full((layers, len(logical) * shape.planes, *inner), np.nan, jnp.bfloat16)
    used = 0
    for row, (length, count) in enumerate(zip(lengths, counts)):
        tables[row, :count] = logical[used : used + count]
        used += count
        written = (count, *inner)
        kv = rng.standard_normal(written, dtype=np.float32)
        kv[-1, :, :, length - (count - 1) * shape.page_size :] = np.nan
        kv[:, 0] *= 2
        plane = min(depths[row], shape.planes) - 1
        pool[layer, tables[row, :count] * shape.planes + plane] = kv
    q = rng.standard_normal((len(lengths), shape.heads, shape.head_dim), dtype=np.float32)
    batch = RowBatch(
        tables_rp=jnp.asarray(tables),
        positions_r=jnp.asarray(lengths - 1, jnp.int32),
        depths_r=jnp.asarray(depths),
        valid_r=jnp.ones(len(lengths), bool) if valid is None else jnp.asarray(valid),
    )
    kv = PagedKV(jnp.asarray(pool), shape.planes)
    return jnp.asarray(q, jnp.bfloat16), kv, jnp.int32(layer), batch


def error(out, q, kv, layer, batch) -> float:
    return relative(out, expected(q, kv.pool, kv.planes, layer, batch))


@each_shape
def test_equals_float32_at_the_ends_of_pages_and_splits(shape):
    """Mixed depths, scattered pages; NaN behind the context, in other planes and layers."""
    args = problem(shape, LENGTHS)
    out = decode(*args)
    assert out.dtype == jnp.bfloat16 and out.shape == args[0].shape
    ref = np.asarray(expected(args[0], args[1].pool, args[1].planes, *args[2:]))
    for row, length in enumerate(LENGTHS):
        assert relative(out[row], ref[row]) <= 5e-3, length


@pytest.mark.parametrize("shape", [Shape(4, 4), Shape(4, 4, page_size=64)], ids=str)
def test_long_contexts(shape):
    args = problem(shape, [65_536, 1, 16_384, 16_385, 32_769, 700])
    assert error(decode(*args), *args) <= 5e-3


@pytest.mark.parametrize("seed", range(3))
def test_many_rows_of_random_lengths(seed):
    lengths = np.random.default_rng(seed).integers(1, 1500, 128)
    args = problem(Shape(planes=1), lengths, seed)
    assert error(decode(*args), *args) <= 5e-3


def test_rows_that_are_not_valid_read_nothing_and_give_zeros():
    valid = [True, False, True, False]
    q, kv, layer, batch = problem(Shape(), [300, 700, 20, 1], valid=valid)
    nowhere = batch.tables_rp.at[1].set(2**30)
    batch = batch.replace(tables_rp=nowhere, positions_r=batch.positions_r.at[3].set(10**6))
    out = decode(q, kv, layer, batch)
    assert not np.asarray(out[1]).any() and not np.asarray(out[3]).any()
    assert error(out, q, kv, layer, batch) <= 5e-3
    none = decode(q, kv, layer, batch.replace(valid_r=jnp.zeros(4, bool)))
    assert not np.asarray(none).any()


def test_a_pool_of_more_than_4_gib_and_2_to_the_31_elements():
    shape = Shape(4, 4)
    layers, pages = 3, 70_000
    q, kv, layer, batch = problem(shape, [1100, 40], layers=1, layer=0)
    expected_out = decode(q, kv, layer, batch)
    first = pages - kv.num_pages // shape.planes * shape.planes
    inner = kv.pool.shape[2:]

    @jax.jit
    def big(pool):
        empty = jnp.full((layers, pages, *inner), jnp.nan, jnp.bfloat16)
        return lax.dynamic_update_slice(empty, pool, (layers - 1, first, 0, 0, 0, 0))

    pool = big(kv.pool)
    assert pool.size > 2**31 and pool.nbytes > 4 * 2**30
    assert first % shape.planes == 0
    batch = batch.replace(tables_rp=batch.tables_rp + first // shape.planes)
    out = decode(q, PagedKV(pool, shape.planes), jnp.int32(layers - 1), batch)
    assert np.array_equal(bits(out), bits(expected_out))


def test_bits_do_not_depend_on_company_bucket_blocks_or_pairs():
    lengths = [1, 257, 1100, 40, 5000, 256, 17, 800]
    q, kv, layer, batch = problem(Shape(), lengths)
    crowd = bits(decode(q, kv, layer, batch))

    def check(rows, out):
        assert np.array_equal(crowd[np.asarray(rows)], bits(out)[: len(rows)])

    def take(rows, width=None):
        part = jax.tree.map(lambda a: a[np.asarray(rows)], batch)
        if width:
            tables = jnp.pad(part.tables_rp, ((0, 0), (0, width - part.tables_rp.shape[1])))
            part = part.replace(tables_rp=tables)
        return q[np.asarray(rows)], kv, layer, part

    for row in range(len(lengths)):
        check([row], decode(*take([row])))
    check([4, 2, 1], decode(*take([4, 2, 1], width=4096)))
    q_bucket, _, _, bucket = take([2, 4, 1, 2, 2, 2, 2, 2] * 4)
    valid = jnp.arange(32) < 3
    check([2, 4, 1], decode(q_bucket, kv, layer, bucket.replace(valid_r=valid)))
    for change in ({"blocks": 5}, {"pairs": 1}, {"slots": 2}):
        config = dataclasses.replace(mosaic.DEFAULT, **change)
        check(range(8), decode(q, kv, layer, batch, config=config))


@functools.partial(jax.jit, static_argnames="kernels", donate_argnums=0)
def two_layers(kv, qkv, cos, sin, batch, kernels):
    kv, outs = prepare(kv, batch, kernels), []
    for layer in range(LAYERS):
        out, kv = write_and_decode(qkv, cos, sin, kv, jnp.int32(layer), batch, kernels)
        qkv = qkv.at[:, : out.shape[1]].add(out)
        outs.append(out)
    return kv.replace(scratch=None), jnp.stack(outs)


def test_layers_that_write_and_decode_share_a_schedule_and_copy_no_pool():
    shape, kernels = Shape(), Kernels("mosaic", update="triton")
    _, kv, _, batch = problem(shape, [1100, 257, 16, 3000])
    kv = kv.replace(pool=jnp.nan_to_num(kv.pool))  # the first layer too has tokens to read
    rng = np.random.default_rng(1)
    channels = shape.heads + 2 * shape.kv_heads
    qkv = jnp.asarray(rng.standard_normal((4, channels, shape.head_dim)), jnp.bfloat16)
    turn = angles(4, shape.head_dim, jnp.bfloat16, rng)

    temporaries = []
    for pages in (2048, 8192):
        pool = jax.ShapeDtypeStruct((LAYERS, pages, *kv.pool.shape[2:]), jnp.bfloat16)
        args = PagedKV(pool, shape.planes), qkv, *turn, batch
        compiled = two_layers.lower(*args, kernels=kernels).compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporaries[0] == temporaries[1]

    copy = kv.replace(pool=jnp.copy(kv.pool))
    address = kv.pool.unsafe_buffer_pointer()
    kv, out = two_layers(kv, qkv, *turn, batch, kernels=kernels)
    assert kv.pool.unsafe_buffer_pointer() == address
    wanted_kv, wanted = two_layers(copy, qkv, *turn, batch, kernels=REFERENCE)
    assert relative(out, wanted) <= 1e-2
    assert relative(kv.pool, wanted_kv.pool) <= 1e-3


def test_repeated_calls_of_one_schedule_give_the_same_bits():
    """The counts of finished splits are left at zero by every call."""
    args = problem(Shape(), [1100, 257, 16, 5000] * 4)

    @jax.jit
    def repeated(q, kv, layer, batch):
        schedule = mosaic.make_schedule(kv, batch)
        outs = []
        for _ in range(20):
            outs.append(mosaic.paged_decode(q, kv, layer, batch, schedule=schedule))
            q = lax.optimization_barrier((q, outs[-1]))[0]
        return jnp.stack(outs), schedule.finished_n

    outs, finished_n = repeated(*args)
    outs = bits(outs)
    assert not np.asarray(finished_n).any()
    assert all(np.array_equal(outs[0], out) for out in outs)
    assert np.array_equal(outs[0], bits(decode(*args)))
