"""Runs batches on the device. Owns the device state; knows nothing of queues or requests."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from rlt_jax.engine.types import (
    PREFILL_TILE,
    BatchError,
    DeviceLostError,
    Row,
    RowResult,
    RunnerOutput,
    SchedulerOutput,
    SlotUpdate,
    Stage,
)
from rlt_jax.models.ouro import OuroParams
from rlt_jax.runtime.compilation import Programs
from rlt_jax.runtime.device_state import DeviceState, abstract_state, init_state
from rlt_jax.runtime.programs import SLOT_UPDATE_ROWS, Kind, Results, input_layout


@dataclasses.dataclass(frozen=True)
class Ticket:
    """A submitted batch: what was asked, and the device arrays that will hold the answer."""

    batch: SchedulerOutput
    results: Results


@dataclasses.dataclass(frozen=True)
class _Call:
    executable: jax.stages.Compiled
    packed: np.ndarray


class Runner:
    """submit() dispatches a batch and returns at once; collect() waits for its results.

    Programs chain through the one donated state, so they run in submission order.
    """

    def __init__(self, params: OuroParams, programs: Programs):
        self._params = params
        self._programs = programs
        self._state = self._fresh_state()

    @property
    def state(self) -> DeviceState:
        """The device state, for tests to look at: reading a leaf makes its next donation a copy."""
        return self._state

    def submit(self, batch: SchedulerOutput) -> Ticket:
        """Dispatches a batch.

        Raises BatchError when it failed before dispatch (the state is intact) and
        DeviceLostError when it failed at dispatch (the state is lost: call reset()).
        """
        try:
            calls = self._prepare(batch)
        except Exception as error:
            raise BatchError(f"{batch.stage.value} batch was not dispatched: {error}") from error
        try:
            results: Results = {}
            for call in calls:
                self._state, results = call.executable(self._state, self._params, call.packed)
            for array in results.values():
                array.copy_to_host_async()
        except Exception as error:
            raise DeviceLostError(f"{batch.stage.value} batch failed: {error}") from error
        return Ticket(batch, results)

    def collect(self, ticket: Ticket) -> RunnerOutput:
        """Waits for a batch's results: the only place that reads from the device."""
        batch = ticket.batch
        try:
            host = jax.device_get(ticket.results)
        except Exception as error:
            raise DeviceLostError(f"{batch.stage.value} batch failed: {error}") from error
        rows = tuple(_row_result(row, i, host) for i, row in enumerate(batch.rows))
        return RunnerOutput(batch.sequence, batch.stage, rows)

    def reset(self) -> None:
        """Drops the device state, whatever became of it, and builds a new one."""
        old, self._state = self._state, None
        for leaf in jax.tree.leaves(old):  # its memory first: there is room for one pool only
            if not leaf.is_deleted():
                leaf.delete()
        self._state = self._fresh_state()

    def _fresh_state(self) -> DeviceState:
        spec = self._programs.spec
        abstract = abstract_state(spec.config, spec.policy, spec.shape)
        return init_state(abstract, jax.sharding.SingleDeviceSharding(self._programs.device))

    def _prepare(self, batch: SchedulerOutput) -> list[_Call]:
        updates = batch.slot_updates
        groups = [
            updates[i : i + SLOT_UPDATE_ROWS] for i in range(0, len(updates), SLOT_UPDATE_ROWS)
        ]
        calls = [
            self._call(Kind.SET_SLOTS, len(group), self._slot_values(group)) for group in groups
        ]
        if batch.stage is Stage.PREFILL:
            tiles = [tile for row in batch.rows for tile in _tiles(row)]
            calls.append(self._call(Kind.PREFILL, len(tiles), _columns(tiles)))
        else:
            rows = {
                "slot": [row.slot for row in batch.rows],
                "position": [row.position for row in batch.rows],
                "depth": [row.depth for row in batch.rows],
                "output_index": [row.output_index for row in batch.rows],
            }
            calls.append(self._call(_kind_of(batch), len(batch.rows), rows))
        return calls

    def _call(self, kind: Kind, count: int, values: dict[str, Sequence]) -> _Call:
        """Pads `count` entries to a bucket and packs them."""
        bucket = self._programs.buckets.fit(kind, count)
        shape = self._programs.spec.shape
        layout = input_layout(kind, bucket, shape)
        padded = {}
        for name, field_shape, dtype in layout.fields:
            # A slot past the last one marks padding: nothing is read, written or sampled.
            filler = shape.num_slots if name == "slot" else 0
            padded[name] = np.full(field_shape, filler, dtype)
            padded[name][:count] = values[name]
        return _Call(self._programs.get(kind, bucket), layout.pack(padded))

    def _slot_values(self, updates: Sequence[SlotUpdate]) -> dict[str, Sequence]:
        width = self._programs.spec.shape.table_width
        tables = np.zeros((len(updates), width), np.int32)
        for table, update in zip(tables, updates, strict=True):
            table[: len(update.block_table)] = update.block_table
        return {
            "slot": [update.slot for update in updates],
            "table": tables,
            "temperature": [update.temperature for update in updates],
            "top_k": [update.top_k for update in updates],
            "top_p": [update.top_p for update in updates],
            "seed": [(update.seed >> 32, update.seed & 0xFFFFFFFF) for update in updates],
        }


def _kind_of(batch: SchedulerOutput) -> Kind:
    if batch.stage is Stage.PRELUDE:
        return Kind.PRELUDE
    if batch.stage is Stage.RECURRENT:
        return Kind.RECURRENT_GATED if batch.reads_gate else Kind.RECURRENT
    return Kind.CODA_SAMPLE if batch.samples else Kind.CODA_GREEDY


def _tiles(row: Row) -> list[dict]:
    """A prompt chunk cut into tiles of consecutive positions."""
    tiles = []
    for start in range(0, len(row.tokens), PREFILL_TILE):
        tokens = row.tokens[start : start + PREFILL_TILE]
        tiles.append(
            {
                "slot": row.slot,
                "start": row.position + start,
                "count": len(tokens),
                "ends_prompt": int(row.ends_prompt and start + len(tokens) == len(row.tokens)),
                "tokens": tokens + (0,) * (PREFILL_TILE - len(tokens)),
            }
        )
    return tiles


def _columns(entries: list[dict]) -> dict[str, list]:
    return {name: [entry[name] for entry in entries] for name in entries[0]}


def _row_result(row: Row, i: int, host: dict[str, np.ndarray]) -> RowResult:
    def value(name, convert):
        return convert(host[name][i]) if name in host else None

    return RowResult(
        generation=row.generation,
        position=row.position,
        depth=row.depth,
        exit_probability=value("exit_probability", np.float32),
        token=value("token", int),
        logprob=value("logprob", float),
    )
