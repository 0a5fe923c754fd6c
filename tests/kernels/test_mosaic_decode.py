"""The Mosaic decode kernel without a GPU: in Pallas' interpreter, and lowered for CUDA.

The interpreter has neither the inline MLIR nor products that add to an accumulator: there the
splits are added by jnp, and the products are dot products.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.kernels.compat import lower_for_cuda
from rlt_jax.kernels.paged_kv import PagedKV, RowBatch
from rlt_jax.kernels.selection import Kernels

mosaic = pytest.importorskip("rlt_jax.kernels.paged_decode.mosaic")
from tests.kernels.support import (  # noqa: E402
    Shape,
    angles,
    bits,
    decode,
    fused_decode,
    make_requests,
    places_of,
    prepared,
    relative,
    rows_of,
    write,
)

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Mosaic's interpreter of jax 0.11 and later"
)

MHA = Shape(heads=4, kv_heads=4, head_dim=64, requests=6, tokens=80)
SHAPES = [
    MHA,
    dataclasses.replace(MHA, page_size=64, planes=1, heads=2, kv_heads=2, tokens=192),
    dataclasses.replace(MHA, heads=8, page_size=32, head_dim=128),
]
CONFIG = mosaic.MosaicConfig(split_tokens=64, slots=2, blocks=2)


def queries(shape: Shape, rows: int, seed: int = 7):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((rows, shape.heads, shape.head_dim)), jnp.bfloat16)


def requests_of(shape: Shape, lengths):
    requests = make_requests(shape, lengths)
    requests.to_bfloat16()
    return requests


@functools.cache
def interpreted(config=CONFIG, detect_races=False):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    interpret = plgpu.InterpretGPUParams(detect_races=detect_races)
    return jax.jit(functools.partial(mosaic.paged_decode, interpret=interpret, config=config))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pairs", [1, 2])
def test_equals_a_dense_attention(shape, pairs):
    """Mixed depths, NaN all around, an invalid row, ends of pages and splits."""
    lengths = [1, 16, 17, 63, 64, 65]
    requests, q = requests_of(shape, lengths), queries(shape, len(lengths))
    batch = rows_of(requests, valid=[True] * 3 + [False] + [True] * 2)
    config = dataclasses.replace(CONFIG, pairs=pairs)
    out = np.asarray(interpreted(config)(q, requests.kv, jnp.int32(1), batch), np.float32)
    for n, length in enumerate(lengths):
        if n == 3:
            assert not out[n].any()
            continue
        q_hx = np.asarray(q[n], np.float64)
        assert relative(out[n], requests.attention(n, length - 1, q_hx)) <= 5e-3, length


def test_there_are_no_races():
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    requests, q = requests_of(MHA, [1, 16, 33, 80, 64, 65]), queries(MHA, 6)
    decode = interpreted(detect_races=True)
    jax.block_until_ready(decode(q, requests.kv, jnp.int32(1), rows_of(requests)))
    races = gpu_callbacks.get_races()
    assert not races.races_found


def test_bits_do_not_depend_on_company_or_blocks():
    requests, q = requests_of(MHA, [1, 16, 33, 80, 64, 65]), queries(MHA, 6)
    batch = rows_of(requests)
    crowd = bits(interpreted()(q, requests.kv, jnp.int32(1), batch))
    alone = jax.tree.map(lambda a: jnp.asarray(a)[3:4], batch)
    assert np.array_equal(crowd[3:4], bits(interpreted()(q[3:4], requests.kv, jnp.int32(1), alone)))
    other = dataclasses.replace(CONFIG, blocks=3, pairs=1, slots=3)
    out = interpreted(other)(q, requests.kv, jnp.int32(1), batch)
    assert np.array_equal(crowd, bits(out))


def test_the_package_writes_then_decodes_with_one_schedule_for_all_layers(monkeypatch):
    kernels = Kernels("mosaic", update="triton", interpret=True)
    shape = dataclasses.replace(MHA, requests=3)
    requests, rng = requests_of(shape, [1, 33, 64]), np.random.default_rng(3)
    channels = shape.heads + 2 * shape.kv_heads
    qkv = rng.standard_normal((shape.requests, channels, shape.head_dim)).astype(jnp.bfloat16)
    turn = angles(shape.requests, shape.head_dim, jnp.bfloat16, rng)
    batch, layer = rows_of(requests), jnp.int32(1)
    places = places_of(batch, requests.kv)
    q, written = write(qkv, *turn, requests.kv, layer, places, kernels=kernels)
    alone = decode(q, written, layer, batch, kernels=kernels)
    assert relative(alone, decode(q, written, layer, batch)) <= 5e-3
    kv = prepared(requests.kv, batch, kernels=kernels)
    monkeypatch.setattr(mosaic, "make_schedule", None)
    out, kv = fused_decode(qkv, *turn, kv, layer, batch, kernels=kernels)
    assert np.array_equal(bits(out), bits(alone))
    assert np.array_equal(bits(kv.pool), bits(written.pool))


def test_schedule_has_every_split_once_whole_ones_first():
    lengths = np.array([1, 64, 65, 1000, 0, 64 * 8 + 1, 4096])
    config = mosaic.MosaicConfig(split_tokens=64, max_splits=8)
    kv = PagedKV(jnp.zeros((1, 4, 2, 4, 16, 64), jnp.bfloat16), 4)
    batch = RowBatch(
        tables_rp=jnp.zeros((len(lengths), 256), jnp.int32),
        positions_r=jnp.asarray(np.maximum(lengths - 1, 3), jnp.int32),
        depths_r=jnp.full(len(lengths), 3, jnp.int32),
        valid_r=jnp.asarray(lengths > 0),
    )
    batch = batch.replace(positions_r=jnp.asarray(np.where(lengths, lengths - 1, 3), jnp.int32))
    schedule = mosaic.make_schedule(kv, batch, config)
    entries = np.asarray(schedule.entries_en)[: int(schedule.count_1[0])].tolist()
    expected_whole, expected_rest = [], []
    for row, length in enumerate(lengths.tolist()):
        tokens = 64
        while length > tokens * 8:
            tokens *= 2
        splits = max(-(-length // tokens), 1)
        for split in range(splits):
            count = min(length - split * tokens, tokens)
            entry = [row, split, split * tokens // 16, count, splits, 2, 0, 0]
            (expected_whole if count == tokens else expected_rest).append(entry)
    assert entries == expected_whole + expected_rest
    assert not np.asarray(schedule.finished_n).any()


REAL = [
    {},
    {"page_size": 32},
    {"page_size": 64, "pages": 10_000},
    {"head_dim": 64, "page_size": 64},
    {"heads": 32, "kv_heads": 8},
]


@pytest.mark.parametrize("model", REAL, ids=str)
def test_lowers_for_cuda_at_real_shapes(model):
    given = {"heads": 16, "kv_heads": 16, "head_dim": 128, "page_size": 16, "pages": 40_000}
    heads, kv_heads, head_dim, page_size, pages = (given | model).values()
    assert mosaic.unsupported_reason(head_dim, kv_heads, heads, page_size, "bfloat16") is None
    rows, table = 8, 4096
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    pool = jax.ShapeDtypeStruct((24, pages, 2, kv_heads, page_size, head_dim), jnp.bfloat16)
    valid = jax.ShapeDtypeStruct((rows,), bool)
    batch = RowBatch(ints((rows, table)), ints((rows,)), ints((rows,)), valid)
    q = jax.ShapeDtypeStruct((rows, heads, head_dim), jnp.bfloat16)
    text = lower_for_cuda(
        jax.jit(mosaic.paged_decode), q, PagedKV(pool, 4), ints(()), batch
    ).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    # The pool and the counts are operands only: nothing is copied to be written.
    assert "output_operand_alias" not in text


@pytest.mark.parametrize(
    "change, words",
    [
        ({"head_dim": 96}, "head_dim 96"),
        ({"page_size": 128}, "pages of 128"),
        ({"kv_heads": 2, "heads": 2}, "2 K/V heads"),
        ({"dtype": "float32"}, "float32"),
        ({"heads": 48}, "queries at once"),
    ],
)
def test_says_what_it_cannot_do(change, words):
    shape = {"head_dim": 128, "kv_heads": 16, "heads": 16, "page_size": 16, "dtype": "bfloat16"}
    assert mosaic.unsupported_reason(**shape) is None
    assert words in mosaic.unsupported_reason(**(shape | change))
