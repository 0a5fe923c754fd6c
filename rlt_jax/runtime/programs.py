"""The device programs: pure functions (state, params, packed input) -> (state, results).

Each is compiled once per bucket. The state is donated and returned; results for the host are
separate outputs. Loop depth is data: one recurrent program serves all depths.
"""

import dataclasses
import enum
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from rlt_jax.engine.types import PREFILL_TILE
from rlt_jax.kernels.paged_attention import TileBatch, finalize_kv
from rlt_jax.models import ouro
from rlt_jax.models.ouro import DTypePolicy, OuroConfig, OuroParams
from rlt_jax.runtime import sampler
from rlt_jax.runtime.device_state import DeviceState, StateShape
from rlt_jax.runtime.step_input import PackedLayout, prefill_layout, row_layout, slot_layout

SLOT_UPDATE_ROWS = 8  # slots set by one call of the set_slots program

Results = dict[str, jax.Array]
Program = Callable[[DeviceState, OuroParams, jax.Array], tuple[DeviceState, Results]]


class Kind(enum.Enum):
    SET_SLOTS = "set_slots"
    PREFILL = "prefill"
    PRELUDE = "prelude"
    RECURRENT = "recurrent"
    RECURRENT_GATED = "recurrent_gated"
    CODA_GREEDY = "coda_greedy"
    CODA_SAMPLE = "coda_sample"


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """All that a program's code depends on, apart from kind and bucket."""

    config: OuroConfig
    policy: DTypePolicy
    shape: StateShape


def input_layout(kind: Kind, bucket: int, shape: StateShape) -> PackedLayout:
    """The packed input of a program. Buckets count tiles (prefill) or rows."""
    if kind is Kind.SET_SLOTS:
        return slot_layout(bucket, shape.table_width)
    if kind is Kind.PREFILL:
        return prefill_layout(bucket, PREFILL_TILE)
    return row_layout(bucket)


def build(kind: Kind, bucket: int, spec: ProgramSpec) -> Program:
    """The program as a traceable function."""
    layout = input_layout(kind, bucket, spec.shape)
    body = {
        Kind.SET_SLOTS: _set_slots,
        Kind.PREFILL: _prefill_by_position if spec.shape.planes == 1 else _prefill_by_loop,
        Kind.PRELUDE: _prelude,
        Kind.RECURRENT: _recurrent,
        Kind.RECURRENT_GATED: _recurrent_gated,
        Kind.CODA_GREEDY: _coda_greedy,
        Kind.CODA_SAMPLE: _coda_sample,
    }[kind]

    def program(state, params, packed):
        return body(spec, state, params, layout.unpack(packed))

    program.__name__ = program.__qualname__ = f"{kind.value}_{bucket}"
    return program


def _set_slots(spec: ProgramSpec, state: DeviceState, params: OuroParams, step: Results):
    slot = step["slot"]

    def put(array, values):
        return array.at[slot].set(values, mode="drop")

    sampling = state.sampling.replace(
        temperature_s=put(state.sampling.temperature_s, step["temperature"]),
        top_k_s=put(state.sampling.top_k_s, step["top_k"]),
        top_p_s=put(state.sampling.top_p_s, step["top_p"]),
        seed_s2=put(state.sampling.seed_s2, step["seed"]),
    )
    tables_sp = put(state.tables_sp, step["table"])
    return state.replace(tables_sp=tables_sp, sampling=sampling), {}


def _loop(spec, params, hidden_nqd, kv, batch):
    return ouro.recurrent(spec.config, spec.policy, params, hidden_nqd, kv, batch)


def _all_loops(spec, params, hidden_nqd, kv, batch: TileBatch):
    """Every loop of the model, one after the other."""

    def run(depth, carry):
        depths_n = jnp.full_like(batch.depths_n, depth)
        return _loop(spec, params, *carry, batch.replace(depths_n=depths_n))

    return lax.fori_loop(1, spec.config.total_ut_steps + 1, run, (hidden_nqd, kv))


def _keep_last_hidden(state: DeviceState, step: Results, hidden_nd, kv) -> DeviceState:
    """Stores the hidden state of each prompt's last token in its slot."""
    slot = jnp.where(step["ends_prompt"] > 0, step["slot"], state.hidden_sd.shape[0])
    return state.replace(kv=kv, hidden_sd=state.hidden_sd.at[slot].set(hidden_nd, mode="drop"))


def _prefill_by_loop(spec: ProgramSpec, state: DeviceState, params: OuroParams, step: Results):
    """LAST_EXITED: all rows of a chunk go through loop 1, then all through loop 2, ..."""
    offsets = jnp.arange(PREFILL_TILE)
    batch = TileBatch(
        tables_np=state.tables_sp.at[step["slot"]].get(mode="clip"),
        positions_nq=step["start"][:, None] + offsets,
        valid_nq=offsets < step["count"][:, None],
        depths_n=jnp.ones_like(step["slot"]),
    )
    hidden_nqd = ouro.prelude(params, step["tokens"])
    hidden_nqd, kv = _all_loops(spec, params, hidden_nqd, state.kv, batch)
    last = jnp.maximum(step["count"] - 1, 0)[:, None, None]
    hidden_nd = jnp.take_along_axis(hidden_nqd, last, axis=1)[:, 0]
    return _keep_last_hidden(state, step, hidden_nd, kv), {}


def _prefill_by_position(spec: ProgramSpec, state: DeviceState, params: OuroParams, step: Results):
    """SHARED: position t goes through every loop before position t + 1 starts."""
    tables_np = state.tables_sp.at[step["slot"]].get(mode="clip")

    def run(offset, carry):
        kept_nd, kv = carry
        valid_n = offset < step["count"]
        batch = TileBatch(
            tables_np=tables_np,
            positions_nq=(step["start"] + offset)[:, None],
            valid_nq=valid_n[:, None],
            depths_n=jnp.ones_like(step["slot"]),
        )
        tokens_n = lax.dynamic_index_in_dim(step["tokens"], offset, axis=1, keepdims=False)
        hidden_nqd = ouro.prelude(params, tokens_n[:, None])
        hidden_nqd, kv = _all_loops(spec, params, hidden_nqd, kv, batch)
        return jnp.where(valid_n[:, None], hidden_nqd[:, 0], kept_nd), kv

    start_nd = jnp.zeros((step["slot"].shape[0], spec.config.hidden_size), state.hidden_sd.dtype)
    hidden_nd, kv = lax.fori_loop(0, step["count"].max(), run, (start_nd, state.kv))
    return _keep_last_hidden(state, step, hidden_nd, kv), {}


def _prelude(spec: ProgramSpec, state: DeviceState, params: OuroParams, step: Results):
    slot = step["slot"]
    hidden_rd = ouro.prelude(params, state.last_token_s.at[slot].get(mode="clip"))
    return state.replace(hidden_sd=state.hidden_sd.at[slot].set(hidden_rd, mode="drop")), {}


def _recurrent(spec: ProgramSpec, state: DeviceState, params: OuroParams, step: Results):
    slot = step["slot"]
    batch = TileBatch(
        tables_np=state.tables_sp.at[slot].get(mode="clip"),
        positions_nq=step["position"][:, None],
        valid_nq=(slot < spec.shape.num_slots)[:, None],
        depths_n=step["depth"],
    )
    hidden_rqd = state.hidden_sd.at[slot].get(mode="clip")[:, None]
    hidden_rqd, kv = _loop(spec, params, hidden_rqd, state.kv, batch)
    hidden_sd = state.hidden_sd.at[slot].set(hidden_rqd[:, 0], mode="drop")
    return state.replace(kv=kv, hidden_sd=hidden_sd), {}


def _recurrent_gated(spec: ProgramSpec, state: DeviceState, params: OuroParams, step: Results):
    state, _ = _recurrent(spec, state, params, step)
    hidden_rd = state.hidden_sd.at[step["slot"]].get(mode="clip")
    return state, {"exit_probability": ouro.exit_probability(params, hidden_rd)}


def _logits(spec: ProgramSpec, state: DeviceState, params: OuroParams, step: Results):
    """Finalizes the rows' K/V and returns (kv, float32 logits)."""
    slot = step["slot"]
    kv = finalize_kv(
        state.kv,
        state.tables_sp.at[slot].get(mode="clip"),
        step["position"],
        step["depth"],
        slot < spec.shape.num_slots,
    )
    return kv, ouro.coda(spec.policy, params, state.hidden_sd.at[slot].get(mode="clip"))


def _emit(state: DeviceState, step: Results, kv, logits_rv, token_r):
    last_token_s = state.last_token_s.at[step["slot"]].set(token_r, mode="drop")
    results = {"token": token_r, "logprob": sampler.raw_logprob(logits_rv, token_r)}
    return state.replace(kv=kv, last_token_s=last_token_s), results


def _coda_greedy(spec: ProgramSpec, state: DeviceState, params: OuroParams, step: Results):
    kv, logits_rv = _logits(spec, state, params, step)
    return _emit(state, step, kv, logits_rv, sampler.greedy(logits_rv))


def _coda_sample(spec: ProgramSpec, state: DeviceState, params: OuroParams, step: Results):
    kv, logits_rv = _logits(spec, state, params, step)
    sampling = jax.tree.map(lambda leaf: leaf.at[step["slot"]].get(mode="clip"), state.sampling)
    token_r = sampler.sample(
        logits_rv,
        sampling.temperature_s,
        sampling.top_k_s,
        sampling.top_p_s,
        sampling.seed_s2,
        step["output_index"],
    )
    return _emit(state, step, kv, logits_rv, token_r)
