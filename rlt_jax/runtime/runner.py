"""Runs batches on the device. Owns the device state; knows nothing of queues or requests."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from rlt_jax.engine.types import (
    SHARED_PREFILL_TOKENS,
    BatchError,
    DeviceLostError,
    Row,
    RowResults,
    Rows,
    RunnerOutput,
    SchedulerOutput,
    SlotUpdate,
    Stage,
)
from rlt_jax.models.ouro import OuroParams
from rlt_jax.runtime.compilation import Programs
from rlt_jax.runtime.device_state import DeviceState, abstract_state, init_state
from rlt_jax.runtime.packed import PackedLayout
from rlt_jax.runtime.programs import (
    SLOT_UPDATE_ROWS,
    Kind,
    input_layout,
    mixed_rows,
    output_layout,
    transfer_pages,
)
from rlt_jax.runtime.transfers import SlotContent
from rlt_jax.validation import fail


@dataclasses.dataclass(frozen=True)
class Ticket:
    """A submitted batch: what was asked, and the array that will hold the answer; in a SAVE, the
    content on the host."""

    batch: SchedulerOutput
    results: jax.Array | SlotContent
    layout: PackedLayout


@dataclasses.dataclass(frozen=True)
class Call:
    """A program, its packed input, and the layout of its results; content: on the device, of a
    RESTORE."""

    executable: jax.stages.Compiled
    packed: np.ndarray
    layout: PackedLayout
    content: tuple[SlotContent, ...] = ()


class Runner:
    """submit() dispatches a batch and returns at once; collect() waits for its results.

    Programs chain through the one donated state, so they run in submission order.
    """

    def __init__(self, params: OuroParams, programs: Programs):
        self._params = params
        self._programs = programs
        self._on_device = jax.sharding.SingleDeviceSharding(programs.device)
        self._on_host = self._on_device.with_memory_kind("pinned_host")
        self._state = self._fresh_state()
        self._decode_rows = self._decode_bucket_rows = 0

    @property
    def occupancy(self) -> float | None:
        """Decode rows of all batches so far, over the rows they were padded to; None before the
        first."""
        return self._decode_rows / self._decode_bucket_rows if self._decode_bucket_rows else None

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
            calls = self.prepare(batch)
        except Exception as error:
            raise BatchError(f"{batch.stage.value} batch was not dispatched: {error}") from error
        try:
            for call in calls:
                results = self.dispatch(call)
            if batch.stage is Stage.SAVE:
                results = jax.device_put(results, self._on_host)  # returns before it is there
            elif self._read_back(batch):
                # Asked for and not waited for: no matter for a guard against hidden reads.
                with jax.transfer_guard_device_to_host("allow"):
                    results.copy_to_host_async()
        except Exception as error:
            raise DeviceLostError(f"{batch.stage.value} batch failed: {error}") from error
        if padded := self.padded_decode_rows(batch):
            self._decode_rows += batch.rows.num_decode
            self._decode_bucket_rows += padded
        return Ticket(batch, results, calls[-1].layout)

    def padded_decode_rows(self, batch: SchedulerOutput) -> int:
        """What the decode rows of a batch are padded to (0: it has none)."""
        count = batch.rows.num_decode
        if not count or batch.transfer:
            return 0
        if batch.stage is Stage.MIXED:
            return mixed_rows(self._programs.spec)
        return self._programs.buckets.fit(_kind_of(batch), count)

    def dispatch(self, call: Call) -> jax.Array | SlotContent:
        """Runs a program on the device state; the same call may be dispatched again."""
        self._state, results = call.executable(
            self._state, self._params, call.packed, *call.content
        )
        return results

    def run_all(self, times: int = 3) -> None:
        """Runs every program without a row in it: XLA warms up in the first run, records its
        command buffers in the second, and is settled in the third."""
        for kind, bucket in self._programs.all_keys():
            content = None
            if kind is Kind.RESTORE:  # what lies there already
                content = jax.device_put(self.dispatch(self._call(Kind.SAVE, 1, {})), self._on_host)
            call = self._call(kind, bucket, {}, content)
            for _ in range(times):
                results = self.dispatch(call)
            jax.block_until_ready(results)
        jax.block_until_ready(self._state)

    def collect(self, ticket: Ticket) -> RunnerOutput:
        """Waits for a batch, reads its results: the only place that reads from the device.

        Batches without anything to read are waited for too: no more than the engine allows are
        ever on the device.
        """
        batch, names = ticket.batch, self._read_back(ticket.batch)
        try:
            jax.block_until_ready(ticket.results)
            host = ticket.layout.unpack(jax.device_get(ticket.results)) if names else {}
        except Exception as error:
            raise DeviceLostError(f"{batch.stage.value} batch failed: {error}") from error
        columns = {name: _of_rows(batch.rows, host[name]) for name in names}
        rows = RowResults(batch.rows, **columns)
        content = ticket.results if batch.stage is Stage.SAVE else None
        return RunnerOutput(batch.sequence, batch.stage, rows, content)

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
        return init_state(abstract, self._on_device)

    def _read_back(self, batch: SchedulerOutput) -> list[str]:
        """The results that the scheduler asks for; others only show that the batch is done."""
        signal = "leaves" if self._programs.spec.exits.decides else "exit_probability"
        names = [signal] if batch.reads_gate else []
        return names + ["token", "logprob"] if batch.has_coda else names

    def prepare(self, batch: SchedulerOutput) -> list[Call]:
        """The calls that run a batch."""
        updates = batch.slot_updates
        groups = [
            updates[i : i + SLOT_UPDATE_ROWS] for i in range(0, len(updates), SLOT_UPDATE_ROWS)
        ]
        fit = self._programs.buckets.fit
        calls = [
            self._call(Kind.SET_SLOTS, SLOT_UPDATE_ROWS, self._slot_values(group))
            for group in groups
        ]
        if batch.stage is Stage.PREFILL:
            return [*calls, self._prefill_call(batch)]
        if batch.stage in (Stage.SAVE, Stage.RESTORE):
            return [*calls, self._transfer_call(batch)]
        if batch.stage is Stage.MIXED:
            rows, loops = batch.rows, range(batch.num_loops)
            at_depths = [dataclasses.replace(rows, depth=rows.depth + loop) for loop in loops]
            return calls + [self._mixed_call(rows) for rows in at_depths]
        names = ("slot", "position", "depth", "exit_depth", "output_index")
        rows = {name: getattr(batch.rows, name) for name in names}
        kind = _kind_of(batch)
        return [*calls, self._call(kind, fit(kind, len(batch.rows)), rows)]

    def _prefill_call(self, batch: SchedulerOutput) -> Call:
        spec, fit = self._programs.spec, self._programs.buckets.fit
        if spec.shape.planes == 1:
            tiles = [tile for row in batch.rows for tile in _tiles(row, SHARED_PREFILL_TOKENS)]
            values = _columns(tiles)
            values["tokens"] = [
                row.tokens + (0,) * (SHARED_PREFILL_TOKENS - len(row.tokens)) for row in batch.rows
            ]
            return self._call(Kind.PREFILL, fit(Kind.PREFILL, len(tiles)), values)
        tiles = [tile for row in batch.rows for tile in _tiles(row, spec.kernels.tile_rows)]
        values = _columns(tiles)
        values["tokens"] = [token for row in batch.rows for token in row.tokens]
        return self._call(Kind.PREFILL, fit(Kind.PREFILL, len(values["tokens"])), values)

    def _mixed_call(self, rows: Rows) -> Call:
        decode = rows.num_decode
        chunks = [rows[i] for i in range(decode, len(rows))]
        tile_rows = self._programs.spec.kernels.tile_rows
        values = _columns([tile for row in chunks for tile in _tiles(row, tile_rows)])
        values["tile_slot"], values["tile_depth"] = values["slot"], values["depth"]
        values |= {name: getattr(rows, name)[:decode] for name in ("slot", "position", "depth")}
        # A chunk past its first loop needs none.
        values["tokens"] = [token for row in chunks for token in row.tokens or (0,) * row.size]
        bucket = self._programs.buckets.fit(Kind.MIXED, len(values["tokens"]))
        return self._call(Kind.MIXED, bucket, values)

    def _transfer_call(self, batch: SchedulerOutput) -> Call:
        transfer, spec, kind = batch.transfer, self._programs.spec, Kind(batch.stage.value)
        bucket = self._programs.buckets.fit(kind, len(batch.rows))
        last = spec.shape.table_width - 1
        if not 0 <= transfer.first <= last:
            fail("Transfer.first", transfer.first, f"must be >= 0 and <= {last}")
        most = min(transfer_pages(spec), last + 1 - transfer.first)
        if not 1 <= transfer.count <= most:
            fail("Transfer.count", transfer.count, f"must be >= 1 and <= {most}")
        if not isinstance(transfer.content, SlotContent if kind is Kind.RESTORE else type(None)):
            given = type(transfer.content).__name__
            fail("Transfer.content", given, "must be what a SAVE gave in a RESTORE, else None")
        where = {"slot": batch.rows.slot, "first": [transfer.first], "count": [transfer.count]}
        return self._call(kind, bucket, where, transfer.content)

    def _call(
        self,
        kind: Kind,
        bucket: int,
        values: dict[str, Sequence],
        content: SlotContent | None = None,
    ) -> Call:
        """Pads each field's entries and packs them; no values: no row is real. content: what to
        restore, on the host."""
        spec = self._programs.spec
        layout = input_layout(kind, bucket, spec)
        padded = {}
        for name, field_shape, dtype in layout.fields:
            # A slot past the last one marks padding: nothing is read, written or sampled.
            filler = spec.shape.num_slots if name in ("slot", "tile_slot") else 0
            padded[name] = np.full(field_shape, filler, dtype)
            if values:
                padded[name][: len(values[name])] = values[name]
        executable, results = self._programs.get(kind, bucket), output_layout(kind, bucket, spec)
        placed = () if content is None else (jax.device_put(content, self._on_device),)
        return Call(executable, layout.pack(padded), results, placed)

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
            "min_loops": [update.min_loops for update in updates],
            "exit_threshold": [update.exit_threshold for update in updates],
        }


def _kind_of(batch: SchedulerOutput) -> Kind:
    if batch.stage is Stage.RECURRENT:
        return Kind.RECURRENT
    if batch.num_tokens > 1:
        return Kind(f"tokens_{batch.num_tokens}_greedy")
    greedy, sample = {
        Stage.CODA: (Kind.CODA_GREEDY, Kind.CODA_SAMPLE),
        Stage.BOUNDARY: (Kind.BOUNDARY_GREEDY, Kind.BOUNDARY_SAMPLE),
        Stage.TOKENS: (Kind.TOKEN_GREEDY, Kind.TOKEN_SAMPLE),
    }[batch.stage]
    return sample if batch.samples else greedy


def _tiles(row: Row, tile_rows: int) -> list[dict]:
    """A prompt chunk cut into tiles of consecutive positions."""
    return [
        {
            "slot": row.slot,
            "depth": row.depth,
            "start": row.position + start,
            "count": min(tile_rows, row.size - start),
            "ends_prompt": int(row.ends_prompt and start + tile_rows >= row.size),
            "window": row.window + start,
        }
        for start in range(0, row.size, tile_rows)
    ]


def _of_rows(rows: Rows, column: np.ndarray) -> np.ndarray:
    """A result without the padding, zero for the prompt rows of a mixed batch."""
    decode = rows.num_decode
    result = np.zeros((len(rows), *column.shape[1:]), column.dtype)
    result[:decode] = column[:decode]
    return result


def _columns(entries: list[dict]) -> dict[str, list]:
    return {name: [entry[name] for entry in entries] for name in entries[0]}
