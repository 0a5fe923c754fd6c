"""Whole device programs lower for a CUDA GPU with its kernels, on a machine without one."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from rlt_jax.bench.synthetic import OURO_1_4B
from rlt_jax.kernels.compat import MOSAIC_CANNOT, lower_for_cuda
from rlt_jax.kernels.selection import select
from rlt_jax.models.ouro import DTypePolicy, abstract_params
from rlt_jax.runtime.device_state import StateShape, abstract_state
from rlt_jax.runtime.programs import Kind, ProgramSpec, build, content_to_restore, input_layout

BUCKET, PAGE = 32, 16
CONFIG = dataclasses.replace(OURO_1_4B, num_hidden_layers=2)
# What attends in a decode, and the kernels beside it.
DECODES = {
    "triton": {"write_and_decode", "residual_norm"},
    "mosaic": {"mosaic", "rotate_and_write", "residual_norm"},
}
PROMPTS = {"rotate_and_write", "paged_prefill", "residual_norm"}


def lowered(kernels: str, kind: Kind, planes: int) -> str:
    window = 4 * BUCKET if planes > 1 else 0
    shape = StateShape(BUCKET, 4096, planes, PAGE, table_width=4096, window_rows=window)
    policy = DTypePolicy.on("gpu", "bfloat16")
    chosen = select(
        kernels,
        platform="gpu",
        dtype=policy.dtype,
        kv_dtype=policy.kv_dtype,
        head_dim=CONFIG.head_dim,
        heads=CONFIG.num_attention_heads,
        kv_heads=CONFIG.num_key_value_heads,
        page_size=PAGE,
    )
    spec = ProgramSpec(CONFIG, policy, shape, chosen)
    state, params = abstract_state(CONFIG, policy, shape), abstract_params(CONFIG, policy)
    packed = jax.ShapeDtypeStruct((input_layout(kind, BUCKET, spec).size,), np.int32)
    program = jax.jit(build(kind, BUCKET, spec), donate_argnums=0)
    content = content_to_restore(kind, spec)
    return lower_for_cuda(program, state, params, packed, *content).as_text()


def kernels_in(text: str) -> set[str]:
    names = set(re.findall(r'@__gpu\$xla\.gpu\.triton.*?name = "(\w+)"', text))
    return names | ({"mosaic"} if "custom_call @mosaic_gpu" in text else set())


LOWERED = [Kind.PREFILL, Kind.RECURRENT, Kind.BOUNDARY_SAMPLE, Kind.TOKEN_GREEDY]


@pytest.mark.parametrize(
    ("kind", "planes"),
    [*((kind, planes) for kind in LOWERED for planes in (4, 1)), (Kind.MIXED, 4)],
)
@pytest.mark.parametrize("kernels", ["triton", "mosaic"])
def test_a_program_lowers_with_its_kernels(kernels, kind, planes):
    if kernels == "mosaic" and MOSAIC_CANNOT:
        pytest.skip(MOSAIC_CANNOT)
    text = lowered(kernels, kind, planes)
    wanted = PROMPTS if kind is Kind.PREFILL and planes > 1 else DECODES[kernels]
    if kind is Kind.MIXED:
        wanted = wanted | PROMPTS
    if kind is Kind.BOUNDARY_SAMPLE and planes > 1:
        wanted = wanted | {"finalize_kv"}
    assert kernels_in(text) == wanted
    assert_pool_stays(text, planes)


@pytest.mark.parametrize("planes", [4, 1])
@pytest.mark.parametrize("kind", [Kind.SAVE, Kind.RESTORE])
def test_a_transfer_lowers_without_kernels(kind, planes):
    text = lowered("triton", kind, planes)
    assert kernels_in(text) == set()
    assert_pool_stays(text, planes)
    # 64 MiB hold so many pages of 2 layers, 16 tokens and all planes; they come last.
    content = f"tensor<2x{256 // planes * planes}x2x16x{PAGE}x128xbf16>"
    signature = re.search(r"@main\((.*?)\) -> \((.*?)\) {", text, re.DOTALL)
    inputs, outputs = signature.groups()
    assert (content in outputs) == (kind is Kind.SAVE)
    assert (content in inputs) == (kind is Kind.RESTORE)


def assert_pool_stays(text: str, planes: int) -> None:
    """The pool goes in first and comes out at the same place."""
    [pool] = re.findall(r"@main\(%arg0: tensor<(.*?)> \{tf.aliasing_output = 0", text)
    assert pool == f"2x{4096 * planes}x2x16x{PAGE}x128xbf16"
