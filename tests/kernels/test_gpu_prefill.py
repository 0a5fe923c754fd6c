"""Paged prefill on a GPU against the reference in float32, on inputs drawn anew each time."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rlt_jax.kernels.paged_kv import PagedKV, TileBatch
from rlt_jax.kernels.paged_prefill import paged_prefill
from rlt_jax.kernels.selection import REFERENCE, Kernels, select
from tests.kernels.support import bits, pack, relative

pytestmark = pytest.mark.gpu

SEED = int.from_bytes(os.urandom(4), "little")
TOLERANCE = {"bfloat16": 5e-3, "float32": 1e-5}
# (history, rows, depth): ends of tiles, of key blocks and of pages, and both sides of each.
CHUNKS = [(0, 1, 1), (0, 63, 4), (0, 64, 2), (0, 65, 3), (1, 1, 1), (63, 2, 4), (127, 130, 2)]
CHUNKS += [(128, 128, 3), (129, 127, 1), (700, 17, 2), (1023, 64, 4), (500, 513, 1), (2047, 1, 3)]
ROWS = 1280

prefill = jax.jit(paged_prefill, static_argnames=("kernels", "precision"))


@dataclasses.dataclass(frozen=True)
class Model:
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    layers: int = 2
    planes: int = 4

    def __str__(self):
        return (
            f"{self.heads}over{self.kv_heads}x{self.head_dim}"
            f"_page{self.page_size}_planes{self.planes}_{self.dtype}"
        )

    @property
    def kernels(self) -> Kernels:
        names = ("dtype", "head_dim", "heads", "kv_heads", "page_size")
        fields = {name: getattr(self, name) for name in names}
        return select("triton", platform="gpu", kv_dtype=self.dtype, **fields)

    def page_elements(self) -> int:
        """Of one physical page at one layer."""
        return 2 * self.kv_heads * self.page_size * self.head_dim


MODELS = [
    Model(),
    Model(planes=1),
    Model(kv_heads=4, page_size=32),
    Model(head_dim=96, page_size=64),
    Model(kv_heads=4, head_dim=64, page_size=8),
    Model(page_size=128, kv_heads=8),
    Model(dtype="float32"),
    Model(dtype="float32", kv_heads=4, head_dim=96, page_size=32),
    Model(dtype="float32", head_dim=64, page_size=64),
    Model(heads=4, kv_heads=2, head_dim=16, page_size=4, dtype="float32"),
]
each_model = pytest.mark.parametrize("model", MODELS, ids=str)


@dataclasses.dataclass
class Chunks:
    """Chunks of several requests; all of the pool that they do not own is NaN."""

    model: Model
    lengths: np.ndarray
    counts: np.ndarray
    depths: np.ndarray
    tables: np.ndarray
    kv: PagedKV
    q: jax.Array  # of all rows, packed
    layer: int

    def batch(self, counts=None, rows=ROWS, tile_rows=None) -> TileBatch:
        tile_rows = tile_rows or self.model.kernels.tile_rows
        tiles = rows // tile_rows + len(self.lengths)
        return pack(self, self.counts if counts is None else counts, rows, tile_rows, tiles)

    def run(self, batch: TileBatch, q=None) -> jax.Array:
        """The output's rows that are no padding; all of it must be finite."""
        q = self.padded(batch.num_rows) if q is None else q
        kernels = dataclasses.replace(self.model.kernels, tile_rows=batch.tile_rows)
        out = prefill(q, self.kv, jnp.int32(self.layer), batch, kernels=kernels)
        assert out.shape == q.shape and out.dtype == q.dtype
        assert bool(jnp.isfinite(out).all())
        return out[: int(batch.counts_n.sum())]

    def padded(self, rows: int) -> jax.Array:
        return jnp.pad(self.q, ((0, rows - self.q.shape[0]), (0, 0), (0, 0)))

    def exact(self) -> jax.Array:
        batch = self.batch()
        q = self.padded(batch.num_rows).astype(jnp.float32)
        kv = PagedKV(self.kv.pool.astype(jnp.float32), self.kv.planes)
        out = prefill(
            q, kv, jnp.int32(self.layer), batch, kernels=REFERENCE, precision=lax.Precision.HIGHEST
        )
        return out[: self.q.shape[0]]


def draw(model: Model, chunks=CHUNKS, pages: int | None = None, seed: int = 0) -> Chunks:
    """Random q, K and V. With `pages` physical pages, the last ones of the last layer are used."""
    history, counts, depths = (np.array(x, np.int32) for x in zip(*chunks))
    lengths = history + counts
    width = -(-int(lengths.max()) // model.page_size)
    rng = np.random.default_rng([SEED, seed])
    owned = len(chunks) * width
    logical = (pages or (owned + 3) * model.planes) // model.planes
    assert logical >= owned
    tables = logical - 1 - rng.permutation(owned).reshape(len(chunks), width)
    keys = jax.random.split(jax.random.key(SEED + seed), len(chunks) + 1)
    shape = (model.layers, logical * model.planes, 2, model.kv_heads, model.page_size)
    pool = jax.jit(lambda: jnp.full((*shape, model.head_dim), jnp.nan, model.dtype))()
    layer = model.layers - 1
    for n, length in enumerate(lengths):
        at = np.arange(length)
        plane = min(depths[n], model.planes) - 1
        places = tables[n, at // model.page_size] * model.planes + plane, at % model.page_size
        pool = _fill(pool, keys[n], layer, *places)
    q_shape = (int(counts.sum()), model.heads, model.head_dim)
    q = jax.random.normal(keys[-1], q_shape, model.dtype)
    kv = PagedKV(pool, model.planes)
    return Chunks(model, lengths, counts, depths, tables.astype(np.int32), kv, q, layer)


@jax.jit(donate_argnums=0)
def _fill(pool, key, layer, pages_t, offsets_t):
    kv_t2kx = jax.random.normal(key, (len(pages_t), 2, pool.shape[3], pool.shape[5]), pool.dtype)
    # Peaked weights, as trained models have.
    kv_t2kx = kv_t2kx.at[:, 0].multiply(2)
    return pool.at[layer, pages_t, :, :, offsets_t].set(kv_t2kx, unique_indices=True)


@each_model
def test_it_is_as_exact_as_its_dtype_allows(model):
    """Ragged chunks with history, mixed depths, empty tiles behind them, NaN all around."""
    chunks = draw(model)
    wanted = chunks.exact()
    for tile_rows in (64, 128):
        out = chunks.run(chunks.batch(tile_rows=tile_rows))
        assert relative(out, wanted) <= TOLERANCE[model.dtype], SEED
        # No single row hides behind the others.
        worst = jnp.linalg.norm((out.astype(jnp.float32) - wanted).reshape(len(out), -1), axis=1)
        worst = worst / jnp.linalg.norm(wanted.reshape(len(out), -1), axis=1)
        assert float(worst.max()) <= 4 * TOLERANCE[model.dtype], (SEED, int(worst.argmax()))


@pytest.mark.parametrize(
    "model, pages",
    [
        # 2^32 bytes: the last size with offsets of 32 bits.
        (Model(layers=16), 2048),
        # 2.5e9 elements.
        (Model(layers=24), 1600),
        (Model(layers=24, kv_heads=4, page_size=32, planes=1), 3300),
        # 4.8 GB, 1.2e9 elements.
        (Model(layers=12, dtype="float32"), 1536),
    ],
    ids=str,
)
def test_large_pools(model, pages):
    elements = model.layers * pages * model.page_elements()
    assert elements * jnp.dtype(model.dtype).itemsize >= 2**32
    chunks = draw(model, [(0, 200, 4), (300, 300, 4), (77, 130, 1)], pages)
    assert chunks.kv.pool.size > 0.99 * elements
    out = chunks.run(chunks.batch())
    assert relative(out, chunks.exact()) <= TOLERANCE[model.dtype], SEED


@pytest.mark.parametrize("model", [MODELS[0], MODELS[2], MODELS[6]], ids=str)
def test_a_row_has_the_same_bits_wherever_it_is(model):
    """Alone, in a crowd, at another offset of the packing and of its tile, in another bucket."""
    chunks = draw(model)
    whole = bits(chunks.run(chunks.batch()))
    first_rows = np.cumsum(chunks.counts) - chunks.counts
    for n in (3, 6, 8, 11, 12):
        mine = slice(first_rows[n], first_rows[n] + chunks.counts[n])
        only = np.where(np.arange(len(chunks.counts)) == n, chunks.counts, 0)
        for rows in (ROWS, 1024):
            q = jnp.roll(chunks.padded(ROWS), -first_rows[n], axis=0)[:rows]
            alone = chunks.run(chunks.batch(only, rows), q)
            assert np.array_equal(bits(alone), whole[mine]), (SEED, n, rows)
        # The chunk without its first rows: the tiles begin elsewhere.
        for skipped in (1, 7, 33):
            if skipped < chunks.counts[n]:
                q = jnp.roll(chunks.padded(ROWS), -first_rows[n] - skipped, axis=0)
                rest = chunks.run(chunks.batch(np.maximum(only - skipped, 0)), q)
                assert np.array_equal(bits(rest), whole[mine][skipped:]), (SEED, n, skipped)


def test_two_runs_have_the_same_bits():
    chunks = draw(Model())
    assert np.array_equal(bits(chunks.run(chunks.batch())), bits(chunks.run(chunks.batch())))


def test_temporaries_do_not_depend_on_the_pool():
    def temporaries(pages: int) -> int:
        model = Model()

        def ints(*shape):
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        def rows(*shape):
            return jax.ShapeDtypeStruct(shape, model.dtype)

        kv = PagedKV(rows(2, pages, 2, 16, 16, 128), 4)
        batch = TileBatch(ints(40, 64), ints(40), ints(40), ints(40), 2048, 64)
        lowered = jax.jit(paged_prefill, static_argnames="kernels", donate_argnums=0).lower(
            rows(2048, 16, 128), kv, ints(), batch, kernels=model.kernels
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small = temporaries(64)
    assert small == temporaries(256)
    assert small < 2048 * 16 * 128 * 2  # the output takes q's place
