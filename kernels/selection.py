"""Which implementation of each kernel runs."""

import dataclasses
import functools
import logging

logger = logging.getLogger(__name__)

KERNELS = ("auto", "mosaic", "triton", "reference")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The implementation of each operation, static in every program.

    decode: paged_decode. prefill: paged_prefill. update: K/V writes and finalization.
    norm: residual_norm. interpret: Pallas kernels run in the interpreter (a CPU).
    tile_rows: rows of a prefill tile.
    """

    decode: str = "reference"
    prefill: str = "reference"
    update: str = "reference"
    norm: str = "reference"
    interpret: bool = False
    tile_rows: int = 16


REFERENCE = Kernels()


def select(requested, *, platform, dtype, kv_dtype, head_dim, heads, kv_heads, page_size):
    return REFERENCE
