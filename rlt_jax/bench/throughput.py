"""bench throughput: whole requests, prefill and drain included."""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np

from rlt_jax.bench.driver import (
    BenchEngine,
    Configs,
    check_prompt,
    draw_depths,
    peak_bytes,
    random_prompts,
)
from rlt_jax.bench.report import Say, number
from rlt_jax.bench.synthetic import BenchModel
from rlt_jax.config import ExitConfig
from rlt_jax.outputs import RequestOutput
from rlt_jax.sampling_params import SamplingParams
from rlt_jax.validation import check_int, fail

_WARM_UP_TOKENS = 12
_MORE_ATTEMPTS = 3  # for repeats in which something was compiled, which do not count


@dataclasses.dataclass(frozen=True)
class ThroughputSpec:
    """requests: numbers of concurrent requests, each measured `repeats` times. closed_loop: twice
    as many requests, of which so many run at any time. params: of every request, but for
    max_tokens. mixed_depths: depths to draw from, per token."""

    requests: tuple[int, ...]
    prompt: int
    output_tokens: int
    params: SamplingParams
    closed_loop: bool = False
    repeats: int = 3
    mixed_depths: tuple[int, ...] = ()
    seed: int = 0

    def check(self, model: BenchModel) -> None:
        for requests in self.requests:
            check_int("--requests", requests, minimum=1)
        check_int("--output-tokens", self.output_tokens, minimum=1)
        check_int("--repeats", self.repeats, minimum=1)
        for depth in self.mixed_depths:
            check_int("--mixed-depths", depth, minimum=1, maximum=model.config.total_ut_steps)
        check_prompt(self.prompt, self.output_tokens, model.config)
        params, open_params = self.params, SamplingParams()
        for name in ("exit_threshold", "min_loops", "max_loops"):
            if self.mixed_depths and getattr(params, name) != getattr(open_params, name):
                rule = f"cannot be used together with --{name.replace('_', '-')}"
                fail("--mixed-depths", list(self.mixed_depths), rule)

    @property
    def positions(self) -> int:
        return self.prompt + self.output_tokens - 1

    def total(self, requests: int) -> int:
        return 2 * requests if self.closed_loop else requests


@dataclasses.dataclass(frozen=True)
class ThroughputRow:
    """One case: the median repeat by tokens/s. Times in s.

    tokens_per_s: output tokens; total_tokens_per_s: prompts counted too. ttft: time to first
    token, from submission. tpot: time per output token after the first, None with only one.
    mean_depth: loops of a decoded token.
    """

    requests: int
    prompt: int
    output_tokens: int
    closed_loop: bool
    layout: str
    kernels: str
    exit_threshold: float
    max_loops: int | None
    mixed_depths: tuple[int, ...]
    finished: int
    seconds: float
    tokens_per_s: float
    total_tokens_per_s: float
    all_tokens_per_s: tuple[float, ...]
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tpot_mean: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    mean_depth: float | None
    peak_bytes: int
    compiled_meanwhile: int


def prepare(spec: ThroughputSpec, model: BenchModel, configs: Configs) -> Configs:
    if spec.mixed_depths:
        tokens = max(spec.output_tokens, _WARM_UP_TOKENS)
        total = spec.total(max(spec.requests))
        depths = draw_depths(model.config, spec.mixed_depths, total, tokens, spec.seed)
        exits = ExitConfig(mode="trace", depths_by_request=depths)
        configs = dataclasses.replace(configs, exit=exits)
    return configs.fitted(model, max(spec.requests), spec.positions)


def run(spec: ThroughputSpec, engine: BenchEngine, say: Say) -> Iterator[ThroughputRow]:
    for requests in spec.requests:
        say(f"throughput: {requests} requests, warm-up")
        _warm_up(spec, engine, requests)
        repeats: list[_Repeat] = []
        spare = _MORE_ATTEMPTS
        while len(repeats) < spec.repeats:
            say(f"throughput: {requests} requests, repeat {len(repeats) + 1} of {spec.repeats}")
            compiled = engine.num_executables
            repeat = _measure(spec, engine, requests)
            repeat = dataclasses.replace(repeat, compiled=engine.num_executables - compiled)
            if repeat.compiled and spare:
                spare -= 1
            else:
                repeats.append(repeat)
        yield _row(spec, engine, requests, repeats)


@dataclasses.dataclass(frozen=True)
class _Repeat:
    seconds: float
    outputs: tuple[RequestOutput, ...]
    compiled: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def _params(spec: ThroughputSpec, max_tokens: int) -> SamplingParams:
    params = dataclasses.replace(spec.params, max_tokens=max_tokens, ignore_eos=True)
    if not spec.mixed_depths:
        return params
    depths = {"min_loops": min(spec.mixed_depths), "max_loops": max(spec.mixed_depths)}
    return dataclasses.replace(params, exit_threshold=1.0, **depths)


def _warm_up(spec: ThroughputSpec, engine: BenchEngine, requests: int) -> None:
    """The same prompts with short answers: every program's first runs record it."""
    rng = np.random.default_rng(spec.seed + 1)
    prompts = random_prompts(engine.model.config, requests, spec.prompt, rng)
    tokens = min(spec.output_tokens, _WARM_UP_TOKENS)
    trace_ids = [str(i) for i in range(requests)] if spec.mixed_depths else None
    engine.run(prompts, _params(spec, tokens), trace_ids=trace_ids)


def _measure(spec: ThroughputSpec, engine: BenchEngine, requests: int) -> _Repeat:
    total, params = spec.total(requests), _params(spec, spec.output_tokens)
    rng = np.random.default_rng(spec.seed)
    prompts = random_prompts(engine.model.config, total, spec.prompt, rng)
    trace_ids = [str(i) for i in range(total)]
    outputs: list[RequestOutput] = []
    submitted = 0

    def submit(count: int) -> None:
        nonlocal submitted
        end = min(submitted + count, total)
        ids = trace_ids[submitted:end] if spec.mixed_depths else None
        engine.submit(prompts[submitted:end], params, first_id=submitted, trace_ids=ids)
        submitted = end

    def refill(ended: list[RequestOutput]) -> None:
        outputs.extend(ended)
        submit(len(ended))

    started = time.perf_counter()
    submit(requests)
    engine.finish(refill)
    return _Repeat(time.perf_counter() - started, tuple(outputs))


def _row(
    spec: ThroughputSpec, engine: BenchEngine, requests: int, repeats: Sequence[_Repeat]
) -> ThroughputRow:
    configs = engine.configs
    best_first = sorted(repeats, key=lambda repeat: repeat.rate, reverse=True)
    median = best_first[len(repeats) // 2]
    metrics = [output.metrics for output in median.outputs]
    ttft = _mean_p50_p99([m.time_to_first_token for m in metrics])
    tpot = _mean_p50_p99([m.time_per_output_token for m in metrics])
    depths = [depth for output in median.outputs for depth in output.exit_depths[1:]]
    prompts = spec.prompt * len(median.outputs)
    return ThroughputRow(
        requests=requests,
        prompt=spec.prompt,
        output_tokens=spec.output_tokens,
        closed_loop=spec.closed_loop,
        layout=configs.cache.layout,
        kernels=configs.execution.kernels,
        exit_threshold=spec.params.exit_threshold,
        max_loops=spec.params.max_loops,
        mixed_depths=spec.mixed_depths,
        finished=len(median.outputs),
        seconds=median.seconds,
        tokens_per_s=median.rate,
        total_tokens_per_s=(median.tokens + prompts) / median.seconds,
        all_tokens_per_s=tuple(repeat.rate for repeat in repeats),
        **dict(zip(("ttft_mean", "ttft_p50", "ttft_p99"), ttft)),
        **dict(zip(("tpot_mean", "tpot_p50", "tpot_p99"), tpot)),
        mean_depth=float(np.mean(depths)) if depths else None,
        peak_bytes=peak_bytes(engine.model.device),
        compiled_meanwhile=sum(repeat.compiled for repeat in repeats),
    )


def _mean_p50_p99(seconds: Sequence[float | None]) -> tuple[float | None, ...]:
    known = [value for value in seconds if value is not None]
    if not known:
        return (None, None, None)
    return (float(np.mean(known)), *(float(np.percentile(known, q)) for q in (50, 99)))


COLUMNS = (
    "requests",
    "prompt + out",
    "layout",
    "kernels",
    "tok/s",
    "TTFT ms mean",
    "p50",
    "p99",
    "TPOT ms mean",
    "p50",
    "p99",
    "peak GB",
)


def table(rows: Sequence[ThroughputRow]) -> list[list[str]]:
    def ms(seconds: float | None) -> str:
        return number(None if seconds is None else 1e3 * seconds)

    return [
        [
            f"{row.requests}{' of ' + str(row.finished) if row.closed_loop else ''}",
            f"{row.prompt:,} + {row.output_tokens:,}",
            row.layout,
            row.kernels,
            number(row.tokens_per_s, 1),
            ms(row.ttft_mean),
            ms(row.ttft_p50),
            ms(row.ttft_p99),
            ms(row.tpot_mean),
            ms(row.tpot_p50),
            ms(row.tpot_p99),
            number(row.peak_bytes / 1e9),
        ]
        for row in rows
    ]
