"""bench decode: what a token step costs once every prompt is in, against the memory's limit."""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np

from rlt_jax.bench.driver import (
    BenchEngine,
    Configs,
    Recorder,
    count_loops,
    draw_depths,
    peak_bytes,
    random_prompts,
)
from rlt_jax.bench.limits import Rates, Work, token_step
from rlt_jax.bench.report import Say, number, percent
from rlt_jax.bench.synthetic import BenchModel
from rlt_jax.config import ExitConfig
from rlt_jax.engine.types import SchedulerOutput
from rlt_jax.sampling_params import SamplingParams
from rlt_jax.validation import check_int, fail

_WARM_UP_TOKENS = 12
_ATTEMPTS = 3  # a measurement in which something was compiled is taken again


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """batches, contexts, depths: every combination is measured. tokens: token steps of each.
    skip: token steps left out at the start. mixed_depths: drawn per token, instead of depths."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    tokens: int
    depths: tuple[int, ...] = ()
    mixed_depths: tuple[int, ...] = ()
    skip: int = 4
    seed: int = 0

    @property
    def positions(self) -> int:
        """Of the longest request: the last sampled token is never fed back."""
        return max(self.contexts) + self.tokens

    def check(self, model: BenchModel, configs: Configs) -> None:
        """Raises ValueError that names the flag, the value and the rule."""
        full = model.config.total_ut_steps
        for flag, values in (("--batch", self.batches), ("--context", self.contexts)):
            for value in values:
                check_int(flag, value, minimum=1)
        for depth in self.depths:
            check_int("--depth", depth, minimum=1, maximum=full)
        for depth in self.mixed_depths:
            check_int("--mixed-depths", depth, minimum=1, maximum=full)
        check_int("--skip", self.skip, minimum=0)
        check_int("--tokens", self.tokens, minimum=self.skip + 2)
        room = model.config.max_position_embeddings - self.tokens
        for context in self.contexts:
            if context > room:
                fail("--context", context, f"with --tokens {self.tokens} must be <= {room}")
        scheduler = configs.scheduler.resolve(model.device.platform)
        seqs = configs.scheduler.max_num_seqs or max(self.batches)
        rows = min(seqs, scheduler.max_num_batched_tokens)
        for batch in self.batches:
            if batch > rows:
                rule = f"must be <= {rows}: --max-num-seqs and --max-num-batched-tokens bound it"
                fail("--batch", batch, rule)


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    """One case. Times in ms. Steps are token steps: one token for every row of the batch.

    first_position, last_position: where the tokens of the measured steps lie (the first step's
    and the last one's). mean_depth: loops a token. loops: recurrent steps that ran in the range.
    read_bytes, flops: what a step must read and compute. back_to_back_ms: a step's executables
    dispatched without the scheduler; idle_share: what of the wall is more than that.
    """

    batch: int
    context: int
    depth: int | None
    mixed_depths: tuple[int, ...]
    layout: str
    kernels: str
    first_position: int
    last_position: int
    steps: float
    mean_depth: float
    ms_per_step: float
    median_ms_per_step: float
    tokens_per_s: float
    loops: int
    ms_per_loop: float
    back_to_back_ms: float
    idle_share: float
    read_bytes: float
    flops: float
    peak_bytes: int
    compiled_meanwhile: int
    limit_ms: float | None = None
    fraction: float | None = None

    def with_limit(self, rates: Rates | None) -> "DecodeRow":
        if rates is None:
            return self
        limit = 1e3 * Work(self.read_bytes, self.flops).limit_s(rates)
        return dataclasses.replace(self, limit_ms=limit, fraction=limit / self.ms_per_step)


def prepare(spec: DecodeSpec, model: BenchModel, configs: Configs) -> Configs:
    """The configs of an engine that runs every case of `spec`."""
    scheduler = dataclasses.replace(
        configs.scheduler, max_prefill_batches_before_decode=2**30
    )  # all prompts first
    exits = ExitConfig()
    if spec.mixed_depths:
        rows, tokens = max(spec.batches), max(spec.tokens, _WARM_UP_TOKENS) + 1
        depths = draw_depths(model.config, spec.mixed_depths, rows, tokens, spec.seed)
        exits = ExitConfig(mode="trace", depths_by_request=depths)
    configs = dataclasses.replace(configs, scheduler=scheduler, exit=exits)
    return configs.fitted(model, max(spec.batches), spec.positions)


def run(spec: DecodeSpec, engine: BenchEngine, say: Say) -> Iterator[DecodeRow]:
    """Measures every case on one engine of `prepare`'s configs."""
    plan, model = engine.parts.memory_plan, engine.model
    pages = -(-spec.positions // plan.block_size) * plan.planes
    if max(spec.batches) * pages > plan.num_blocks:
        rule = f"needs {pages} KV blocks a request, the pool has {plan.num_blocks}"
        fail("--batch", max(spec.batches), rule)
    for depth in spec.depths if not spec.mixed_depths else (None,):
        for context in spec.contexts:
            for batch in spec.batches:
                shown = spec.mixed_depths if depth is None else depth
                say(f"decode: batch {batch}, context {context}, depth {shown}")
                yield _measure(spec, engine, model, batch, context, depth)


def _measure(spec, engine, model, batch: int, context: int, depth: int | None) -> DecodeRow:
    rng = np.random.default_rng(spec.seed)
    trace_ids = [str(i) for i in range(batch)] if depth is None else None
    warm_up = random_prompts(model.config, batch, min(context, 16), rng)
    engine.run(warm_up, _params(spec, depth, _WARM_UP_TOKENS), trace_ids=trace_ids)
    prompts = random_prompts(model.config, batch, context, rng)
    params = _params(spec, depth, spec.tokens + 1)
    for _ in range(_ATTEMPTS):
        compiled = engine.num_executables
        with engine.recording() as recorder:
            steps = _Steps(recorder, batch)
            engine.submit(prompts, params, trace_ids=trace_ids)
            engine.finish(steps.note)
        if engine.num_executables == compiled:
            break
    window = steps.window(spec.skip + 1, spec.tokens + 1)
    compiled = engine.num_executables - compiled
    row = _row(spec, engine, window, batch, context, depth)
    return dataclasses.replace(row, compiled_meanwhile=compiled)


def _params(spec: DecodeSpec, depth: int | None, max_tokens: int) -> SamplingParams:
    low, high = (min(spec.mixed_depths), max(spec.mixed_depths)) if depth is None else (depth,) * 2
    return SamplingParams(
        max_tokens=max_tokens, min_loops=low, max_loops=high, exit_threshold=1.0, ignore_eos=True
    )


@dataclasses.dataclass(frozen=True)
class _Moment:
    """After an engine step: batches finished and tokens of each row (in order of admission)."""

    time: float
    batches: int
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Window:
    """From the first to the last of its moments; batches: those finished in between."""

    moments: tuple[_Moment, ...]
    batches: tuple[SchedulerOutput, ...]

    @property
    def seconds(self) -> float:
        return self.moments[-1].time - self.moments[0].time

    @property
    def tokens(self) -> int:
        return sum(self.moments[-1].tokens) - sum(self.moments[0].tokens)


class _Steps:
    """Notes when tokens come."""

    def __init__(self, recorder: Recorder, rows: int):
        self._recorder = recorder
        self._rows = rows
        self._moments: list[_Moment] = []
        self._total = 0

    def note(self, _: object = None) -> None:
        """After every engine step."""
        recorder = self._recorder
        if recorder.total == self._total:
            return
        now = time.perf_counter()
        self._total = recorder.total
        tokens = tuple(recorder.sampled[key] for key in sorted(recorder.sampled))
        if len(tokens) == self._rows:
            self._moments.append(_Moment(now, len(recorder.collected), tokens))

    def window(self, first: int, last: int) -> _Window:
        """From the moment when every row has `first` tokens to when one has `last`."""
        start = next(i for i, m in enumerate(self._moments) if min(m.tokens) >= first)
        end = next(i for i, m in enumerate(self._moments) if max(m.tokens) >= last)
        if end <= start:
            rule = "must be larger: some rows end before others begin"
            fail("--tokens", last - 1, rule)
        moments = tuple(self._moments[start : end + 1])
        batches = self._recorder.collected[moments[0].batches : moments[-1].batches]
        return _Window(moments, tuple(batches))


def _row(spec, engine: BenchEngine, window: _Window, batch, context, depth) -> DecodeRow:
    model, configs = engine.model, engine.configs
    steps = window.tokens / batch
    mean_depth, positions = _depth_and_positions(spec, engine, window, context, depth)
    work = token_step(model.config, model.policy, batch, mean_depth, positions)
    loops = count_loops(window.batches, model.config.total_ut_steps)
    back_to_back = engine.replay(window.batches)
    first, last = window.moments[0].tokens, window.moments[-1].tokens
    durations = [
        (b.time - a.time) * batch / (sum(b.tokens) - sum(a.tokens))
        for a, b in zip(window.moments, window.moments[1:])
    ]
    return DecodeRow(
        batch=batch,
        context=context,
        depth=depth,
        mixed_depths=spec.mixed_depths if depth is None else (),
        layout=configs.cache.layout,
        kernels=configs.execution.kernels,
        first_position=context + min(first) - 1,
        last_position=context + max(last) - 2,
        steps=steps,
        mean_depth=mean_depth,
        ms_per_step=1e3 * window.seconds / steps,
        median_ms_per_step=1e3 * float(np.median(durations)),
        tokens_per_s=window.tokens / window.seconds,
        loops=loops,
        ms_per_loop=1e3 * window.seconds / loops,
        back_to_back_ms=1e3 * back_to_back / steps,
        idle_share=1 - back_to_back / window.seconds,
        read_bytes=work.read_bytes,
        flops=work.flops,
        peak_bytes=peak_bytes(model.device),
        compiled_meanwhile=0,
    )


def _depth_and_positions(spec, engine, window: _Window, context, depth) -> tuple[float, float]:
    """Means over the window's tokens: loops, and K/V positions read by all loops together."""
    first, last = window.moments[0].tokens, window.moments[-1].tokens
    loops = positions = 0
    for row, (start, end) in enumerate(zip(first, last)):
        for index in range(start, end):  # of the output token; its input lies one before
            drawn = engine.configs.exit.depths_by_request
            deep = drawn[str(row)][index] if depth is None else depth
            loops += deep
            positions += deep * (context + index)
    return loops / window.tokens, positions / window.tokens


COLUMNS = (
    "batch",
    "context",
    "positions",
    "depth",
    "layout",
    "kernels",
    "ms/step",
    "median",
    "tok/s",
    "ms/loop",
    "GB/step",
    "limit ms",
    "fraction",
    "idle",
)


def table(rows: Sequence[DecodeRow]) -> list[list[str]]:
    return [
        [
            str(row.batch),
            f"{row.context:,}",
            f"{row.first_position:,}-{row.last_position:,}",
            str(row.depth or f"{row.mean_depth:.2f} of {','.join(map(str, row.mixed_depths))}"),
            row.layout,
            row.kernels,
            number(row.ms_per_step, 3),
            number(row.median_ms_per_step, 3),
            number(row.tokens_per_s, 1),
            number(row.ms_per_loop, 3),
            number(row.read_bytes / 1e9, 3),
            number(row.limit_ms, 3),
            percent(row.fraction),
            percent(row.idle_share),
        ]
        for row in rows
    ]
