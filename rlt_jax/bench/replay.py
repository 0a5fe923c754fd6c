"""bench replay: a recording in every mode: the same outputs, and how near the speed is to what
the depths allow."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rlt_jax.bench.driver import BenchEngine, Configs, count_loops, peak_bytes
from rlt_jax.bench.modes import Mode
from rlt_jax.bench.recording import RecordedRequest, Recording
from rlt_jax.bench.report import Say, number, percent
from rlt_jax.bench.synthetic import BenchModel
from rlt_jax.config import CacheConfig, ExitConfig
from rlt_jax.engine.types import SchedulerOutput
from rlt_jax.outputs import RequestOutput
from rlt_jax.sampling_params import SamplingParams
from rlt_jax.validation import check_int

_MORE_ATTEMPTS = 3  # for repeats in which something was compiled, which do not count
_FULL = "full depth of "  # before a request's id: the trace of the same request at full depth


class OutputMismatchError(RuntimeError):
    """A replay gave another output than was recorded."""


@dataclasses.dataclass(frozen=True)
class ReplaySpec:
    """exact: other tokens are an error, and not only counted."""

    recording: Recording
    mode: Mode
    repeats: int = 3
    exact: bool = True

    def check(self, cache: CacheConfig) -> None:
        check_int("--repeats", self.repeats, minimum=1)
        self.mode.check_with(cache)


@dataclasses.dataclass(frozen=True)
class ReplayRow:
    """What one engine measured in a mode; seconds of the median repeats.

    recording: the start of the recording's fingerprint. width: requests at once.
    fixed_seconds: the same requests with every token at full depth. prefill_seconds: with one
    output token each. back_to_back_seconds: the executables of the median repeat without the
    scheduler; idle_share: what of the wall is more than that. submit_seconds, wait_seconds: the
    host's, dispatching batches and waiting for results; where it never waits, it is what all wait
    for. occupancy: real rows of the rows computed, over all loops of decode rows. mean_rows: real
    rows in such a loop.
    ideal_seconds: see `ideal_seconds`; fraction: of the ideal throughput.
    """

    recording: str
    mode: str
    in_flight: str
    kernels: str
    layout: str
    width: int
    requests: int
    output_tokens: int
    mean_depth: float
    differing_requests: int
    seconds: float
    all_seconds: tuple[float, ...]
    tokens_per_s: float
    fixed_seconds: float
    fixed_tokens_per_s: float
    prefill_seconds: float
    back_to_back_seconds: float
    idle_share: float
    submit_seconds: float
    wait_seconds: float
    occupancy: float
    mean_rows: float
    peak_bytes: int
    compiled_meanwhile: int
    ideal_seconds: float | None = None
    ideal_tokens_per_s: float | None = None
    fraction: float | None = None

    def with_ideal(self, seconds: float) -> "ReplayRow":
        return dataclasses.replace(
            self,
            ideal_seconds=seconds,
            ideal_tokens_per_s=self.output_tokens / seconds,
            fraction=seconds / self.seconds,
        )


def prepare(spec: ReplaySpec, model: BenchModel, configs: Configs) -> Configs:
    recording = spec.recording
    depths = {request.id: request.depths for request in recording.requests}
    full = (recording.full_depth,)
    depths |= {_FULL + name: full * len(recorded) for name, recorded in depths.items()}
    scheduler = dataclasses.replace(
        configs.scheduler, max_num_seqs=configs.scheduler.max_num_seqs or recording.width
    )
    configs = dataclasses.replace(
        configs,
        scheduler=spec.mode.scheduler(scheduler),
        exit=ExitConfig(mode="trace", depths_by_request=depths),
        execution=spec.mode.execution(configs.execution),
    )
    return configs.fitted(model, scheduler.max_num_seqs, recording.positions)


def run(spec: ReplaySpec, engine: BenchEngine, say: Say) -> Iterator[ReplayRow]:
    """Measures one mode. Raises OutputMismatchError."""
    recording, mode, configs = spec.recording, spec.mode, engine.configs
    medians: dict[str, _Run] = {}
    repeats: list[_Run] = []
    for work in ("recorded", "full depth", "prefill"):
        say(f"replay: {mode}, {work}")
        _run_once(spec, engine, work)  # warms up
        measured = _repeat(spec, engine, work)
        medians[work] = sorted(measured, key=lambda run: run.seconds)[len(measured) // 2]
        repeats += measured
    median, fixed_seconds = medians["recorded"], medians["full depth"].seconds
    back_to_back = engine.replay(median.batches)
    rows, loops, padded_rows = _count_rows(engine, median.batches)
    yield ReplayRow(
        recording=recording.fingerprint[:12],
        mode=mode.scheduling,
        in_flight=mode.in_flight,
        kernels=mode.kernels,
        layout=configs.cache.layout,
        width=configs.scheduler.max_num_seqs,
        requests=len(recording.requests),
        output_tokens=recording.output_tokens,
        mean_depth=recording.mean_depth,
        differing_requests=max(run.differing for run in repeats),
        seconds=median.seconds,
        all_seconds=tuple(run.seconds for run in repeats[: spec.repeats]),
        tokens_per_s=recording.output_tokens / median.seconds,
        fixed_seconds=fixed_seconds,
        fixed_tokens_per_s=recording.output_tokens / fixed_seconds,
        prefill_seconds=medians["prefill"].seconds,
        back_to_back_seconds=back_to_back,
        idle_share=1 - back_to_back / median.seconds,
        submit_seconds=median.submit_seconds,
        wait_seconds=median.wait_seconds,
        occupancy=rows / padded_rows,
        mean_rows=rows / loops,
        peak_bytes=peak_bytes(engine.model.device),
        compiled_meanwhile=sum(run.compiled for run in repeats),
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    seconds: float
    submit_seconds: float
    wait_seconds: float
    batches: tuple[SchedulerOutput, ...]
    differing: int
    compiled: int


def _repeat(spec: ReplaySpec, engine: BenchEngine, work: str) -> list[_Run]:
    """The repeats that count."""
    runs: list[_Run] = []
    spare = _MORE_ATTEMPTS
    while len(runs) < spec.repeats:
        run = _run_once(spec, engine, work)
        if run.compiled and spare:
            spare -= 1
        else:
            runs.append(run)
    return runs


def _run_once(spec: ReplaySpec, engine: BenchEngine, work: str) -> _Run:
    """All requests at once, as far as the width lets them: as recorded, at full depth, or the
    prompts with one output token each."""
    recording = spec.recording
    params = SamplingParams(
        min_loops=1, max_loops=recording.full_depth, ignore_eos=True, **recording.sampling
    )
    outputs: list[RequestOutput] = []
    compiled = engine.num_executables
    with engine.recording() as recorder:
        started = time.perf_counter()
        for request in recording.requests:
            tokens = 1 if work == "prefill" else len(request.token_ids)
            own = dataclasses.replace(params, max_tokens=tokens, seed=request.seed)
            trace_id = _FULL + request.id if work == "full depth" else request.id
            engine.add(request.id, request.prompt, own, trace_id)
        engine.finish(outputs.extend)
        seconds = time.perf_counter() - started
    differing = 0
    if work == "recorded":
        differing = count_differing(recording, outputs, spec.mode, spec.exact)
    compiled = engine.num_executables - compiled
    return _Run(
        seconds,
        recorder.submit_seconds,
        recorder.wait_seconds,
        tuple(recorder.collected),
        differing,
        compiled,
    )


def count_differing(
    recording: Recording, outputs: Iterable[RequestOutput], mode: Mode, exact: bool
) -> int:
    """Requests with other tokens than recorded. Raises OutputMismatchError for the first one if
    `exact`, and always for another depth: depths are replayed, not computed."""
    by_id = {output.request_id: output for output in outputs}
    where = f"as recorded ({recording.made_by}); the mode is {mode}"
    differing = 0
    for request in recording.requests:
        output = by_id[request.id]
        depth = _first_difference("depth", request, output.exit_depths, request.depths)
        token = _first_difference("output token", request, output.token_ids, request.token_ids)
        differing += token is not None
        wrong = depth or (token if exact else None)
        if wrong:
            raise OutputMismatchError(f"{wrong}, {where}")
    return differing


def _first_difference(
    what: str, request: RecordedRequest, found: Sequence[int], recorded: Sequence[int]
) -> str | None:
    for i, (ours, theirs) in enumerate(zip(found, recorded, strict=True)):
        if ours != theirs:
            return f"request {request.id!r}, {what} {i} = {ours}: must be {theirs}"
    return None


def _count_rows(engine: BenchEngine, batches: Sequence[SchedulerOutput]) -> tuple[int, int, int]:
    """Over all loops of decode rows: the rows that ran them, the loops, the padded rows."""
    rows = loops = padded_rows = 0
    for batch in batches:
        count = count_loops([batch], engine.model.config.total_ut_steps)
        loops += count
        # Rows that only sample run no loop.
        rows += count * int(np.count_nonzero((batch.rows.size == 0) & (batch.rows.depth > 0)))
        padded_rows += count * engine.parts.runner.padded_decode_rows(batch)
    return rows, loops, padded_rows


def ideal_seconds(recording: Recording, rows: Iterable[ReplayRow]) -> float:
    """What the requests would take if a loop cost what it does at full depth, in the mode that
    is fastest there: its prefill, and of its decode time the share of the loops that run."""
    best = min(rows, key=lambda row: row.fixed_seconds)
    decode = max(0.0, best.fixed_seconds - best.prefill_seconds)
    return best.prefill_seconds + decode * recording.mean_depth / recording.full_depth


def compare_with_ideal(recording: Recording, rows: Sequence[ReplayRow]) -> list[ReplayRow]:
    """The rows of all modes, once each has been measured."""
    ideal = ideal_seconds(recording, rows)
    return [row.with_ideal(ideal) for row in rows]


COLUMNS = (
    "mode",
    "in flight",
    "kernels",
    "width",
    "same",
    "depth",
    "tok/s",
    "at full depth",
    "ideal",
    "of the ideal",
    "idle",
    "host waits",
    "occupancy",
)


def table(rows: Sequence[ReplayRow]) -> list[list[str]]:
    return [
        [
            row.mode,
            row.in_flight,
            row.kernels,
            str(row.width),
            f"{row.requests - row.differing_requests} of {row.requests}",
            number(row.mean_depth),
            number(row.tokens_per_s, 1),
            number(row.fixed_tokens_per_s, 1),
            number(row.ideal_tokens_per_s, 1),
            percent(row.fraction),
            percent(row.idle_share),
            percent(row.wait_seconds / row.seconds),
            percent(row.occupancy),
        ]
        for row in rows
    ]
