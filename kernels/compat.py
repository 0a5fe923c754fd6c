"""The differences between the supported jax versions, and the one way kernels are called.

jax 0.10.2 takes a `pallas_call` without compiler parameters for a Mosaic kernel, 0.11.2 for a
Triton one, so the parameters are always given. The Mosaic kernels are written for 0.11's Pallas;
their inline MLIR needs the llvm dialect, which jax.extend.mlir leaves out. To lower for CUDA on a
machine without a GPU, 0.11.2 wants a description of the device; 0.10.2 assumes one.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

__all__ = [
    "MOSAIC_CANNOT",
    "WHOLE",
    "arith",
    "atomic_add",
    "barrier",
    "dot",
    "exp2",
    "ir",
    "llvm",
    "load",
    "lower_for_cuda",
    "store",
    "triton_call",
]

_IS_0_11 = jax.__version_info__ >= (0, 11)

# Why no Mosaic kernel runs here, or None.
MOSAIC_CANNOT = None if _IS_0_11 else f"jax {jax.__version__}, not 0.11 or later"

# A whole array, for kernels that compute their own indices.
WHOLE = pl.BlockSpec(memory_space=pl.ANY)

load, store, dot = plgpu.load, plgpu.store, plgpu.dot
atomic_add, barrier = plgpu.atomic_add, plgpu.debug_barrier


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """2 ** x by the hardware's approximation (2 ulp), denormal results as zeros."""
    if interpret:
        return jnp.exp2(x)
    (result,) = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


def triton_call(
    body: Callable[..., None],
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    in_specs: Any,
    out_specs: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    name: str,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """A Pallas kernel on the Triton backend; with `interpret`, in the interpreter on any device."""
    return pl.pallas_call(
        body,
        grid=grid,
        out_shape=out_shape,
        in_specs=in_specs,
        out_specs=out_specs,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
        input_output_aliases=dict(input_output_aliases or {}),
    )


def lower_for_cuda(jitted: Callable[..., Any], *args: Any) -> jax.stages.Lowered:
    """Lowers a jitted function for a Hopper GPU, on any machine.

    It shows that the kernels lower; what ptxas refuses shows only on a GPU.
    """
    with _described_gpu():
        return jitted.trace(*args).lower(lowering_platforms=("cuda",))


def _described_gpu():
    if not _IS_0_11:
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
