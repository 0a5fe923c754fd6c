"""Paged attention of packed prompt tiles against a dense one."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.support import (
    IMPLEMENTATIONS,
    LAYERS,
    LENGTHS,
    Requests,
    Shape,
    bits,
    error,
    make_requests,
    pack,
    prefill,
    relative,
)

TILE_ROWS, TILES, ROWS = 16, 13, 160
COUNTS = [1, 16, 5, 40, 1, 16, 17, 33]  # of LENGTHS' last positions; in 13 tiles

SHAPES = [
    Shape(),
    Shape(heads=6, kv_heads=2),
    Shape(head_dim=16, page_size=4),
    Shape(planes=1, heads=4, kv_heads=2),
    Shape(page_size=1, planes=1, heads=4),
    Shape(page_size=48, heads=4),  # no divisor of the chunk
]
TRITON_SHAPES = [
    SHAPES[0],
    Shape(planes=1, heads=4, kv_heads=2, page_size=4),
    Shape(heads=3, kv_heads=1, head_dim=24, page_size=64),  # pages larger than a block of keys
]
CASES = [("reference", s) for s in SHAPES] + [("triton", s) for s in TRITON_SHAPES]
FEW = [("reference", SHAPES[1]), ("triton", TRITON_SHAPES[1])]

each_case = pytest.mark.parametrize("name, shape", CASES, ids=str)
few_cases = pytest.mark.parametrize("name, shape", FEW, ids=str)
each_kind = pytest.mark.parametrize("name", IMPLEMENTATIONS)


@dataclasses.dataclass
class Chunk:
    """The last `counts[n]` positions of each request, packed one after the other."""

    requests: Requests
    counts: list[int]
    q: np.ndarray
    num_rows: int = ROWS
    tile_rows: int = TILE_ROWS
    tiles: int = TILES

    def run(self, name: str, layer: int = 1) -> np.ndarray:
        batch = pack(self.requests, self.counts, self.num_rows, self.tile_rows, self.tiles)
        kernels = IMPLEMENTATIONS[name]
        out = prefill(self.q, self.requests.kv, jnp.int32(layer), batch, kernels=kernels)
        assert out.shape == self.q.shape and out.dtype == self.q.dtype
        return np.asarray(out)

    def run_rows(self, name: str) -> np.ndarray:
        """Without the padding, which may be anything finite."""
        out = self.run(name)
        assert np.isfinite(out.astype(np.float32)).all()
        return out[: sum(self.counts)]

    def first_row(self, n: int) -> int:
        return sum(self.counts[:n])

    def expected(self) -> np.ndarray:
        out, row = [], 0
        for n, (length, count) in enumerate(zip(self.requests.lengths, self.counts)):
            for position in range(length - count, length):
                out.append(self.requests.attention(n, position, self.q[row]))
                row += 1
        return np.stack(out)


def make_chunk(shape: Shape, lengths=LENGTHS, counts=COUNTS, seed=0, depths=None, layer=1):
    requests = make_requests(shape, lengths, seed, depths, layer)
    rng = np.random.default_rng(seed + 100)
    q = rng.standard_normal((ROWS, shape.heads, shape.head_dim)).astype(np.float32)
    return Chunk(requests, np.minimum(counts, lengths).tolist(), q)


@each_case
def test_prefill_equals_a_dense_attention(name, shape):
    """Ragged counts, chunks of several tiles, history before them, mixed depths, NaN all around."""
    chunk = make_chunk(shape)
    assert error(chunk.run_rows(name), chunk.expected()) <= 1e-5


@each_kind
def test_a_whole_prompt_in_one_call(name):
    """No history: every row's context is in the packing."""
    shape = Shape(requests=2, tokens=100)
    chunk = make_chunk(shape, lengths=[100, 37], counts=[100, 37])
    assert error(chunk.run_rows(name), chunk.expected()) <= 1e-5


@each_kind
@pytest.mark.parametrize("layer", range(LAYERS))
def test_prefill_reads_the_layer_it_is_told(name, layer):
    chunk = make_chunk(Shape(), seed=layer, layer=layer)
    rows = sum(chunk.counts)
    assert error(chunk.run(name, layer)[:rows], chunk.expected()) <= 1e-5
    assert np.isnan(chunk.run(name, 1 - layer)).any()


@each_kind
@pytest.mark.parametrize("scale", [0.0, 30.0, 1e4])
def test_scores_of_any_size_give_a_softmax(name, scale):
    chunk = make_chunk(Shape(), seed=3)
    chunk.q = (chunk.q * scale).astype(np.float32)
    # An f32 score of s is off by some ulps of s, and a weight by a factor of their exponential.
    requests = chunk.requests
    largest = max(
        requests.largest_score(n, chunk.q[row])
        for n, count in enumerate(chunk.counts)
        for row in range(chunk.first_row(n), chunk.first_row(n) + count)
    )
    bound = max(1e-5, 2 * largest * 2.0**-23)
    assert error(chunk.run_rows(name), chunk.expected()) <= bound


@each_kind
def test_prefill_in_bfloat16(name):
    """The reference rounds only what it returns; the kernel rounds the weights too."""
    chunk = make_chunk(Shape(planes=1, heads=4), seed=5)
    chunk.requests.to_bfloat16()
    chunk.q = chunk.q.astype(jnp.bfloat16)
    out, exact = chunk.run_rows(name).astype(np.float64), chunk.expected()
    assert relative(out, exact) <= (2e-3 if name == "reference" else 5e-3)
    if name == "reference":
        assert (np.abs(out - exact) <= 2.0**-8 * np.abs(exact) + 2e-6).all()


@few_cases
def test_empty_tiles_read_nothing(name, shape):
    """Their tables, positions and depths are nonsense, and nobody's pages are NaN."""
    chunk = make_chunk(shape)
    whole = chunk.run_rows(name)
    chunk.counts[4:] = [0] * 4
    for n in range(4, 8):
        chunk.requests.poison(n)
    rows = sum(chunk.counts)
    assert np.array_equal(bits(chunk.run_rows(name)), bits(whole[:rows]))
    chunk.counts[1:4] = [0] * 3
    assert np.array_equal(bits(chunk.run_rows(name)), bits(whole[:1]))


NEIGHBOURS = st.lists(
    st.tuples(st.integers(1, max(LENGTHS)), st.integers(0, 24), st.integers(1, 4)),
    min_size=len(LENGTHS) - 1,
    max_size=len(LENGTHS) - 1,
)


@few_cases
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    neighbours=NEIGHBOURS,
    length=st.sampled_from([20, 127, 128, 130, 260]),
    count=st.integers(1, 20),
    earlier=st.integers(0, 19),
)
def test_a_row_is_bitwise_the_same_in_any_company(name, shape, neighbours, length, count, earlier):
    """Whatever is packed around it, wherever it lies, and however the prompt is cut."""
    n = len(LENGTHS)
    mine = make_chunk(shape, [length] * n, [count, *[0] * (n - 1)], seed=1, depths=[2] * n)
    alone = mine.run_rows(name)
    assert bits(alone).any()
    for at in (0, 5):
        lengths, counts, depths = (list(x) for x in zip(*neighbours))
        # The same rows at the end of a longer chunk: other tiles, or another place in them.
        longer = min(count + earlier, length)
        lengths.insert(at, length)
        counts.insert(at, longer)
        depths.insert(at, 2)
        while sum(-(-min(c, t) // TILE_ROWS) for c, t in zip(counts, lengths)) > TILES:
            counts[max(i for i, c in enumerate(counts) if c and i != at)] = 0
        crowd = make_chunk(shape, lengths, counts, seed=2, depths=depths)
        crowd.requests.take(at, mine.requests, 0)
        end = crowd.first_row(at) + longer
        crowd.q[end - count : end] = mine.q[:count]
        assert np.array_equal(bits(crowd.run_rows(name)[end - count : end]), bits(alone))


@few_cases
def test_a_row_is_bitwise_the_same_in_another_bucket(name, shape):
    chunk = make_chunk(shape)
    whole = chunk.run_rows(name)
    chunk.q, chunk.num_rows = np.pad(chunk.q, ((0, 64), (0, 0), (0, 0))), ROWS + 64
    assert np.array_equal(bits(chunk.run_rows(name)), bits(whole))
