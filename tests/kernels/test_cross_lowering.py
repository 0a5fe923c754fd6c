"""Every Triton kernel lowers for a CUDA GPU at real shapes, on a machine without one.

What Pallas cannot express for Triton is refused here; what ptxas refuses, on a GPU only.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from rlt_jax.kernels.compat import lower_for_cuda
from rlt_jax.kernels.kv_update import finalize_kv, rotate_and_write
from rlt_jax.kernels.paged_decode import paged_decode, write_and_decode
from rlt_jax.kernels.paged_kv import PagedKV, Places, RowBatch, TileBatch
from rlt_jax.kernels.paged_prefill import paged_prefill
from rlt_jax.kernels.residual_norm import residual_norm
from rlt_jax.kernels.selection import select

LAYERS, PLANES, TABLE, PROMPT_ROWS = 24, 4, 4096, 2048
CUSTOM_CALL = "__gpu$xla.gpu.triton"


@dataclasses.dataclass(frozen=True)
class Model:
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    pages: int = 40_000  # 240 GB of K/V: offsets of 64 bits

    def __str__(self):
        return (
            f"{self.heads}over{self.kv_heads}x{self.head_dim}_page{self.page_size}_{self.dtype}"
            f"_{self.pages}pages"
        )

    @property
    def kernels(self):
        fields = dataclasses.asdict(self)
        del fields["pages"]
        return select("triton", platform="gpu", kv_dtype=self.dtype, **fields)

    @property
    def kv(self) -> PagedKV:
        shape = (LAYERS, self.pages, 2, self.kv_heads, self.page_size, self.head_dim)
        return PagedKV(jax.ShapeDtypeStruct(shape, self.dtype), PLANES)

    def rows(self, *shape):
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def qkv(self, rows: int):
        """A fused projection, and cos and sin of its rows."""
        half = self.head_dim // 2
        channels = self.heads + 2 * self.kv_heads
        return (
            self.rows(rows, channels, self.head_dim),
            self.rows(rows, half),
            self.rows(rows, half),
        )


MODELS = [
    Model(),
    Model(pages=96),  # offsets of 32 bits
    Model(kv_heads=4, page_size=32),
    Model(dtype="float32", page_size=64),
    Model(kv_heads=4, head_dim=96, page_size=64),
    Model(head_dim=96, dtype="float32"),
    Model(head_dim=64, page_size=32, kv_heads=4, dtype="float32"),
    Model(head_dim=64, page_size=64),
]
each_model = pytest.mark.parametrize("model", MODELS, ids=str)
# Both numbers of rows for the first, and one by turns for the others.
few_or_many = pytest.mark.parametrize(
    "model, rows",
    [(MODELS[0], 8), *((model, (128, 8)[i % 2]) for i, model in enumerate(MODELS))],
    ids=str,
)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def bools(*shape):
    return jax.ShapeDtypeStruct(shape, bool)


def row_batch(rows: int) -> RowBatch:
    return RowBatch(ints(rows, TABLE), ints(rows), ints(rows), bools(rows))


def lowers(f, model: Model, *args, calls: int) -> str:
    """The lowered text, with that many kernels in it."""
    jitted = jax.jit(functools.partial(f, kernels=model.kernels))
    text = lower_for_cuda(jitted, *args).as_text()
    assert text.count(CUSTOM_CALL) == calls
    return text


@each_model
def test_paged_prefill(model):
    tile_rows = model.kernels.tile_rows
    n = PROMPT_ROWS // tile_rows + 32
    batch = TileBatch(ints(n, TABLE), ints(n), ints(n), ints(n), PROMPT_ROWS, tile_rows)
    q = model.rows(PROMPT_ROWS, model.heads, model.head_dim)
    lowers(paged_prefill, model, q, model.kv, ints(), batch, calls=1)


@few_or_many
def test_paged_decode(model, rows):
    q = model.rows(rows, model.heads, model.head_dim)
    lowers(paged_decode, model, q, model.kv, ints(), row_batch(rows), calls=1)


@few_or_many
def test_write_and_decode(model, rows):
    args = (*model.qkv(rows), model.kv, ints(), row_batch(rows))
    text = lowers(write_and_decode, model, *args, calls=1)
    assert "output_operand_aliases" in text


@few_or_many
@pytest.mark.parametrize("prompt", [False, True], ids=["decode", "prompt"])
def test_rotate_and_write(model, rows, prompt):
    rows = PROMPT_ROWS if prompt else rows
    places = Places(ints(rows), ints(rows), bools(rows))
    args = (*model.qkv(rows), model.kv, ints(), places)
    assert "output_operand_aliases" in lowers(rotate_and_write, model, *args, calls=1)


@few_or_many
def test_finalize_kv(model, rows):
    args = model.kv, ints(rows, TABLE), ints(rows), ints(rows), bools(rows)
    assert "output_operand_aliases" in lowers(finalize_kv, model, *args, calls=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", [2048, 1536])
@pytest.mark.parametrize("rows", [8, 128, PROMPT_ROWS])
def test_residual_norm(dtype, width, rows):
    model = Model(dtype=dtype)

    def seam(hidden, branch, weights, kernels):
        return residual_norm(hidden, branch, (weights, 1), (weights, 2), 1e-6, kernels)

    args = model.rows(rows, width), model.rows(rows, width), model.rows(4, width)
    lowers(seam, model, *args, calls=1)
