"""The whole model on a GPU: against PyTorch, against the CPU, and against itself."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.train_tiny.data import examination
from examples.train_tiny.evaluate import measure
from rlt_jax import LLM, ExecutionConfig, SamplingParams, SchedulerConfig
from rlt_jax.assembly import choose_kernels
from rlt_jax.config import CacheConfig
from rlt_jax.kernels.paged_kv import PagedKV, RowBatch, TileBatch
from rlt_jax.models import ouro
from rlt_jax.models.ouro import DTypePolicy, OuroConfig
from tests import support
from tests.reference.checkpoints import random_ouro

pytestmark = pytest.mark.gpu

PAGE = 16


def error(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def torch_logits(raw, tensors, tokens, dtype) -> list[np.ndarray]:
    """Each loop's logits [t, v] by the PyTorch reference on the GPU."""
    torch = pytest.importorskip("torch")
    from tests.reference.ouro_torch import TorchOuro

    with torch.device("cuda"), torch.no_grad():
        torch.backends.cuda.matmul.allow_tf32 = False
        model = TorchOuro(raw, tensors, getattr(torch, dtype))
        model.weights = {name: weight.cuda() for name, weight in model.weights.items()}
        return [loop.logits.float().cpu().numpy() for loop in model.dense_forward(tokens)]


def engine_logits(
    raw, tensors, tokens, dtype, prompt: int, requested: str = "auto"
) -> list[np.ndarray]:
    """The same by our stages: `prompt` tokens prefilled in two chunks, the rest decoded."""
    config, policy = OuroConfig.from_dict(raw), DTypePolicy(dtype)
    params = support.fuse(config, tensors, dtype)
    cache = CacheConfig(block_size=PAGE)
    kernels = choose_kernels(requested, config, policy, cache, jax.devices()[0])
    recurrent = jax.jit(ouro.recurrent, static_argnums=(0, 1, 2), donate_argnums=5)
    width, planes = -(-len(tokens) // PAGE), config.total_ut_steps
    layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
    pool = (layers, 3 * width * planes, 2, kv_heads, PAGE, config.head_dim)
    kv = PagedKV(jnp.full(pool, jnp.nan, dtype), planes)
    table = np.random.default_rng(0).permutation(3 * width)[:width].astype(np.int32)
    logits = [[] for _ in range(planes)]

    def run(hidden, batch_at):
        nonlocal kv
        for depth in range(1, planes + 1):
            hidden, kv = recurrent(config, policy, kernels, params, hidden, kv, batch_at(depth))
            logits[depth - 1].append(np.asarray(ouro.coda(policy, params, hidden), np.float32))

    def prefill(start, end):
        count, tile = end - start, kernels.tile_rows
        starts = np.arange(start, end, tile, dtype=np.int32)
        n = len(starts)

        def batch_at(depth):
            return TileBatch(
                tables_np=np.tile(table, (n, 1)),
                starts_n=starts,
                counts_n=np.minimum(tile, end - starts).astype(np.int32),
                depths_n=np.full(n, depth, np.int32),
                num_rows=count,
                tile_rows=tile,
            )

        run(ouro.prelude(params, jnp.asarray(tokens[start:end])), batch_at)

    def decode(position):
        def batch_at(depth):
            return RowBatch(
                table[None],
                np.array([position], np.int32),
                np.array([depth], np.int32),
                np.array([True]),
            )

        run(ouro.prelude(params, jnp.asarray(tokens[position : position + 1])), batch_at)

    prefill(0, prompt // 2)
    prefill(prompt // 2, prompt)
    for position in range(prompt, len(tokens)):
        decode(position)
    return [np.concatenate(loop) for loop in logits]


@pytest.mark.torch
@pytest.mark.parametrize(
    "shape",
    [
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128},
        {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 96},
    ],
    ids=["mha128", "gqa64", "mha96"],
)
def test_whole_model_equals_pytorch(shape):
    """bf16 is as near to PyTorch in f32 as PyTorch's own bf16 is; f32 is within 1e-4."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 3}
    raw, tensors = random_ouro({**sizes, "max_position_embeddings": 2048, **shape}, seed=1)
    tensors = {name: np.asarray(jnp.asarray(x, jnp.bfloat16)) for name, x in tensors.items()}
    tokens = np.random.default_rng(1).integers(0, raw["vocab_size"], 560).astype(np.int32)
    exact = torch_logits(raw, tensors, tokens, "float32")
    theirs = torch_logits(raw, tensors, tokens, "bfloat16")
    ours = engine_logits(raw, tensors, tokens, "bfloat16", prompt=530)
    mosaic = engine_logits(raw, tensors, tokens, "bfloat16", prompt=530, requested="mosaic")
    in_f32 = engine_logits(raw, tensors, tokens, "float32", prompt=530)
    for depth in range(4):
        row = [error(x[depth], exact[depth]) for x in (ours, theirs, in_f32, mosaic)]
        ours_, theirs_, f32_, mosaic_ = (f"{e:.2e}" for e in row)
        print(
            f"depth {depth + 1}: bf16 {ours_}, with Mosaic {mosaic_}, PyTorch bf16 {theirs_}, "
            f"f32 {f32_}"
        )
        assert max(row[0], row[3]) <= 1.1 * row[1]
        assert row[2] <= 1e-4


CPU_ANSWERS = """
import json
import os
from examples.train_tiny.data import examination
from examples.train_tiny.evaluate import measure
from rlt_jax import LLM, SchedulerConfig
papers = examination("test", 50)
with LLM("ouro-tiny", scheduler_config=SchedulerConfig(max_num_seqs=64)) as llm:
    print("RESULT", json.dumps(measure(llm, papers)))
"""


@pytest.fixture(scope="module")
def tiny():
    execution = ExecutionConfig(min_row_bucket=64, min_prefill_bucket=512)
    scheduling = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=1024)
    with LLM("ouro-tiny", scheduler_config=scheduling, execution_config=execution) as llm:
        yield llm


def test_ouro_tiny_answers_as_on_the_cpu(tiny):
    """Exact match on the held-out set within half a point, task by task and in the mean."""
    on_gpu = measure(tiny, examination("test", 50))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", CPU_ANSWERS], env=environment, capture_output=True, text=True
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    on_cpu = json.loads(line.removeprefix("RESULT "))
    print("GPU", on_gpu["mean"], on_gpu["exact_match"], "CPU", on_cpu["mean"])
    assert abs(on_gpu["mean"] - on_cpu["mean"]) <= 0.5
    for task, score in on_cpu["exact_match"].items():
        assert abs(on_gpu["exact_match"][task] - score) <= 2  # one of a task's 50 problems is 2


@pytest.mark.parametrize("threshold", [1.0, 0.7])
def test_ouro_tiny_repeats_itself_to_the_bit(tiny, threshold):
    prompts = [p for paper in examination("test", 20).values() for p in paper.prompts()]
    params = SamplingParams(max_tokens=16, exit_threshold=threshold, logprobs=0)

    def answers():
        return [
            (o.token_ids, o.exit_depths, np.array(o.logprobs).tobytes())
            for o in tiny.generate(prompts, params)
        ]

    assert answers() == answers()
