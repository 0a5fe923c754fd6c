"""A simulated device: computes hashes where a real one computes a model, and checks its batches.

Every result is a pure function of the request's prompt, seed, position and depth, so that one can
say beforehand what a request must give, whatever the schedule. Batches run in the order in which
they were submitted, at any time before their results are collected. The device refuses what a real
one would silently get wrong: a page of another request, history that was not written, a prefix
that is not complete, a loop before the one it follows.
"""

import dataclasses
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from rlt_jax.engine.types import (
    BatchError,
    DeviceLostError,
    Row,
    RowResult,
    RunnerOutput,
    SchedulerOutput,
    SlotUpdate,
    Stage,
)
from tests.engine.fake_device import as_columns
from tests.engine.simulated_kv import Prefix, SimulatedKV, Slot
from tests.engine.simulated_limits import TRANSFERS, Limits, check_size
from tests.engine.simulated_model import FULL_DEPTH, coda, gate, loop, prelude
from tests.engine.simulated_transfers import Transfers

FAILURES = (
    "batch error",
    "lost at submit",
    "lost at collect",
    "lost at collect, then the reset fails",
    "interrupt before submit",
    "interrupt after submit",
    "interrupt in collect",
)


class Interrupt(BaseException):
    """Something like Ctrl-C."""


class ResetError(RuntimeError):
    """The device state could not be built."""


# Whether the signals of a token's loops so far make it leave, given min_loops and the threshold.
Trigger = Callable[[Sequence[np.float32], int, float], bool]


@dataclasses.dataclass(eq=False)
class Ticket:
    batch: SchedulerOutput
    slots: tuple[Slot, ...]
    tables: tuple[tuple[Slot, np.ndarray], ...]  # that were sent with it
    signals: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)  # by row
    output: RunnerOutput | None = None


class SimulatedDevice:
    """A runner. failures: what goes wrong, by the number of the submit() call. decides: the
    rule by which it tells itself when a token leaves; None: it only tells the signals.

    events: how often each kind of thing happened. refused: generations in batches that failed
    before they got here. losses: how often the whole device state was lost.
    """

    def __init__(
        self,
        limits: Limits,
        failures: Mapping[int, str],
        seed: int = 0,
        decides: Trigger | None = None,
    ):
        self.limits = limits
        self.events: Counter[str] = Counter()
        self.refused: set[int] = set()
        self.losses = 0
        self._failures = failures
        self._decides = decides
        self._failing: dict[Ticket, str] = {}
        self._lateness = random.Random(seed)
        self._submissions = 0
        self.transfers = Transfers(limits, self.events)
        self._reset_fails = False
        self._start_empty()

    def _start_empty(self) -> None:
        self._lost = False
        self._slots: dict[int, Slot] = {}
        self._kv = SimulatedKV(self.limits)
        # What tells a prompt token's hidden state from all others: its mark and its loops.
        self._window = np.zeros(FULL_DEPTH * self.limits.max_prompt_tokens, np.int64)
        self._stream: deque[Ticket] = deque()  # submitted, not run
        self._uncollected: list[Ticket] = []

    def submit(self, batch: SchedulerOutput) -> Ticket:
        assert not self._lost, "the device state is lost"
        check_size(batch, self.limits, self.events)
        failure = self._failures.get(self._submissions)
        self._submissions += 1
        if failure is not None:
            self.events[failure] += 1
        if failure == "batch error":
            self.refused |= set(batch.rows.generation.tolist())
            raise BatchError(failure)
        if failure == "lost at submit":
            self._lose()
            raise DeviceLostError(failure)
        if failure == "interrupt before submit":
            self._lose()
            raise Interrupt
        tables = tuple(self._set_slots(batch))
        owners = zip(batch.rows.slot.tolist(), batch.rows.generation.tolist(), strict=True)
        ticket = Ticket(batch, tuple(self._slot_of(*owner) for owner in owners), tables)
        stages = self._stages_in_flight() if batch.stage in TRANSFERS else {}
        for slot in ticket.slots:
            self.transfers.check(batch, slot, stages)
        for row, slot in zip(batch.rows, ticket.slots) if batch.rows.tokens else ():
            slot.sent = max(slot.sent, row.position + len(row.tokens) * bool(row.tokens))
        self._await_signals(ticket)
        self._stream.append(ticket)
        self._uncollected.append(ticket)
        assert len(self._uncollected) <= self.limits.max_in_flight
        if failure == "interrupt after submit":
            self._lose()
            raise Interrupt
        if failure is not None:
            self._failing[ticket] = failure
        self.events[batch.stage.value] += 1
        self.events[f"{len(self._uncollected)} in flight"] += 1
        self._run_some()
        return ticket

    def collect(self, ticket: Ticket) -> RunnerOutput:
        assert not self._lost, "the device state is lost"
        assert ticket in self._uncollected, "collected twice"
        failure = self._failing.get(ticket)
        if failure is not None:
            self._lose()
            if failure == "interrupt in collect":
                raise Interrupt
            self._reset_fails = failure == "lost at collect, then the reset fails"
            raise DeviceLostError(failure)
        self._run_some()
        while ticket.output is None:
            self._run_next()
        self._uncollected.remove(ticket)
        self._complete_prompts(ticket)
        leaves = ticket.output.rows.leaves
        for i, (token, depth) in ticket.signals.items():
            ticket.slots[i].awaited.remove((token, depth))
            if leaves is not None and leaves[i]:
                ticket.slots[i].told_left = token
        return ticket.output

    def served_prefixes(self) -> list[Prefix]:
        """What requests found in cached pages since the last call."""
        served, self._kv.served = self._kv.served, []
        return served

    def reset(self) -> None:
        self._lose()
        if self._reset_fails:
            self._reset_fails = False
            raise ResetError
        self._start_empty()

    def _lose(self) -> None:
        if not self._lost:
            self._lost = True
            self.losses += 1
            self.transfers.lose_device()
            self._failing.clear()

    # -- what is submitted ------------------------------------------------------------------------

    def _set_slots(self, batch: SchedulerOutput) -> Iterator[tuple[Slot, np.ndarray]]:
        """The slots that are new or have grown, with their tables."""
        rows = batch.rows
        generations = dict(zip(rows.slot.tolist(), rows.generation.tolist(), strict=True))
        in_flight = {slot for ticket in self._uncollected for slot in ticket.slots}
        for update in batch.slot_updates:
            generation = generations.pop(update.slot)  # a row of this batch, updated once
            slot = self._slots.get(update.slot)
            is_new = slot is None or not self._grows(batch, slot, generation, update)
            if is_new:
                assert slot not in in_flight, "its slot is still in use"
                cached = int(rows.position[rows.slot == update.slot].min())
                if batch.stage is Stage.RESTORE:
                    cached = 0
                slot = self._slots[update.slot] = Slot(generation, update, self.limits, cached)
            self.events["a table grew"] += not is_new
            busy = {page for other in in_flight - {slot} for page in other.table.tolist()}
            given_up = self._kv.give(slot, update.block_table, busy)
            self.events["a completed page was given up"] += given_up * self.limits.caches_prefixes
            if is_new:
                self.transfers.enter(slot, batch.stage, in_flight)
            yield slot, slot.table

    def _grows(
        self, batch: SchedulerOutput, slot: Slot, generation: int, update: SlotUpdate
    ) -> bool:
        """Whether the request goes on where it is; else it comes to this slot, or comes back."""
        if slot.generation != generation or not self.limits.incremental:
            return False
        if batch.stage is Stage.RESTORE and not batch.transfer.first:
            return False
        begins = {row.position for row in batch.rows if row.slot == update.slot and row.tokens}
        return len(update.block_table) > slot.table.size and begins <= {slot.sent}

    def _slot_of(self, number: int, generation: int) -> Slot:
        slot = self._slots[number]
        assert slot.generation == generation, "the slot was not set for this request"
        self._kv.check_owner(slot)
        return slot

    def _complete_prompts(self, ticket: Ticket) -> None:
        """Prompt tokens whose loops are all collected."""
        batch = ticket.batch
        if batch.rows.num_decode == len(batch.rows):
            return
        loops = batch.num_loops if batch.stage is Stage.MIXED else 1
        last = (batch.rows.size > 0) & (batch.rows.depth + loops > FULL_DEPTH)
        ends = batch.rows.position + batch.rows.size
        for i in np.flatnonzero(last).tolist():
            self._kv.complete(ticket.slots[i], int(ends[i]))

    def _await_signals(self, ticket: Ticket) -> None:
        """No loop starts before the signals are read that may keep it from starting."""
        for i, slot in enumerate(ticket.slots):
            reads = ticket.batch.rows.reads_gate[i]
            if not (slot.awaited or reads or slot.told_left >= 0):
                continue
            row = ticket.batch.rows[i]
            token = row.output_index + (row.exit_depth > 0)
            ran_on = row.depth and token == slot.told_left and self.limits.lag == 0
            assert not ran_on, "a loop of a token that is known to have left"
            for other, depth in slot.awaited:
                ahead = other == token and row.depth > depth
                assert not ahead or row.depth - depth <= self.limits.run_ahead, "too far ahead"
                self.events["a loop ahead of a signal"] += ahead
            if reads:
                slot.awaited.append((token, row.depth))
                ticket.signals[i] = (token, row.depth)

    def _stages_in_flight(self) -> dict[Slot, set[Stage]]:
        stages: dict[Slot, set[Stage]] = {}
        for ticket in self._uncollected:
            for slot in ticket.slots:
                stages.setdefault(slot, set()).add(ticket.batch.stage)
        return stages

    def is_busy(self, generation: int) -> bool:
        """Whether a batch of this request is submitted and not collected."""
        return any(generation == s.generation for t in self._uncollected for s in t.slots)

    # -- the stream -------------------------------------------------------------------------------

    def _run_some(self) -> None:
        for _ in range(self._lateness.randint(0, len(self._stream))):
            self._run_next()

    def _run_next(self) -> None:
        ticket = self._stream.popleft()
        for slot, table in ticket.tables:
            self._kv.set_table(slot, table)
        run = {
            Stage.PREFILL: self._prefill,
            Stage.TOKENS: self._whole_tokens,
            **dict.fromkeys(TRANSFERS, self._nothing),
        }
        run_row = run.get(ticket.batch.stage, self._decode)
        batch, content = ticket.batch, None
        pairs = list(zip(batch.rows, ticket.slots, strict=True))
        if batch.stage is Stage.SAVE:
            content = self.transfers.save(self._kv, batch, *pairs[0])
        if batch.stage is Stage.RESTORE:
            self.transfers.restore(self._kv, batch, *pairs[0])
        if batch.stage is Stage.MIXED:
            self._chunks([pair for pair in pairs if pair[0].size], batch.num_loops)
            run_row = self._decode_or_chunk
        rows = [run_row(batch, row, slot) for row, slot in pairs]
        results = as_columns(batch, rows)
        ticket.output = RunnerOutput(batch.sequence, batch.stage, results, content)

    def _prefill(self, batch: SchedulerOutput, row: Row, slot: Slot) -> RowResult:
        assert not slot.prompt_ended and row.position == slot.position
        assert row.depth == FULL_DEPTH and not (row.exit_depth or row.reads_gate)
        start, end = row.position, row.position + len(row.tokens)
        for depth in range(1, self.limits.planes + 1):
            self._kv.read_prompt(slot, start, depth)
        self._read_tokens(row, slot)
        for position in range(start, end):
            self._kv.keep(slot, position, FULL_DEPTH)
        if row.ends_prompt:
            for depth in range(1, FULL_DEPTH + 1):
                slot.hidden = loop(slot.hidden, depth)
            self._end_prompt(slot)
        return RowResult(row.generation, row.position, row.depth)

    def _chunks(self, pairs: list[tuple[Row, Slot]], num_loops: int) -> None:
        """Loops of prompt chunks: within one, all read before any writes."""
        for ahead in range(num_loops):
            for row, slot in pairs:
                self._read_chunk(row, slot, row.depth + ahead)
            for row, slot in pairs:
                self._write_chunk(row, slot, row.depth + ahead)

    def _read_chunk(self, row: Row, slot: Slot, depth: int) -> None:
        assert not slot.prompt_ended and 1 <= depth <= FULL_DEPTH == self.limits.planes
        assert not (row.exit_depth or row.reads_gate)
        assert bool(row.tokens) == (row.depth == 1), "tokens go with the first loop"
        if depth == 1:
            assert row.position == slot.position and len(row.tokens) == row.size
            self._read_tokens(row, slot)
        else:
            found = self._window[row.window : row.window + row.size]
            expected = slot.marks[row.position : row.position + row.size] + depth - 1
            assert (found == expected).all(), "the window has other hidden states"
        self._kv.read_prompt(slot, row.position, depth)

    def _write_chunk(self, row: Row, slot: Slot, depth: int) -> None:
        place = slice(row.position, row.position + row.size)
        self._window[row.window : row.window + row.size] = slot.marks[place] + depth
        self._kv.write_prompt(slot, place, depth)
        if row.ends_prompt:
            slot.hidden = loop(slot.hidden, depth)
            if depth == FULL_DEPTH:
                self._end_prompt(slot)

    def _read_tokens(self, row: Row, slot: Slot) -> None:
        self._kv.read_tokens(slot, row.tokens)
        if row.ends_prompt:
            slot.hidden = prelude(slot.text, slot.position - 1, row.tokens[-1])

    def _end_prompt(self, slot: Slot) -> None:
        slot.prompt_ended, slot.depth = True, FULL_DEPTH
        slot.position -= 1

    def _nothing(self, batch: SchedulerOutput, row: Row, slot: Slot) -> RowResult:
        return RowResult(row.generation, row.position, row.depth)

    def _decode_or_chunk(self, batch: SchedulerOutput, row: Row, slot: Slot) -> RowResult:
        return (self._nothing if row.size else self._decode)(batch, row, slot)

    def _whole_tokens(self, batch: SchedulerOutput, row: Row, slot: Slot) -> RowResult:
        assert row.position == slot.position and slot.depth == 0
        assert row.depth == row.exit_depth == FULL_DEPTH and not row.reads_gate
        tokens = []
        for i in range(batch.num_tokens):
            for depth in range(1, FULL_DEPTH + 1):
                self._loop(slot, depth)
            tokens.append(self._coda(batch, row, slot, row.output_index + i))
        return RowResult(
            row.generation, row.position, row.depth, tuple(tokens), (-0.5,) * len(tokens)
        )

    def _decode(self, batch: SchedulerOutput, row: Row, slot: Slot) -> RowResult:
        assert row.position == slot.position and (row.exit_depth or row.depth)
        assert not (row.exit_depth and batch.stage in (Stage.RECURRENT, Stage.MIXED))
        assert not (row.depth and batch.stage is Stage.CODA)
        assert row.depth or not row.reads_gate
        tokens: tuple[int, ...] = ()
        if row.exit_depth:
            tokens = (self._coda(batch, row, slot, row.output_index),)
        signal = leaves = None
        if slot.left and row.depth:
            # It ran ahead of the decision: nothing happens, and its result means nothing.
            assert self.limits.run_ahead and row.depth == slot.depth + 1
            self.events["loops in vain"] += 1
            signal, leaves = np.float32(1), True
        elif row.depth:
            self._loop(slot, row.depth)
            signal = gate(slot.hidden)
            slot.signals.append(signal)
            if row.reads_gate and self._decides is not None:
                leaves = self._decides(slot.signals, slot.min_loops, slot.threshold)
                slot.left = leaves and self.limits.lag == 0
        self.events["gates"] += row.reads_gate
        return RowResult(
            row.generation,
            row.position,
            row.depth,
            tokens,
            (-0.5,) * len(tokens),
            exit_probability=signal if row.reads_gate else None,
            leaves=leaves if row.reads_gate else None,
        )

    def _loop(self, slot: Slot, depth: int) -> None:
        assert slot.prompt_ended and slot.depth < FULL_DEPTH
        assert depth == slot.depth + 1, "not the loop that is next"
        assert slot.position < slot.cells.size, "past the last page"
        if depth == 1:
            slot.hidden = prelude(slot.text, slot.position, slot.token)
        slot.hidden = loop(slot.hidden, depth)
        slot.depth = depth
        self._kv.read_history(slot, slot.position, depth)
        self._kv.write(slot, slot.position, depth)

    def _coda(self, batch: SchedulerOutput, row: Row, slot: Slot, output_index: int) -> int:
        assert slot.prompt_ended and slot.depth == row.exit_depth > 0
        assert slot.sampled == output_index
        position, depth = slot.position, slot.depth
        self._kv.check_written(slot, position, depth)
        self._kv.keep(slot, position, depth)
        draws = batch.samples and slot.temperature > 0
        slot.token = coda(slot.hidden, (slot.seed, output_index) if draws else ())
        slot.sampled, slot.position, slot.depth = slot.sampled + 1, position + 1, 0
        slot.signals, slot.left = [], False
        return slot.token
