"""Which implementation of each kernel runs."""

import dataclasses
import functools
import logging

from rlt_jax.config import KERNELS
from rlt_jax.validation import check_choice, fail

logger = logging.getLogger(__name__)


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

# Whether "auto" takes the Mosaic decode kernel where it can do the model's shapes.
PREFER_MOSAIC_DECODE = False
HOPPER = "9.0"
_GPU_TILE_ROWS = 128
_TRITON_DTYPES = ("bfloat16", "float16", "float32")
_MAX_HEAD_DIM = 256  # more does not fit a block's shared memory


def select(
    requested: str,
    *,
    platform: str,
    compute_capability: str = HOPPER,
    dtype: str,
    kv_dtype: str,
    head_dim: int,
    heads: int,
    kv_heads: int,
    page_size: int,
) -> Kernels:
    """The kernels for ExecutionConfig.kernels = `requested` on devices of this platform;
    compute_capability: of CUDA GPUs.

    What was asked for but cannot do these shapes gives way to the next slower, with a warning:
    Mosaic to Triton, Triton to the reference.
    """
    check_choice("ExecutionConfig.kernels", requested, KERNELS)
    if requested == "mosaic" and platform != "gpu":
        fail("ExecutionConfig.kernels", requested, f"needs a CUDA GPU; this device is a {platform}")
    on_cpu = platform == "cpu"
    if requested == "triton" and not on_cpu and platform != "gpu":
        fail(
            "ExecutionConfig.kernels",
            requested,
            f"needs a CUDA GPU or a CPU, whose interpreter runs it; this device is a {platform}",
        )
    if requested == "reference" or (requested == "auto" and platform != "gpu"):
        return REFERENCE
    reason = _triton_cannot(dtype, kv_dtype, head_dim, page_size)
    if reason:
        _warn_once(f"the reference runs instead of the Triton kernels: {reason}")
        return REFERENCE
    decode = "triton"
    if requested == "mosaic" or (requested == "auto" and PREFER_MOSAIC_DECODE):
        if compute_capability == HOPPER:
            reason = _mosaic_cannot(head_dim, kv_heads, heads, page_size, dtype, kv_dtype)
        else:
            reason = f"compute capability {compute_capability}, not {HOPPER} (Hopper)"
        if reason is None:
            decode = "mosaic"
        else:
            _warn_once(f"the Triton decode kernel runs instead of the Mosaic one: {reason}")
    return Kernels(
        decode=decode,
        prefill="triton",
        update="triton",
        norm="triton",
        interpret=on_cpu,
        tile_rows=REFERENCE.tile_rows if on_cpu else _GPU_TILE_ROWS,
    )


def _triton_cannot(dtype: str, kv_dtype: str, head_dim: int, page_size: int) -> str | None:
    if page_size & (page_size - 1):
        return f"CacheConfig.block_size = {page_size} is no power of two"
    for one in (dtype, kv_dtype):
        if one not in _TRITON_DTYPES:
            return f"rows of {one}, not of {', '.join(_TRITON_DTYPES)}"
    if head_dim > _MAX_HEAD_DIM or head_dim % 2:
        return f"head_dim {head_dim}, not an even number up to {_MAX_HEAD_DIM}"
    return None


def _mosaic_cannot(
    head_dim: int, kv_heads: int, heads: int, page_size: int, dtype: str, kv_dtype: str
) -> str | None:
    try:
        from rlt_jax.kernels.paged_decode import mosaic
    except ImportError as error:
        return f"it cannot be imported ({error})"
    reason = mosaic.unsupported_reason(head_dim, kv_heads, heads, page_size, dtype)
    if reason is None and kv_dtype != dtype:
        reason = f"K/V of {kv_dtype} beside rows of {dtype}"
    return reason


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
