"""What lives on the device between steps: one pytree, donated to every program."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from rlt_jax.kernels.paged_kv import PagedKV
from rlt_jax.models.ouro import DTypePolicy, OuroConfig


@dataclasses.dataclass(frozen=True)
class StateShape:
    """num_slots: requests at once. num_pages: logical pages, each of `planes` physical ones.
    table_width: logical pages one request may use. window_rows: prompt tokens whose hidden states
    are kept between loops; 0 in the SHARED layout."""

    num_slots: int
    num_pages: int
    planes: int
    block_size: int
    table_width: int
    window_rows: int = 0


@struct.dataclass
class SlotSampling:
    """How each slot samples. temperature_s, top_p_s: f32; top_k_s: int32, -1 for all;
    seed_s2: uint32, the high and the low word."""

    temperature_s: jax.Array
    top_k_s: jax.Array
    top_p_s: jax.Array
    seed_s2: jax.Array


@struct.dataclass
class SlotExits:
    """When each slot's tokens leave, where the program decides. min_loops_s: int32; threshold_s:
    f32, 1 for never; remaining_s: f32, the probability that the token has not exited; left_s: bool,
    it has."""

    min_loops_s: jax.Array
    threshold_s: jax.Array
    remaining_s: jax.Array
    left_s: jax.Array


@struct.dataclass
class DeviceState:
    """kv: the pool. hidden_sd: each slot's hidden state after its last stage. prompt_hidden_wd:
    those of prompt chunks between two mixed batches; None in the SHARED layout. last_token_s: the
    last sampled token, the next prelude's input. tables_sp: block tables, mirrors of the
    scheduler's."""

    kv: PagedKV
    hidden_sd: jax.Array
    prompt_hidden_wd: jax.Array | None
    last_token_s: jax.Array
    tables_sp: jax.Array
    sampling: SlotSampling
    exits: SlotExits


def abstract_state(config: OuroConfig, policy: DTypePolicy, shape: StateShape) -> DeviceState:
    """The state as jax.ShapeDtypeStruct leaves."""
    spec = jax.ShapeDtypeStruct
    dtype = jnp.dtype(policy.dtype)
    slots = (shape.num_slots,)
    window = (shape.window_rows, config.hidden_size)
    pool = (
        config.num_hidden_layers,
        shape.num_pages * shape.planes,
        2,
        config.num_key_value_heads,
        shape.block_size,
        config.head_dim,
    )
    return DeviceState(
        kv=PagedKV(pool=spec(pool, jnp.dtype(policy.kv_dtype)), planes=shape.planes),
        hidden_sd=spec((*slots, config.hidden_size), dtype),
        prompt_hidden_wd=spec(window, dtype) if shape.window_rows else None,
        last_token_s=spec(slots, jnp.int32),
        tables_sp=spec((*slots, shape.table_width), jnp.int32),
        sampling=SlotSampling(
            temperature_s=spec(slots, jnp.float32),
            top_k_s=spec(slots, jnp.int32),
            top_p_s=spec(slots, jnp.float32),
            seed_s2=spec((*slots, 2), jnp.uint32),
        ),
        exits=SlotExits(
            min_loops_s=spec(slots, jnp.int32),
            threshold_s=spec(slots, jnp.float32),
            remaining_s=spec(slots, jnp.float32),
            left_s=spec(slots, jnp.bool_),
        ),
    )


def init_state(abstract: DeviceState, sharding: jax.sharding.Sharding) -> DeviceState:
    """An all-zero state, allocated directly under `sharding`."""
    return _zeros(abstract, sharding)()


@functools.lru_cache(maxsize=32)
def _zeros(abstract: DeviceState, sharding: jax.sharding.Sharding) -> Callable[[], DeviceState]:
    """Compiled once for each shape: a reset, or another engine, need not."""

    def zeros():
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)

    return jax.jit(zeros, out_shardings=sharding)


def tree_bytes(tree) -> int:
    """Bytes of all leaves (arrays or ShapeDtypeStructs)."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
