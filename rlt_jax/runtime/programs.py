"""The device programs: pure functions (state, params, packed input) -> (state, packed results).

Each is compiled once per bucket. The state is donated and returned; results for the host are an
output of their own. Loop depth is data: one recurrent program serves all depths.
"""

import dataclasses
import enum
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from rlt_jax.engine.types import SHARED_PREFILL_TOKENS
from rlt_jax.kernels.kv_update import finalize_kv
from rlt_jax.kernels.paged_kv import MixedBatch, PagedKV, RowBatch, TileBatch
from rlt_jax.kernels.selection import REFERENCE, Kernels
from rlt_jax.models import ouro
from rlt_jax.models.ouro import DTypePolicy, OuroConfig, OuroParams
from rlt_jax.runtime import sampler, transfers
from rlt_jax.runtime.device_state import DeviceState, StateShape, abstract_state
from rlt_jax.runtime.exits import HOST_DECIDES, Exits, decide_exits, has_left
from rlt_jax.runtime.packed import (
    PackedLayout,
    mixed_layout,
    prompt_layout,
    result_layout,
    row_layout,
    shared_prompt_layout,
    slot_layout,
    transfer_layout,
)
from rlt_jax.runtime.transfers import SlotContent

SLOT_UPDATE_ROWS = 8  # slots set by one call of the set_slots program

Results = dict[str, jax.Array]
# (state, params, packed input[, content to restore]) -> (state, packed results, or saved content)
Program = Callable[..., tuple[DeviceState, jax.Array | SlotContent]]


class Kind(enum.Enum):
    """One program each; those that sample come in a greedy form, which sorts and draws nothing."""

    SET_SLOTS = "set_slots"
    PREFILL = "prefill"
    RECURRENT = "recurrent"
    MIXED = "mixed"
    CODA_GREEDY = "coda_greedy"
    CODA_SAMPLE = "coda_sample"
    BOUNDARY_GREEDY = "boundary_greedy"
    BOUNDARY_SAMPLE = "boundary_sample"
    TOKEN_GREEDY = "token_greedy"
    TOKEN_SAMPLE = "token_sample"
    TOKENS_2_GREEDY = "tokens_2_greedy"
    TOKENS_4_GREEDY = "tokens_4_greedy"
    SAVE = "save"
    RESTORE = "restore"

    @property
    def samples(self) -> bool:
        """Its rows get tokens, whichever way they are chosen."""
        return self.greedy or self.value.endswith("_sample")

    @property
    def greedy(self) -> bool:
        return self.value.endswith("_greedy")


# How many tokens the programs of more than one run.
SEVERAL_TOKENS = {Kind.TOKENS_2_GREEDY: 2, Kind.TOKENS_4_GREEDY: 4}
# They end with the signal of a loop; they take the mean over all loops, where it is asked for.
_ONE_LOOP = {Kind.RECURRENT, Kind.MIXED, Kind.BOUNDARY_GREEDY, Kind.BOUNDARY_SAMPLE}
_ALL_LOOPS = {Kind.PREFILL, Kind.TOKEN_GREEDY, Kind.TOKEN_SAMPLE, *SEVERAL_TOKENS}


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """All that a program's code depends on, apart from kind and bucket."""

    config: OuroConfig
    policy: DTypePolicy
    shape: StateShape
    kernels: Kernels = REFERENCE
    exits: Exits = HOST_DECIDES

    def of(self, kind: Kind) -> "ProgramSpec":
        """The same with what this kind hangs on, and defaults for the rest: what two engines have
        in common they share."""
        exits = HOST_DECIDES
        if kind in _ONE_LOOP:
            exits = self.exits
        elif kind in _ALL_LOOPS:
            exits = Exits(weighted=self.exits.weighted)
        return dataclasses.replace(self, exits=exits)


def prompt_tiles(bucket: int, spec: ProgramSpec, chunks_per_slot: int = 1) -> int:
    """Tiles that chunks of `bucket` prompt tokens in all can have."""
    chunks = min(bucket, spec.shape.num_slots * chunks_per_slot)
    return -(-bucket // spec.kernels.tile_rows) + chunks


def mixed_rows(spec: ProgramSpec) -> int:
    """Decode rows that a mixed batch is padded to, always: it has no buckets of them."""
    return 1 << (spec.shape.num_slots - 1).bit_length()


def transfer_pages(spec: ProgramSpec) -> int:
    """Logical pages that a SAVE or a RESTORE moves, at most."""
    return transfers.pages_at_once(abstract_state(spec.config, spec.policy, spec.shape))


def content_to_restore(kind: Kind, spec: ProgramSpec) -> tuple[SlotContent, ...]:
    """What a program takes beside its packed input, as jax.ShapeDtypeStruct leaves."""
    if kind is not Kind.RESTORE:
        return ()
    return (transfers.abstract_content(abstract_state(spec.config, spec.policy, spec.shape)),)


def input_layout(kind: Kind, bucket: int, spec: ProgramSpec) -> PackedLayout:
    """The packed input of a program. Buckets count prompt tokens (in a mixed batch or a prefill of
    LAST_EXITED), requests (in a prefill of SHARED) or rows."""
    if kind is Kind.SET_SLOTS:
        return slot_layout(bucket, spec.shape.table_width)
    if kind is Kind.MIXED:
        # Of one request, at most one chunk at each depth.
        tiles = prompt_tiles(bucket, spec, chunks_per_slot=spec.config.total_ut_steps)
        return mixed_layout(mixed_rows(spec), bucket, tiles)
    if kind in (Kind.SAVE, Kind.RESTORE):
        return transfer_layout()
    if kind is not Kind.PREFILL:
        return row_layout(bucket)
    if spec.shape.planes == 1:
        return shared_prompt_layout(bucket, SHARED_PREFILL_TOKENS)
    return prompt_layout(bucket, prompt_tiles(bucket, spec))


def output_layout(kind: Kind, bucket: int, spec: ProgramSpec) -> PackedLayout:
    """The packed results of a program; those of SAVE are a SlotContent."""
    rows = mixed_rows(spec) if kind is Kind.MIXED else bucket
    signal = "leaves" if spec.exits.decides else "exit_probability"
    return result_layout(
        rows,
        tokens=SEVERAL_TOKENS.get(kind, 1) if kind.samples else 0,
        signal=signal if kind in _ONE_LOOP else None,
    )


def build(kind: Kind, bucket: int, spec: ProgramSpec) -> Program:
    """The program as a traceable function."""
    inputs, outputs = input_layout(kind, bucket, spec), output_layout(kind, bucket, spec)
    run = _Programs(spec, bucket)
    body = {
        Kind.SET_SLOTS: run.set_slots,
        Kind.PREFILL: run.prefill_shared if spec.shape.planes == 1 else run.prefill,
        Kind.RECURRENT: run.recurrent,
        Kind.MIXED: run.mixed,
        Kind.CODA_GREEDY: run.coda,
        Kind.CODA_SAMPLE: run.coda,
        Kind.BOUNDARY_GREEDY: run.boundary,
        Kind.BOUNDARY_SAMPLE: run.boundary,
        Kind.TOKEN_GREEDY: run.tokens,
        Kind.TOKEN_SAMPLE: run.tokens,
        Kind.TOKENS_2_GREEDY: run.tokens,
        Kind.TOKENS_4_GREEDY: run.tokens,
        Kind.SAVE: run.save,
        Kind.RESTORE: run.restore,
    }[kind]
    options = {}
    if kind.samples:
        options["greedy"] = kind.greedy
    if kind in SEVERAL_TOKENS:
        options["count"] = SEVERAL_TOKENS[kind]

    def program(state, params, packed, *content):
        state, results = body(state, params, inputs.unpack(packed), *content, **options)
        if kind is not Kind.SAVE:
            results = outputs.pack(results or {"done": packed[:1]})
        return state, results

    program.__name__ = program.__qualname__ = f"{kind.value}_{bucket}"
    return program


@dataclasses.dataclass(frozen=True)
class _Programs:
    """The bodies; `step` holds the unpacked input."""

    spec: ProgramSpec
    bucket: int

    def set_slots(self, state: DeviceState, params: OuroParams, step: Results):
        slot = step["slot"]

        def put(array, values):
            return array.at[slot].set(values, mode="drop")

        sampling = state.sampling.replace(
            temperature_s=put(state.sampling.temperature_s, step["temperature"]),
            top_k_s=put(state.sampling.top_k_s, step["top_k"]),
            top_p_s=put(state.sampling.top_p_s, step["top_p"]),
            seed_s2=put(state.sampling.seed_s2, step["seed"]),
        )
        exits = state.exits.replace(
            min_loops_s=put(state.exits.min_loops_s, step["min_loops"]),
            threshold_s=put(state.exits.threshold_s, step["exit_threshold"]),
        )
        tables_sp = put(state.tables_sp, step["table"])
        return state.replace(tables_sp=tables_sp, sampling=sampling, exits=exits), {}

    # -- prompts ---------------------------------------------------------------------------------

    def prefill(self, state: DeviceState, params: OuroParams, step: Results):
        """LAST_EXITED: all rows of a chunk go through loop 1, then all through loop 2, ..."""
        slot = step["slot"]
        batch = self._tiles(state, step, slot, depths_n=jnp.ones_like(slot))
        hidden_td = ouro.prelude(params, step["tokens"])
        hidden_td, kv = self._all_loops(params, hidden_td, state.kv, batch)
        hidden_nd = self._last_hidden(hidden_td, batch)
        state = self._keep_last_hidden(state.replace(kv=kv), step, slot, hidden_nd)
        return state, {}

    def prefill_shared(self, state: DeviceState, params: OuroParams, step: Results):
        """SHARED: position t goes through every loop before position t + 1 starts."""
        tables_rp = self._tables(state, step["slot"])

        def run(offset, carry):
            kept_rd, kv = carry
            valid_r = offset < step["count"]
            batch = RowBatch(
                tables_rp, step["start"] + offset, jnp.ones_like(step["slot"]), valid_r
            )
            tokens_r = lax.dynamic_index_in_dim(step["tokens"], offset, axis=1, keepdims=False)
            hidden_rd, kv = self._all_loops(params, ouro.prelude(params, tokens_r), kv, batch)
            return jnp.where(valid_r[:, None], hidden_rd, kept_rd), kv

        width = self.spec.config.hidden_size
        start_rd = jnp.zeros((self.bucket, width), state.hidden_sd.dtype)
        # A GPU would ask the host after each turn of a loop whose length is data.
        on_cpu = self.spec.kernels.decode == "reference"
        turns = step["count"].max() if on_cpu else SHARED_PREFILL_TOKENS
        hidden_rd, kv = lax.fori_loop(0, turns, run, (start_rd, state.kv))
        state = self._keep_last_hidden(state.replace(kv=kv), step, step["slot"], hidden_rd)
        return state, {}

    def _tiles(self, state: DeviceState, step: Results, slot_n, depths_n) -> TileBatch:
        return TileBatch(
            tables_np=self._tables(state, slot_n),
            starts_n=step["start"],
            counts_n=step["count"],
            depths_n=depths_n,
            num_rows=self.bucket,
            tile_rows=self.spec.kernels.tile_rows,
        )

    def _last_hidden(self, hidden_td: jax.Array, batch: TileBatch) -> jax.Array:
        """The hidden state of each tile's last row, [n, d]."""
        return hidden_td.at[batch.first_rows_n + batch.counts_n - 1].get(mode="clip")

    def _keep_last_hidden(self, state: DeviceState, step: Results, slot_n, hidden_nd):
        """Stores the hidden state of each prompt's last token in its slot."""
        slot_n = self._slots(slot_n, step["ends_prompt"] > 0)
        return state.replace(hidden_sd=state.hidden_sd.at[slot_n].set(hidden_nd, mode="drop"))

    # -- decoding --------------------------------------------------------------------------------

    def recurrent(self, state: DeviceState, params: OuroParams, step: Results):
        """One loop of every row."""
        batch, hidden_rd = self._begin_loop(state, params, step)
        hidden_rd, kv = self._loop(params, hidden_rd, state.kv, batch)
        return self._end_loop(state.replace(kv=kv), params, step, batch, hidden_rd)

    def mixed(self, state: DeviceState, params: OuroParams, step: Results):
        """One loop of decode rows, as in `recurrent`, and of prompt chunks, each at its depth."""
        rows, hidden_rd = self._begin_loop(state, params, step)
        tiles = self._tiles(state, step, step["tile_slot"], step["tile_depth"])
        window_t = jnp.where(
            tiles.valid_t, tiles.count_up(step["window"]), self.spec.shape.window_rows
        )
        hidden_td = jnp.where(
            (tiles.row_depths == 1)[:, None],
            ouro.prelude(params, step["tokens"]),
            state.prompt_hidden_wd.at[window_t].get(mode="clip"),
        )
        hidden_td, kv = self._loop(
            params, jnp.concatenate([hidden_rd, hidden_td]), state.kv, MixedBatch(rows, tiles)
        )
        hidden_rd, hidden_td = jnp.split(hidden_td, [rows.num_rows])
        state, signals = self._end_loop(state.replace(kv=kv), params, step, rows, hidden_rd)
        # That of a loop before the last is overwritten before anyone reads it.
        hidden_nd = self._last_hidden(hidden_td, tiles)
        state = self._keep_last_hidden(state, step, step["tile_slot"], hidden_nd)
        window_wd = state.prompt_hidden_wd.at[window_t].set(hidden_td, mode="drop")
        return state.replace(prompt_hidden_wd=window_wd), signals

    def _begin_loop(self, state: DeviceState, params: OuroParams, step: Results):
        """Decode rows and what their loop reads, [r, d]; a token's first begins with the prelude.

        Where the program decides, a row that has left does nothing in the loops still to come.
        """
        slot, depth = step["slot"], step["depth"]
        valid_r = (slot < self.spec.shape.num_slots) & (depth > 0)
        if self.spec.exits.decides:
            valid_r &= ~has_left(state.exits, slot, depth)
        hidden_rd = jnp.where(
            (depth == 1)[:, None],
            ouro.prelude(params, state.last_token_s.at[slot].get(mode="clip")),
            state.hidden_sd.at[slot].get(mode="clip"),
        )
        return RowBatch(self._tables(state, slot), step["position"], depth, valid_r), hidden_rd

    def _end_loop(self, state: DeviceState, params: OuroParams, step: Results, batch, hidden_rd):
        """Keeps the hidden states of decode rows: (state, their signals or decisions)."""
        slot, exits = self._slots(step["slot"], batch.valid_r), self.spec.exits
        state = state.replace(hidden_sd=state.hidden_sd.at[slot].set(hidden_rd, mode="drop"))
        signal_r = exits.signal(params, hidden_rd)
        if not exits.decides:
            return state, {"exit_probability": signal_r}
        slot_exits, leaves_r = decide_exits(state.exits, slot, batch.depths_r, signal_r)
        return state.replace(exits=slot_exits), {"leaves": leaves_r}

    def coda(self, state: DeviceState, params: OuroParams, step: Results, *, greedy: bool):
        """Rows that exit: finalizes their K/V and samples their next token."""
        slot = step["slot"]
        exits_r = (slot < self.spec.shape.num_slots) & (step["exit_depth"] > 0)
        tables_rp = self._tables(state, slot)
        ends = (tables_rp, step["position"], step["exit_depth"], exits_r)
        kv = finalize_kv(state.kv, *ends, self.spec.kernels)
        hidden_rd = state.hidden_sd.at[slot].get(mode="clip")
        logits_rv = ouro.coda(self.spec.policy, params, hidden_rd)
        token_r = self._choose(state, slot, logits_rv, step["output_index"], greedy)
        last_token_s = state.last_token_s.at[self._slots(slot, exits_r)].set(token_r, mode="drop")
        results = {
            "token": token_r[:, None],
            "logprob": sampler.raw_logprob(logits_rv, token_r)[:, None],
        }
        return state.replace(kv=kv, last_token_s=last_token_s), results

    def boundary(self, state: DeviceState, params: OuroParams, step: Results, *, greedy: bool):
        """coda of the rows that exit, then one loop of all that have one to run."""
        state, sampled = self.coda(state, params, step, greedy=greedy)
        position = step["position"] + (step["exit_depth"] > 0)
        state, looped = self.recurrent(state, params, {**step, "position": position})
        return state, sampled | looped

    def tokens(
        self,
        state: DeviceState,
        params: OuroParams,
        step: Results,
        *,
        greedy: bool,
        count: int = 1,
    ):
        """`count` whole tokens of every row at full depth: prelude, every loop, coda, sample.

        K/V of the last depth is written by the last loop: there is nothing to finalize.
        """
        slot = step["slot"]
        valid_r = slot < self.spec.shape.num_slots
        tables_rp = self._tables(state, slot)

        def run(i, carry):
            token_r, kv, tokens_rt, logprobs_rt = carry
            batch = RowBatch(tables_rp, step["position"] + i, step["depth"], valid_r)
            hidden_rd, kv = self._all_loops(params, ouro.prelude(params, token_r), kv, batch)
            logits_rv = ouro.coda(self.spec.policy, params, hidden_rd)
            token_r = self._choose(state, slot, logits_rv, step["output_index"] + i, greedy)
            logprob_r = sampler.raw_logprob(logits_rv, token_r)
            return token_r, kv, tokens_rt.at[:, i].set(token_r), logprobs_rt.at[:, i].set(logprob_r)

        start = (
            state.last_token_s.at[slot].get(mode="clip"),
            state.kv,
            jnp.zeros((self.bucket, count), jnp.int32),
            jnp.zeros((self.bucket, count), jnp.float32),
        )
        token_r, kv, tokens_rt, logprobs_rt = lax.fori_loop(0, count, run, start)
        last_token_s = state.last_token_s.at[slot].set(token_r, mode="drop")
        state = state.replace(kv=kv, last_token_s=last_token_s)
        return state, {"token": tokens_rt, "logprob": logprobs_rt}

    # -- transfers -------------------------------------------------------------------------------

    def save(self, state: DeviceState, params: OuroParams, step: Results):
        return state, transfers.save(state, step["slot"][0], step["first"][0])

    def restore(self, state: DeviceState, params: OuroParams, step: Results, content: SlotContent):
        slot, first, count = step["slot"][0], step["first"][0], step["count"][0]
        return transfers.restore(state, slot, first, count, content), {}

    # -- parts -----------------------------------------------------------------------------------

    def _tables(self, state: DeviceState, slot: jax.Array) -> jax.Array:
        return state.tables_sp.at[slot].get(mode="clip")

    def _slots(self, slot: jax.Array, valid_r: jax.Array) -> jax.Array:
        """Slots to write to: past the last one for rows that write nothing."""
        return jnp.where(valid_r, slot, self.spec.shape.num_slots)

    def _loop(self, params, hidden_td, kv: PagedKV, batch: RowBatch | TileBatch):
        spec = self.spec
        return ouro.recurrent(spec.config, spec.policy, spec.kernels, params, hidden_td, kv, batch)

    def _all_loops(self, params, hidden_td, kv: PagedKV, batch: RowBatch | TileBatch):
        """Every loop of the model, one after the other: (what the coda reads [t, d], K/V)."""
        depths = self.spec.config.total_ut_steps

        def run(depth, carry):
            return self._loop(params, *carry, batch.at_depth(depth))

        def run_and_weigh(depth, carry):
            hidden_td, kv, mean_td, remaining_t = carry
            hidden_td, kv = self._loop(params, hidden_td, kv, batch.at_depth(depth))
            hazard_t = self.spec.exits.signal(params, hidden_td)
            share_t = remaining_t * jnp.where(depth == depths, 1.0, hazard_t)
            mean_td += share_t[:, None] * hidden_td.astype(jnp.float32)
            return hidden_td, kv, mean_td, remaining_t * (1.0 - hazard_t)

        if not self.spec.exits.weighted:
            return lax.fori_loop(1, depths + 1, run, (hidden_td, kv))
        nothing_td = jnp.zeros(hidden_td.shape, jnp.float32)
        start = (hidden_td, kv, nothing_td, jnp.ones(hidden_td.shape[:1], jnp.float32))
        _, kv, mean_td, _ = lax.fori_loop(1, depths + 1, run_and_weigh, start)
        return mean_td.astype(hidden_td.dtype), kv

    def _choose(self, state: DeviceState, slot, logits_rv, output_index, greedy: bool):
        if greedy:
            return sampler.greedy(logits_rv)
        sampling = jax.tree.map(lambda leaf: leaf.at[slot].get(mode="clip"), state.sampling)
        return sampler.sample(
            logits_rv,
            sampling.temperature_s,
            sampling.top_k_s,
            sampling.top_p_s,
            sampling.seed_s2,
            output_index,
        )
