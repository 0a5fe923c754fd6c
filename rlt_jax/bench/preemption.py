"""bench preemption: how long a running request's slot is on its way to the host, and back."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from rlt_jax.bench.driver import BenchEngine, Configs, check_prompt, random_prompts
from rlt_jax.bench.report import Say, number, percent
from rlt_jax.bench.synthetic import BenchModel
from rlt_jax.engine.types import SchedulerOutput, Stage
from rlt_jax.sampling_params import SamplingParams
from rlt_jax.validation import check_int

_BEFORE, _AFTER = 8, 8  # output tokens of the request before and after it leaves
_COPIES = 5


@dataclasses.dataclass(frozen=True)
class PreemptionSpec:
    """contexts: prompt tokens of the request that is saved; each `repeats` times."""

    contexts: tuple[int, ...]
    repeats: int = 3
    seed: int = 0

    def check(self, model: BenchModel) -> None:
        for context in self.contexts:
            check_prompt(context, _BEFORE + _AFTER, model.config)
        check_int("--repeats", self.repeats, minimum=1)


@dataclasses.dataclass(frozen=True)
class PreemptionRow:
    """One context; seconds of the median repeat, from the first batch's submission until the last
    one has been collected.

    kv_bytes: K/V of the positions saved, whole pages. moved_bytes: with what fills up the last
    transfer. copy_out_gb_per_s, copy_in_gb_per_s: of one transfer between pinned host memory and
    the device, nothing else going on.
    """

    context: int
    layout: str
    positions: int
    transfers: int
    kv_bytes: int
    moved_bytes: int
    save_seconds: float
    restore_seconds: float
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
    """Notes when transfers were submitted and collected; an engine.core.Observer."""

    def __init__(self):
        self.batches: list[SchedulerOutput] = []
        self.submitted: dict[int, float] = {}
        self.collected: dict[int, float] = {}
        self.sampled = 0

    @contextlib.contextmanager
    def submitting(self, batch: SchedulerOutput, id_of: Callable[[int], str]) -> Iterator[None]:
        self.submitted[batch.sequence] = time.perf_counter()
        if batch.transfer is not None:
            self.batches.append(batch)
        yield

    @contextlib.contextmanager
    def collecting(self, batch: SchedulerOutput) -> Iterator[None]:
        yield
        self.collected[batch.sequence] = time.perf_counter()
        self.sampled += int(np.count_nonzero(batch.rows.exit_depth)) * batch.num_tokens

    def lost(self, error: str) -> None:
        pass

    def of(self, stage: Stage) -> list[SchedulerOutput]:
        return [batch for batch in self.batches if batch.stage is stage]

    def seconds(self, stage: Stage) -> float:
        sequences = [batch.sequence for batch in self.of(stage)]
        return self.collected[sequences[-1]] - self.submitted[sequences[0]]


def prepare(spec: PreemptionSpec, model: BenchModel, configs: Configs) -> Configs:
    scheduler = dataclasses.replace(
        configs.scheduler, max_num_seqs=1, policy="priority", enable_preemption=True
    )
    configs = dataclasses.replace(configs, scheduler=scheduler)
    return configs.fitted(model, 1, max(spec.contexts) + _BEFORE + _AFTER)


def run(spec: PreemptionSpec, engine: BenchEngine, say: Say) -> Iterator[PreemptionRow]:
    for context in spec.contexts:
        say(f"preemption: a request of {context:,} tokens")
        yield _measure(spec, engine, context)


def _measure(spec: PreemptionSpec, engine: BenchEngine, context: int) -> PreemptionRow:
    rng = np.random.default_rng(spec.seed)
    watches = [_preempt(engine, context, rng) for _ in range(1 + spec.repeats)][1:]  # one warms up
    plan, first = engine.parts.memory_plan, watches[0]
    transfers = first.of(Stage.SAVE)
    pages = sum(batch.transfer.count for batch in transfers)
    page_bytes = plan.planes * plan.bytes_per_block
    transfer_bytes = transfers[0].transfer.count * page_bytes
    copy_out, copy_in = _copy_rates(engine.model.device, transfer_bytes)
    saves = tuple(watch.seconds(Stage.SAVE) for watch in watches)
    restores = tuple(watch.seconds(Stage.RESTORE) for watch in watches)
    return PreemptionRow(
        context=context,
        layout=engine.configs.cache.layout,
        positions=int(transfers[0].rows.position[0]),
        transfers=len(transfers),
        kv_bytes=pages * page_bytes,
        moved_bytes=len(transfers) * transfer_bytes,
        save_seconds=statistics.median_low(saves),
        restore_seconds=statistics.median_low(restores),
        all_save_seconds=saves,
        all_restore_seconds=restores,
        copy_out_gb_per_s=copy_out,
        copy_in_gb_per_s=copy_in,
    )


def _preempt(engine: BenchEngine, context: int, rng: np.random.Generator) -> _Watch:
    """A request, in the midst of which a more urgent one takes its only slot."""
    core, watch = engine.parts.core, _Watch()
    (prompt,) = random_prompts(engine.model.config, 1, context, rng)
    core.observers += (watch,)
    try:
        params = SamplingParams(max_tokens=_BEFORE + _AFTER, ignore_eos=True, priority=1)
        engine.add("saved", prompt, params)
        while watch.sampled < _BEFORE:
            core.step()
        engine.add("urgent", prompt[:1], SamplingParams(max_tokens=1, ignore_eos=True))
        engine.finish()
    finally:
        core.observers = tuple(one for one in core.observers if one is not watch)
    if not watch.of(Stage.RESTORE):
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
        ]
        for row in rows
    ]
