"""bench preemption: how long a running request's slot is on its way to the host, and back."""

import collections
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from rlt_jax.bench.driver import BenchEngine, Configs, random_prompts
from rlt_jax.bench.report import Say, number, percent
from rlt_jax.bench.synthetic import BenchModel
from rlt_jax.engine.types import Row, Rows, RunnerOutput, SchedulerOutput, Stage, Transfer
from rlt_jax.runtime.programs import transfer_pages
from rlt_jax.runtime.runner import Runner, Ticket
from rlt_jax.sampling_params import SamplingParams
from rlt_jax.validation import check_int

_BEFORE, _AFTER = 8, 8  # output tokens of the request before and after it leaves
_OTHERS_TOKENS = 256  # of a request beside it: enough to last until it is back
_COPIES = 5


@dataclasses.dataclass(frozen=True)
class PreemptionSpec:
    """contexts: prompt tokens of the request that is saved; each `repeats` times."""

    contexts: tuple[int, ...]
    repeats: int = 3
    seed: int = 0

    def check(self, model: BenchModel) -> None:
        longest = model.config.max_position_embeddings - (_BEFORE + _AFTER) + 1
        for context in self.contexts:
            check_int("--context", context, minimum=1, maximum=longest)
        check_int("--repeats", self.repeats, minimum=1)


@dataclasses.dataclass(frozen=True)
class PreemptionRow:
    """One context; seconds are medians of the repeats.

    kv_bytes: K/V of the slot's pages. moved_bytes: with what fills up the last transfer.
    save_seconds, restore_seconds: nothing else going on, from the first transfer's submission until
    the last one has been collected. beside_save_seconds, beside_restore_seconds: in the engine,
    where transfers take turns with another request's tokens; tokens_meanwhile: how many of these
    there were during the save. copy_out_gb_per_s, copy_in_gb_per_s: of one transfer's bytes between
    pinned host memory and the device, as plain copies.
    """

    context: int
    layout: str
    transfers: int
    kv_bytes: int
    moved_bytes: int
    save_seconds: float
    restore_seconds: float
    beside_save_seconds: float
    beside_restore_seconds: float
    tokens_meanwhile: int
    all_save_seconds: tuple[float, ...]
    all_restore_seconds: tuple[float, ...]
    copy_out_gb_per_s: float
    copy_in_gb_per_s: float

    @property
    def save_gb_per_s(self) -> float:
        return self.moved_bytes / self.save_seconds / 1e9

    @property
    def restore_gb_per_s(self) -> float:
        return self.moved_bytes / self.restore_seconds / 1e9


class _Watch:
    """Notes when batches were submitted and collected; an engine.core.Observer."""

    def __init__(self):
        self.submitted: dict[Stage, float] = {}  # the first of each stage
        self.collected: dict[Stage, float] = {}  # the last one
        self.sampled = 0
        self.sampled_meanwhile = 0  # between the first SAVE and the first RESTORE

    @contextlib.contextmanager
    def submitting(self, batch: SchedulerOutput, id_of: Callable[[int], str]) -> Iterator[None]:
        self.submitted.setdefault(batch.stage, time.perf_counter())
        yield

    @contextlib.contextmanager
    def collecting(self, batch: SchedulerOutput) -> Iterator[None]:
        yield
        self.collected[batch.stage] = time.perf_counter()
        sampled = int(np.count_nonzero(batch.rows.exit_depth)) * batch.num_tokens
        self.sampled += sampled
        if Stage.SAVE in self.submitted and Stage.RESTORE not in self.submitted:
            self.sampled_meanwhile += sampled

    def lost(self, error: str) -> None:
        pass

    def seconds(self, stage: Stage) -> float:
        return self.collected[stage] - self.submitted[stage]


def prepare(spec: PreemptionSpec, model: BenchModel, configs: Configs) -> Configs:
    scheduler = dataclasses.replace(
        configs.scheduler, max_num_seqs=2, policy="priority", enable_preemption=True
    )
    configs = dataclasses.replace(configs, scheduler=scheduler)
    positions = max(max(spec.contexts) + _BEFORE + _AFTER, _tokens_beside(model))
    return configs.fitted(model, 2, positions)


def _tokens_beside(model: BenchModel) -> int:
    return min(_OTHERS_TOKENS, model.config.max_position_embeddings)


def run(spec: PreemptionSpec, engine: BenchEngine, say: Say) -> Iterator[PreemptionRow]:
    for context in spec.contexts:
        say(f"preemption: a request of {context:,} tokens")
        yield _measure(spec, engine, context)


def _measure(spec: PreemptionSpec, engine: BenchEngine, context: int) -> PreemptionRow:
    rng = np.random.default_rng(spec.seed)
    alone = [_save_and_restore(engine, context, rng) for _ in range(1 + spec.repeats)][1:]
    beside = [_preempt(engine, context, rng) for _ in range(1 + spec.repeats)][1:]  # one warms up
    counts = alone[0].counts
    plan = engine.parts.memory_plan
    page_bytes = plan.planes * plan.bytes_per_block
    copy_out, copy_in = _copy_rates(engine.model.device, counts[0] * page_bytes)
    median = sorted(beside, key=lambda watch: watch.seconds(Stage.SAVE))[len(beside) // 2]
    return PreemptionRow(
        context=context,
        layout=engine.configs.cache.layout,
        transfers=len(counts),
        kv_bytes=sum(counts) * page_bytes,
        moved_bytes=len(counts) * counts[0] * page_bytes,
        save_seconds=statistics.median_low(one.save_seconds for one in alone),
        restore_seconds=statistics.median_low(one.restore_seconds for one in alone),
        beside_save_seconds=median.seconds(Stage.SAVE),
        beside_restore_seconds=median.seconds(Stage.RESTORE),
        tokens_meanwhile=median.sampled_meanwhile,
        all_save_seconds=tuple(one.save_seconds for one in alone),
        all_restore_seconds=tuple(one.restore_seconds for one in alone),
        copy_out_gb_per_s=copy_out,
        copy_in_gb_per_s=copy_in,
    )


@dataclasses.dataclass(frozen=True)
class _Alone:
    """counts: pages of each transfer."""

    counts: list[int]
    save_seconds: float
    restore_seconds: float


def _save_and_restore(engine: BenchEngine, context: int, rng: np.random.Generator) -> _Alone:
    """The slot of a request between two of its tokens, by the runner alone; then it goes on."""
    core, parts = engine.parts.core, engine.parts
    (prompt,) = random_prompts(engine.model.config, 1, context, rng)
    engine.add("alone", prompt, SamplingParams(max_tokens=_BEFORE + _AFTER, ignore_eos=True))
    with engine.recording() as recorder:
        while recorder.total < _BEFORE:
            core.step()
    (table,) = core.scheduler.block_tables().values()
    at_once = transfer_pages(parts.programs.spec)
    firsts = range(0, len(table), at_once)
    transfers = [Transfer(first, min(at_once, len(table) - first)) for first in firsts]
    row = recorder.collected[-1].rows[0]
    results, save_seconds = _transfer(parts.runner, Stage.SAVE, row, transfers)
    saved = [
        dataclasses.replace(transfer, content=result.content)
        for transfer, result in zip(transfers, results, strict=True)
    ]
    _, restore_seconds = _transfer(parts.runner, Stage.RESTORE, row, saved)
    engine.finish()
    return _Alone([transfer.count for transfer in transfers], save_seconds, restore_seconds)


def _transfer(
    runner: Runner, stage: Stage, row: Row, transfers: Sequence[Transfer]
) -> tuple[list[RunnerOutput], float]:
    """Two on their way at once: (what was collected, seconds)."""
    rows = Rows.of([Row(row.generation, row.slot, row.position)])
    tickets: collections.deque[Ticket] = collections.deque()
    results: list[RunnerOutput] = []
    jax.block_until_ready(runner.state)
    started = time.perf_counter()
    for i, transfer in enumerate(transfers):
        tickets.append(runner.submit(SchedulerOutput(-1 - i, stage, rows, transfer=transfer)))
        if len(tickets) > 1:
            results.append(runner.collect(tickets.popleft()))
    results += map(runner.collect, tickets)
    return results, time.perf_counter() - started


def _preempt(engine: BenchEngine, context: int, rng: np.random.Generator) -> _Watch:
    """Two requests decode until a more urgent one takes the slot of the second."""
    core, watch = engine.parts.core, _Watch()
    (prompt,) = random_prompts(engine.model.config, 1, context, rng)
    core.observers += (watch,)
    try:
        params = SamplingParams(max_tokens=_BEFORE + _AFTER, ignore_eos=True, priority=1)
        longer = dataclasses.replace(params, max_tokens=_tokens_beside(engine.model))
        engine.add("other", prompt[:1], longer)
        engine.add("saved", prompt, params)
        while watch.sampled < 2 * _BEFORE:
            core.step()
        engine.add("urgent", prompt[:1], SamplingParams(max_tokens=1, ignore_eos=True))
        engine.finish()
    finally:
        core.observers = tuple(one for one in core.observers if one is not watch)
    if Stage.RESTORE not in watch.collected:
        raise RuntimeError("the request was not preempted: is there host memory for it?")
    return watch


def _copy_rates(device: jax.Device, num_bytes: int) -> tuple[float, float]:
    """GB/s of copies to pinned host memory and back, the best of some."""
    on_device = jax.sharding.SingleDeviceSharding(device)
    on_host = on_device.with_memory_kind("pinned_host")
    bits = np.random.default_rng(0).integers(0, 2**32, num_bytes // 4, np.uint32)
    there = jax.device_put(bits, on_device)
    best = {"out": 0.0, "in": 0.0}
    for _ in range(_COPIES):
        for way, target in (("out", on_host), ("in", on_device)):
            jax.block_until_ready(there)
            started = time.perf_counter()
            there = jax.block_until_ready(jax.device_put(there, target))
            best[way] = max(best[way], num_bytes / (time.perf_counter() - started) / 1e9)
    return best["out"], best["in"]


COLUMNS = (
    "context",
    "layout",
    "K/V MB",
    "transfers",
    "save ms",
    "GB/s",
    "of a copy's",
    "restore ms",
    "GB/s",
    "of a copy's",
    "beside: save ms",
    "restore ms",
    "other's tokens",
)


def table(rows: Sequence[PreemptionRow]) -> list[list[str]]:
    return [
        [
            f"{row.context:,}",
            row.layout,
            number(row.kv_bytes / 1e6, 1),
            str(row.transfers),
            number(1e3 * row.save_seconds, 1),
            number(row.save_gb_per_s, 1),
            percent(row.save_gb_per_s / row.copy_out_gb_per_s),
            number(1e3 * row.restore_seconds, 1),
            number(row.restore_gb_per_s, 1),
            percent(row.restore_gb_per_s / row.copy_in_gb_per_s),
            number(1e3 * row.beside_save_seconds, 1),
            number(1e3 * row.beside_restore_seconds, 1),
            str(row.tokens_meanwhile),
        ]
        for row in rows
    ]
