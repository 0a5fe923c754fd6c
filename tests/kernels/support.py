"""Requests with random contexts in a poisoned pool, and a dense float64 NumPy attention.

Every pool starts as NaN in each entry that the rows under test do not own: other layers, other
planes, unowned pages, positions past the context. Whatever reads one of them shows it.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from rlt_jax.kernels.kv_update import finalize_kv, rotate_and_write
from rlt_jax.kernels.paged_decode import paged_decode, prepare, write_and_decode
from rlt_jax.kernels.paged_kv import PagedKV, RowBatch, TileBatch
from rlt_jax.kernels.paged_prefill import paged_prefill
from rlt_jax.kernels.selection import REFERENCE, Kernels

LAYERS = 2
# Around the ends of the chunks, blocks and splits that contexts are walked in.
LENGTHS = [1, *(128 * i + d for i in (1, 2) for d in (-1, 0, 1)), 385]

IMPLEMENTATIONS = {
    "reference": REFERENCE,
    "triton": Kernels("triton", "triton", "triton", "triton", interpret=True),
}

decode = jax.jit(paged_decode, static_argnames="kernels")
fused_decode = jax.jit(write_and_decode, static_argnames="kernels")
prepared = jax.jit(prepare, static_argnames="kernels")
prefill = jax.jit(paged_prefill, static_argnames="kernels")
write = jax.jit(rotate_and_write, static_argnames="kernels")
finalize = jax.jit(finalize_kv, static_argnames="kernels")
places_of = jax.jit(lambda batch, kv: batch.places(kv))


@dataclasses.dataclass(frozen=True)
class Shape:
    """What decides the compiled program (planes 4: LAST_EXITED; 1: SHARED)."""

    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 8
    page_size: int = 16
    planes: int = 4
    requests: int = len(LENGTHS)
    tokens: int = max(LENGTHS)  # the longest context

    def __str__(self):
        return (
            f"{self.heads}over{self.kv_heads}x{self.head_dim}"
            f"_page{self.page_size}_planes{self.planes}"
        )

    @property
    def width(self) -> int:
        """Pages of a block table."""
        return -(-self.tokens // self.page_size)

    @property
    def pool_shape(self) -> tuple[int, ...]:
        spare = 3  # pages that nobody owns
        pages = (self.requests * self.width + spare) * self.planes
        return (LAYERS, pages, 2, self.kv_heads, self.page_size, self.head_dim)


@dataclasses.dataclass
class Requests:
    """Contexts of `lengths` tokens; their K/V lie at each request's own depth in one layer."""

    shape: Shape
    lengths: np.ndarray
    depths: np.ndarray
    pool: np.ndarray
    tables: np.ndarray  # [n, width]; entries past the context are a page that nobody owns
    pages: np.ndarray  # all that each request owns, [n, width]
    keys: list[np.ndarray]  # of each request: [length, kv_heads, head_dim]
    values: list[np.ndarray]

    @property
    def kv(self) -> PagedKV:
        return PagedKV(jnp.asarray(self.pool), self.shape.planes)

    def attention(self, n: int, position: int, q_hx: np.ndarray) -> np.ndarray:
        """What a query of request n at this position should get."""
        seen = position + 1
        return dense_attention(q_hx, self.keys[n][:seen], self.values[n][:seen])

    def largest_score(self, n: int, q_hx: np.ndarray) -> float:
        keys = np.repeat(self.keys[n], self.shape.heads // self.shape.kv_heads, axis=1)
        scores = np.einsum("hx,thx->ht", q_hx.astype(np.float64), keys)
        return float(np.abs(scores).max() / math.sqrt(self.shape.head_dim))

    def to_bfloat16(self):
        self.pool = self.pool.astype(jnp.bfloat16)
        self.keys = [x.astype(jnp.bfloat16) for x in self.keys]
        self.values = [x.astype(jnp.bfloat16) for x in self.values]

    def poison(self, n: int):
        for page in self.pages[n] * self.shape.planes:
            self.pool[:, page : page + self.shape.planes] = np.nan

    def take(self, n: int, other: "Requests", m: int):
        """Request n becomes a copy of request m of another batch, context and all."""
        planes = self.shape.planes
        for here, there in zip(self.pages[n] * planes, other.pages[m] * planes):
            self.pool[:, here : here + planes] = other.pool[:, there : there + planes]
        self.tables[n] = self.pages[n]
        for name in ("lengths", "depths"):
            getattr(self, name)[n] = getattr(other, name)[m]
        self.keys[n], self.values[n] = other.keys[m], other.values[m]


def make_requests(shape: Shape, lengths, seed: int = 0, depths=None, layer: int = 1) -> Requests:
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths)
    depths = rng.integers(1, 5, len(lengths)) if depths is None else np.array(depths)
    pages, pool, keys, values = block_tables(shape, rng), nan_pool(shape), [], []
    tables = pages.copy()
    for n, length in enumerate(lengths):
        kv = rng.standard_normal((2, length, shape.kv_heads, shape.head_dim)).astype(np.float32)
        keys.append(kv[0] * 2)
        values.append(kv[1])
        for t in range(length):
            page = plane_index(shape, tables[n, t // shape.page_size], depths[n])
            pool[layer, page, 0, :, t % shape.page_size] = keys[n][t]
            pool[layer, page, 1, :, t % shape.page_size] = values[n][t]
        tables[n, -(-length // shape.page_size) :] = pool.shape[1] // shape.planes - 1
    return Requests(
        shape, lengths, depths.astype(np.int32), pool, tables.astype(np.int32), pages, keys, values
    )


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


def block_tables(shape: Shape, rng) -> np.ndarray:
    """Every request's own pages, scattered over the pool, whose last page is nobody's."""
    pages = shape.pool_shape[1] // shape.planes - 1
    owned = rng.permutation(pages)[: shape.requests * shape.width]
    return owned.reshape(shape.requests, shape.width).astype(np.int32)


def nan_pool(shape: Shape) -> np.ndarray:
    return np.full(shape.pool_shape, np.nan, np.float32)


def random_pool(shape: Shape, rng, dtype=np.float32) -> np.ndarray:
    """Any finite values at all, and NaN (quiet ones: no arithmetic makes another)."""
    width = np.dtype(dtype).itemsize
    pool = rng.integers(0, 2 ** (8 * width), shape.pool_shape, f"u{width}").view(dtype)
    with np.errstate(invalid="ignore"):
        pool[np.isnan(pool)] = np.nan
    return pool


def plane_index(shape: Shape, page: int, depth: int) -> int:
    """Where the layout puts a logical page at a depth (from 1)."""
    return page * shape.planes + min(depth, shape.planes) - 1


def rows_of(requests: Requests, valid=None) -> RowBatch:
    """A decode row for the last position of each request."""
    n = len(requests.lengths)
    return RowBatch(
        tables_rp=requests.tables,
        positions_r=(requests.lengths - 1).astype(np.int32),
        depths_r=requests.depths,
        valid_r=np.ones(n, bool) if valid is None else np.asarray(valid),
    )


def one_row(table: np.ndarray, position: int, depth: int) -> RowBatch:
    as_row = np.array([position], np.int32), np.array([depth], np.int32), np.array([True])
    return RowBatch(table, *as_row)


def pack(requests: Requests, counts, num_rows: int, tile_rows: int, tiles: int) -> TileBatch:
    """The last counts[n] positions of each request as packed tiles, empty ones behind them."""
    rows = []  # (request, start, count)
    for n, count in enumerate(counts):
        first = requests.lengths[n] - count
        for start in range(first, requests.lengths[n], tile_rows):
            rows.append((n, start, min(tile_rows, requests.lengths[n] - start)))
    empty = tiles - len(rows)
    assert empty >= 0 and sum(counts) <= num_rows
    of, starts, filled = (np.array(x, np.int32) for x in zip(*rows))
    # An empty tile's other fields mean nothing.
    return TileBatch(
        tables_np=np.pad(requests.tables[of], ((0, empty), (0, 0)), constant_values=2**20),
        starts_n=np.pad(starts, (0, empty), constant_values=77),
        counts_n=np.pad(filled, (0, empty)),
        depths_n=np.pad(requests.depths[of], (0, empty), constant_values=9),
        num_rows=num_rows,
        tile_rows=tile_rows,
    )


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def error(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


def relative(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def no_rotation(rows: int, head_dim: int, dtype) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of the angle zero, for every row."""
    return np.ones((rows, head_dim // 2), dtype), np.zeros((rows, head_dim // 2), dtype)


def angles(rows: int, head_dim: int, dtype, rng) -> tuple[np.ndarray, np.ndarray]:
    angle = rng.uniform(0, 2 * np.pi, (rows, head_dim // 2))
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)
