"""A fake device: runs batches of scripted tokens and hazards, computing nothing.

For tests of which batches the scheduler makes; what they compute is tested on the real runner.
It keeps what a device would know of each request and refuses a batch that does not follow from it.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable

import numpy as np
import pytest

from rlt_jax.config import ExitConfig, SchedulerConfig
from rlt_jax.engine.core import EngineCore
from rlt_jax.engine.exit_policy import exit_policy
from rlt_jax.engine.intake import ModelLimits
from rlt_jax.engine.kv_accounting import KVAccounting, KVGeometry
from rlt_jax.engine.scheduler import Scheduler
from rlt_jax.engine.types import Row, RowResult, RowResults, RunnerOutput, SchedulerOutput, Stage
from rlt_jax.sampling_params import SamplingParams

any_in_flight = pytest.mark.parametrize("max_in_flight", [1, 2, 3])

FULL_DEPTH = 4
TOKEN, HAZARD = 7, 0.5

LETTERS = {
    Stage.PREFILL: "P",
    Stage.RECURRENT: "R",
    Stage.CODA: "C",
    Stage.BOUNDARY: "B",
    Stage.TOKENS: "T",
    Stage.MIXED: "M",
    Stage.SAVE: ">",
    Stage.RESTORE: "<",
}


@dataclasses.dataclass
class Progress:
    """Of one request on the device: position of its token, loops that it has run, outputs.

    chunks: loops run by prompt chunks between their loops, and their window, by position.
    """

    position: int = 0
    depth: int = 0
    sampled: int = 0
    left: bool = False
    chunks: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Cell:
    """What the K/V of one position is of: `text`, all tokens up to there, after so many loops, by
    this request. ready: known to the host to have run them all."""

    text: Hashable
    generation: int
    loops: int
    ready: bool = False


@dataclasses.dataclass(frozen=True)
class Content:
    """What a SAVE gives: pages of this request from the `first`-th on, with what they hold, and how
    far it is."""

    generation: int
    first: int
    cells: list[dict[int, Cell]]
    progress: Progress


class FakePages:
    """What lies in the pages, where requests share those of a prompt prefix or change them.

    Refuses rows that read what is not of their own text, or somebody else's before the host knew
    that it was complete. prompts: by generation; the device is never told of those it shares.
    """

    def __init__(self, block_size: int):
        self._block_size = block_size
        self.prompts: dict[int, tuple[int, ...]] = {}
        self._tables: dict[int, tuple[int, ...]] = {}
        self.clear()

    def clear(self) -> None:
        self._cells: dict[tuple[int, int], Cell] = {}

    def hear_of_requests(self, scheduler: Scheduler) -> None:
        """The prompts of those that are added from now on."""
        add = scheduler.add

        def add_and_tell(request):
            add(request)
            self.prompts[request.generation] = request.prompt

        scheduler.add = add_and_tell

    def set_tables(self, batch: SchedulerOutput) -> None:
        generations = {row.slot: row.generation for row in batch.rows}
        for update in batch.slot_updates:
            self._tables[generations[update.slot]] = update.block_table

    def run(self, generation: int, first: int, size: int, loops: int) -> None:
        """`size` positions come to have run `loops` loops, and read all before them. What is
        decoded counts as run to full depth: where it leaves, its K/V is copied to the others."""
        for position in range(first):
            cell = self._cells.get(self._place(generation, position))
            assert cell and cell.text == self._text(generation, position), "not its prefix"
            assert cell.loops >= loops, "not run yet"
            assert cell.ready or cell.generation == generation, "not known to be complete"
        for position in range(first, first + size):
            cell = Cell(self._text(generation, position), generation, loops)
            self._cells[self._place(generation, position)] = cell

    def complete(self, batch: SchedulerOutput) -> None:
        """The batch was collected."""
        for row in batch.rows:
            if row.size and row.depth + batch.num_loops - 1 == FULL_DEPTH:
                for position in range(row.position, row.position + row.size):
                    self._cells[self._place(row.generation, position)].ready = True

    def read(self, generation: int, first: int, count: int) -> list[dict[int, Cell]]:
        """What these pages of a table hold, each by offset."""
        return [
            {
                offset: dataclasses.replace(self._cells[page, offset])
                for offset in range(self._block_size)
                if (page, offset) in self._cells
            }
            for page in self._of(generation, first, count)
        ]

    def write(self, generation: int, first: int, content: list[dict[int, Cell]]) -> None:
        for page, cells in zip(self._of(generation, first, len(content)), content, strict=True):
            for offset in range(self._block_size):
                self._cells.pop((page, offset), None)
            self._cells |= {(page, offset): cell for offset, cell in cells.items()}

    def _of(self, generation: int, first: int, count: int) -> tuple[int, ...]:
        pages = self._tables[generation][first : first + count]
        assert count and len(pages) == count, "not that many pages"
        return pages

    def _text(self, generation: int, position: int) -> Hashable:
        prompt = self.prompts[generation]
        return prompt[: position + 1] if position < len(prompt) else (generation, position)

    def _place(self, generation: int, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self._block_size)
        return self._tables[generation][page], offset


class FakeDevice:
    """A runner that keeps every batch it was given, and hands out results when they are collected.

    token(generation, output index) and hazard(generation, position, depth) are what it computes.
    It decides exits itself where it is given `leaves`, (generation, position, depth) -> bool, and
    then does nothing for a row that has left. ahead: loops that a request may run before a signal
    of its own is read. alone: whether a batch may leave out rows whose signal is awaited. pages:
    what they hold, where requests may begin behind a cached prefix or be saved and restored.
    """

    def __init__(
        self,
        token: Callable[[int, int], int] = lambda *_: TOKEN,
        hazard: Callable[[int, int, int], float] = lambda *_: HAZARD,
        leaves: Callable[[int, int, int], bool] | None = None,
        ahead: int = 0,
        alone: bool = False,
    ):
        self._token, self._hazard, self._leaves = token, hazard, leaves
        self._ahead, self._alone = ahead, alone
        self._progress: dict[int, Progress] = {}
        self._away: dict[int, int] = {}  # pages saved, by generation
        self._back: dict[int, int] = {}  # and those of them restored so far
        self.pages: FakePages | None = None
        self.batches: list[SchedulerOutput] = []
        self.in_flight: list[SchedulerOutput] = []
        self.most_in_flight = 0
        self.resets = 0

    def submit(self, batch):
        assert batch.rows
        if batch.transfer is not None:
            return self._transfer(batch)
        assert not any(row.generation in self._away for row in batch.rows), "saved"
        self._seat(batch)
        decoding = [row.generation for row in batch.rows if not row.size]
        prompts = {row.generation for row in batch.rows if row.size}
        assert len({*decoding, *prompts}) == len(decoding) + len(prompts)
        if batch.stage is not Stage.MIXED:
            assert len(prompts) + len(decoding) == len(batch.rows)
        awaited = Counter(
            row.generation for other in self.in_flight for row in other.rows if row.reads_gate
        )
        if decoding:
            assert all(awaited[generation] <= self._ahead for generation in decoding)
            assert self._alone or max(awaited.values(), default=0) <= self._ahead
        self._accept(batch)
        results = [self._run(batch, row) for row in batch.rows]
        return RunnerOutput(batch.sequence, batch.stage, as_columns(batch, results))

    def _accept(self, batch: SchedulerOutput) -> None:
        if self.pages:
            self.pages.set_tables(batch)
        self.batches.append(batch)
        self.in_flight.append(batch)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))

    def collect(self, output):
        batch = self.in_flight.pop(0)
        assert batch.sequence == output.sequence
        if self.pages:
            self.pages.complete(batch)
        return output

    def reset(self):
        self.resets += 1
        self.in_flight.clear()
        if self.pages:
            self.pages.clear()

    def stages(self) -> str:
        """One letter per batch: P prefill, R recurrent, C coda, B boundary, T tokens, M mixed,
        > save, < restore."""
        return "".join(LETTERS[batch.stage] for batch in self.batches)

    def of(self, stage: Stage) -> list[SchedulerOutput]:
        return [batch for batch in self.batches if batch.stage is stage]

    def _seat(self, batch: SchedulerOutput) -> None:
        """Prompts whose slot is new begin, or begin again: from position 0 or behind a prefix."""
        new = {update.slot for update in batch.slot_updates}
        for row in reversed(tuple(batch.rows)):  # of several rows the first counts
            if row.slot in new and row.size:
                before = self._progress.get(row.generation, Progress())
                assert not before.sampled, "begins again after its first output"
                self._progress[row.generation] = Progress(row.position if self.pages else 0)

    def _transfer(self, batch: SchedulerOutput) -> RunnerOutput:
        (row,), transfer = batch.rows, batch.transfer
        generation, first, count = row.generation, transfer.first, transfer.count
        assert not (row.size or row.depth or row.exit_depth or row.reads_gate)
        running = (other for other in self.in_flight if other.transfer is None)
        assert not any(generation in other.rows.generation for other in running), "in flight"
        self._accept(batch)
        content = transfer.content
        if batch.stage is Stage.SAVE:
            assert content is None and first == self._away.get(generation, 0)
            at = self._progress[generation]
            # Of a prompt, what is between its loops is not kept.
            kept = dataclasses.replace(at, position=min(at.chunks, default=at.position), chunks={})
            assert row.position == kept.position
            content = Content(generation, first, self.pages.read(generation, first, count), kept)
            self._away[generation] = first + count
            return RunnerOutput(batch.sequence, batch.stage, RowResults(batch.rows), content)
        assert content.generation == generation and content.progress.position == row.position
        assert first == content.first == self._back.get(generation, 0)
        assert count == len(content.cells)
        self.pages.write(generation, first, content.cells)
        self._progress[generation] = dataclasses.replace(content.progress, chunks={})
        self._back[generation] = first + count
        if self._back[generation] == self._away[generation]:
            del self._away[generation], self._back[generation]
        return RunnerOutput(batch.sequence, batch.stage, RowResults(batch.rows))

    def _run(self, batch: SchedulerOutput, row: Row) -> RowResult:
        at = self._progress[row.generation]
        if self.pages and row.depth:
            begins = batch.stage is Stage.BOUNDARY and row.exit_depth > 0  # its next position
            size = row.size or batch.num_tokens
            loops = row.depth + batch.num_loops - 1 if row.size else FULL_DEPTH
            self.pages.run(row.generation, row.position + begins, size, loops)
        if batch.stage is Stage.MIXED and row.size:
            self._run_chunk(row, at, batch.num_loops)
            return RowResult(row.generation, row.position, row.depth)
        assert row.position == at.position and not at.chunks
        tokens, hazard, leaves = [], None, None
        if batch.stage is Stage.PREFILL:
            assert row.tokens and row.depth == FULL_DEPTH and not row.exit_depth
            at.position += len(row.tokens)
            if row.ends_prompt:
                at.position, at.depth = at.position - 1, FULL_DEPTH
        elif batch.stage is Stage.TOKENS:
            assert at.depth == 0 and row.depth == row.exit_depth == FULL_DEPTH
            tokens = [self._sample(row, at, i) for i in range(batch.num_tokens)]
        else:
            assert row.exit_depth or row.depth
            assert not row.exit_depth or batch.stage in (Stage.CODA, Stage.BOUNDARY)
            assert batch.num_loops == 1
            assert not row.depth or batch.stage is not Stage.CODA
            if row.exit_depth:
                assert row.exit_depth == at.depth
                tokens = [self._sample(row, at, 0)]
            if row.depth and not (at.left and row.depth > 1):
                assert row.depth == at.depth + 1 <= FULL_DEPTH
                at.depth = row.depth
                hazard = np.float32(self._hazard(row.generation, at.position, at.depth))
                if self._leaves is not None and row.reads_gate:
                    leaves = at.left = self._leaves(row.generation, at.position, at.depth)
        return RowResult(
            row.generation,
            row.position,
            row.depth,
            tokens=tuple(tokens),
            logprobs=(-1.0,) * len(tokens),
            exit_probability=hazard if row.reads_gate else None,
            leaves=leaves if row.reads_gate else None,
        )

    def _run_chunk(self, row: Row, at: Progress, num_loops: int) -> None:
        assert not (row.exit_depth or row.reads_gate)
        assert row.depth + num_loops - 1 <= FULL_DEPTH
        if row.depth == 1:
            assert row.position == at.position and len(row.tokens) == row.size
            at.position += row.size
        else:
            assert not row.tokens and at.chunks[row.position] == (row.depth - 1, row.window)
        at.chunks[row.position] = (row.depth + num_loops - 1, row.window)
        loops = [depth for _, (depth, _) in sorted(at.chunks.items())]
        assert loops == sorted(set(loops), reverse=True)  # none has caught up with the one before
        if loops[0] == FULL_DEPTH:
            assert not row.ends_prompt or len(loops) == 1
            del at.chunks[min(at.chunks)]
            if row.ends_prompt:
                at.position, at.depth = at.position - 1, FULL_DEPTH

    def _sample(self, row: Row, at: Progress, i: int) -> int:
        """The coda: one output token, after which the next position begins."""
        assert at.sampled == row.output_index + i
        token = self._token(row.generation, at.sampled)
        at.position, at.depth, at.sampled, at.left = at.position + 1, 0, at.sampled + 1, False
        return token


def params(max_tokens=2, **fields):
    return SamplingParams(max_tokens=max_tokens, **fields)


def adaptive(max_tokens=2, **fields):
    """Hazards of 0.5 give 0.5, 0.75, 0.875: exit at depth 2."""
    return params(max_tokens, **{"exit_threshold": 0.7, "min_loops": 1, **fields})


def as_columns(batch: SchedulerOutput, results: list[RowResult]) -> RowResults:
    """What a runner makes of a batch, from results row by row."""

    def column(name, filler, dtype):
        return np.array([filler if (v := getattr(r, name)) is None else v for r in results], dtype)

    def of_tokens(name, dtype):
        filler = (0,) * batch.num_tokens
        return np.array([getattr(result, name) or filler for result in results], dtype)

    return RowResults(
        batch.rows,
        token=of_tokens("tokens", np.int32) if batch.has_coda else None,
        logprob=of_tokens("logprobs", np.float32) if batch.has_coda else None,
        exit_probability=column("exit_probability", 0, np.float32) if batch.reads_gate else None,
        leaves=(
            column("leaves", False, bool)
            if any(result.leaves is not None for result in results)
            else None
        ),
    )


def fake_engine(
    device: FakeDevice | None = None,
    *,
    num_pages: int = 1000,
    planes: int = 4,
    block_size: int = 4,
    eos_token_ids: tuple[int, ...] = (),
    exit_config: ExitConfig | None = None,
    max_in_flight: int = 2,
    tokens_per_dispatch: int = 1,
    run_ahead: bool = False,
    incremental: bool = False,
    watermark_ratio: float = 0.0,
    caches_prefixes: bool = False,
    host_pages: int = 1000,
    pages_per_transfer: int = 2,
    **scheduling,
) -> tuple[EngineCore, FakeDevice]:
    limits = ModelLimits(97, FULL_DEPTH, max_positions=512, eos_token_ids=eos_token_ids)
    config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 32, **scheduling})
    policy = exit_policy(exit_config or ExitConfig())
    geometry = KVGeometry(num_pages, planes, block_size)
    kv = KVAccounting(geometry, incremental, watermark_ratio)
    scheduler = Scheduler(
        config.resolve("cpu"),
        limits,
        policy,
        kv,
        tokens_per_dispatch,
        run_ahead,
        caches_prefixes=caches_prefixes,
        host_pages=host_pages,
        pages_per_transfer=pages_per_transfer,
    )
    device = device or FakeDevice()
    if caches_prefixes or config.enable_preemption:
        device.pages = FakePages(block_size)
        device.pages.hear_of_requests(scheduler)
    return EngineCore(scheduler, device, limits, policy, max_in_flight), device


def run(core: EngineCore, steps: int = 10_000) -> dict:
    """Steps until everything is done; the last output of each request."""
    outputs = {}
    for _ in range(steps):
        if not core.has_unfinished_requests():
            return outputs
        outputs |= {output.request_id: output for output in core.step()}
    raise AssertionError(f"not done after {steps} steps: {core.scheduler.stats()}")


def assert_empty(core: EngineCore, cached_blocks: int = 0) -> None:
    """Nothing is left of any request but what the prefix cache keeps."""
    stats = core.scheduler.stats()
    assert not core.has_unfinished_requests()
    assert stats.pop("free_blocks") == stats.pop("total_blocks") - cached_blocks
    assert stats.pop("cached_blocks") == cached_blocks
    assert set(stats.values()) == {0}
    assert core.scheduler.block_tables() == {}
