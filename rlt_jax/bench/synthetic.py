"""The model that a benchmark runs: random weights of known sizes, or a checkpoint."""

import dataclasses
import functools
import math
import time

import jax
import jax.numpy as jnp

from rlt_jax.config import DTYPES
from rlt_jax.models.ouro import DTypePolicy, OuroConfig, OuroParams, init_params
from rlt_jax.packaged_model import packaged_folder
from rlt_jax.validation import check_choice, fail

OURO_1_4B = OuroConfig(
    vocab_size=49152,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=128,
    max_position_embeddings=65536,
    total_ut_steps=4,
    rope_theta=1e6,
)
OURO_2_6B = dataclasses.replace(OURO_1_4B, num_hidden_layers=48)
SYNTHETIC = ("ouro-1.4b", "ouro-2.6b", "ouro-tiny")


@dataclasses.dataclass(frozen=True)
class BenchModel:
    """A loaded model. load_seconds: drawing or reading the weights. synthetic, seed: the name and
    the seed of random weights, None for a checkpoint."""

    name: str
    config: OuroConfig
    params: OuroParams
    policy: DTypePolicy
    device: jax.Device
    load_seconds: float
    synthetic: str | None = None
    seed: int | None = None


def synthetic_config(name: str) -> OuroConfig:
    if name not in SYNTHETIC:
        fail("--synthetic", name, "must be one of " + ", ".join(SYNTHETIC))
    if name == "ouro-tiny":
        return OuroConfig.from_json_file(packaged_folder() / "config.json")
    return OURO_1_4B if name == "ouro-1.4b" else OURO_2_6B


def load_model(
    *,
    synthetic: str | None = None,
    model: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    total_ut_steps: int | None = None,
    seed: int = 0,
) -> BenchModel:
    """Random weights of the sizes that `synthetic` names, or the checkpoint `model`; of neither
    ouro-1.4b on a GPU and ouro-tiny on a CPU. The rest as for LLM."""
    from rlt_jax.llm_engine import resolve_device

    if synthetic is not None and model is not None:
        fail("--synthetic", synthetic, f"cannot be used together with --model {model}")
    if dtype is not None:
        check_choice("--dtype", dtype, DTYPES)
    place = resolve_device(device)
    on_cpu = place.platform == "cpu"
    policy = DTypePolicy.on(place.platform, dtype or ("float32" if on_cpu else "bfloat16"))
    sharding = jax.sharding.SingleDeviceSharding(place)
    started = time.perf_counter()
    if model is None:
        synthetic = synthetic or ("ouro-tiny" if on_cpu else "ouro-1.4b")
        config = synthetic_config(synthetic).with_total_ut_steps(total_ut_steps)
        params = init_params(config, jax.random.key(seed), policy, sharding)
        name = f"{synthetic} (random weights)"
    else:
        config, params = _read(model, total_ut_steps, policy, sharding)
        name = model
    jax.block_until_ready(params)
    seconds = time.perf_counter() - started
    drawn_from = seed if model is None else None
    return BenchModel(name, config, params, policy, place, seconds, synthetic, drawn_from)


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_array(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers, drawn in parts: the float32 noise of several GB at once may not fit."""
    size, width = math.prod(shape), shape[-1]
    step = max(1, size // width // 16)

    def draw(i, x):
        rows = jax.random.normal(jax.random.fold_in(key, i), (step, width), jnp.float32)
        return jax.lax.dynamic_update_slice(x, rows.astype(dtype), (i * step, 0))

    parts = -(-size // width // step)
    x = jnp.zeros((size // width, width), dtype)
    return jax.lax.fori_loop(0, parts, draw, x).reshape(shape)


def _read(model, total_ut_steps, policy, sharding) -> tuple[OuroConfig, OuroParams]:
    from rlt_jax.checkpoints_convert.checkpoint import open_checkpoint
    from rlt_jax.checkpoints_convert.load import load_params

    checkpoint = open_checkpoint(model)
    config = checkpoint.config.with_total_ut_steps(total_ut_steps)
    return config, load_params(checkpoint, policy, sharding)
