"""bench soak: thousands of short requests with everything on, in waves: when a wave is over, every
request of it has ended, every block is back, and the process has not grown."""

import contextlib
import ctypes
import dataclasses
import gc
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from rlt_jax.bench.driver import BenchEngine, Configs, peak_bytes
from rlt_jax.bench.report import Say, number
from rlt_jax.bench.synthetic import BenchModel
from rlt_jax.outputs import RequestOutput
from rlt_jax.sampling_params import SamplingParams
from rlt_jax.validation import check_float, check_int, fail

_BEGINNINGS, _BEGINNING_TOKENS = 6, (16, 24, 32)  # what prompts share
_OWN_TOKENS, _OUTPUT_TOKENS = 16, 16  # of a request at most
_MOST_POSITIONS = max(_BEGINNING_TOKENS) + _OWN_TOKENS + _OUTPUT_TOKENS - 1
_WAVE_REQUESTS = (20, 200)  # after the first wave, the warm-up
_CANCEL_STEPS = 60  # a cancel comes at most so many steps after its request
_POOL_POSITIONS = 256  # where the user leaves the KV pool open: of four long requests
_STUCK_STEPS = 10_000  # in which no request ends


@dataclasses.dataclass(frozen=True)
class SoakSpec:
    """requests: in all, a tenth of them for warming up. cancel: the share that is cancelled at some
    time, or not any more. max_waiting: no more are added while so many wait. max_growth: MB that
    the process may grow by after the warm-up."""

    requests: int
    cancel: float = 0.2
    max_waiting: int = 32
    max_growth: int = 50
    seed: int = 0

    def check(self) -> None:
        check_int("--requests", self.requests, minimum=1)
        check_float("--cancel", self.cancel, "in [0, 1]", lambda share: 0 <= share <= 1)
        check_int("--max-waiting", self.max_waiting, minimum=1)
        check_int("--max-growth", self.max_growth, minimum=0)


@dataclasses.dataclass(frozen=True)
class SoakRow:
    """What became of the requests, and what is left of them. problems: what does not add up;
    empty: nothing.

    length, stop, abort, error: requests by how they ended. hits: those that found some of their
    prompt cached. preemptions: times that one had to leave its slot. most_...: at any step;
    most_host_blocks: of saved requests. free_blocks, cached_blocks: at the end. rss_...: bytes of
    the process after the warm-up and at the end.
    """

    requests: int
    seed: int
    length: int
    stop: int
    abort: int
    error: int
    output_tokens: int
    mean_depth: float | None
    seconds: float
    requests_per_s: float
    steps: int
    waves: int
    hits: int
    prompt_tokens: int
    cached_prompt_tokens: int
    preemptions: int
    most_waiting: int
    most_used_blocks: int
    most_host_blocks: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    warm_up_requests: int
    rss_after_warm_up: int
    rss_at_end: int
    rss_growth: int
    compiled_meanwhile: int
    problems: tuple[str, ...]


def prepare(spec: SoakSpec, model: BenchModel, configs: Configs) -> Configs:
    """A KV pool that is too small for what runs at once, where the user left its size open."""
    context = model.config.max_position_embeddings
    if context < _MOST_POSITIONS:
        fail("max_position_embeddings", context, f"must be >= {_MOST_POSITIONS} for a soak")
    cache = configs.cache
    planes = model.config.total_ut_steps if cache.layout == "last_exited" else 1
    least = planes * -(-_MOST_POSITIONS // cache.block_size)
    check_int("--num-blocks", cache.num_blocks, minimum=least, optional=True)
    itemsize = np.dtype(model.policy.kv_dtype).itemsize
    num_bytes = least * cache.block_size * model.config.kv_bytes_per_position(itemsize)
    given = cache.kv_cache_memory_bytes
    check_int("--kv-cache-memory-bytes", given, minimum=num_bytes, optional=True)
    if cache.num_blocks is None and cache.kv_cache_memory_bytes is None:
        pages = -(-_POOL_POSITIONS // cache.block_size)
        cache = dataclasses.replace(cache, num_blocks=planes * pages)
    return dataclasses.replace(configs, cache=cache)


def run(spec: SoakSpec, engine: BenchEngine, say: Say) -> Iterator[SoakRow]:
    soak = _Soak(spec, engine)
    for done in soak.waves():
        say(f"soak: {done:,} of {spec.requests:,} requests")
    yield soak.row()


@dataclasses.dataclass(frozen=True)
class _Request:
    """cancel_after: steps after it came (None: never)."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    cancel_after: int | None


class _Draw:
    """Requests, one after the other, all from one seed."""

    def __init__(self, spec: SoakSpec, vocab_size: int, adaptive: bool):
        self._spec, self._vocab_size, self._adaptive = spec, vocab_size, adaptive
        self.rng = np.random.default_rng(spec.seed)
        self._beginnings = [self._tokens(max(_BEGINNING_TOKENS)) for _ in range(_BEGINNINGS)]

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(0, self._vocab_size, count).tolist())

    def request(self, number: int) -> _Request:
        rng = self.rng
        prompt = self._tokens(int(rng.integers(1, _OWN_TOKENS + 1)))
        if rng.random() < 0.75:
            beginning = self._beginnings[rng.integers(_BEGINNINGS)]
            prompt = beginning[: rng.choice(_BEGINNING_TOKENS)] + prompt
        stops = self._tokens(16) if rng.random() < 0.25 else ()
        threshold = float(rng.choice((0.3, 0.5, 0.7, 1.0)))
        params = SamplingParams(
            max_tokens=int(rng.integers(1, _OUTPUT_TOKENS + 1)),
            temperature=float(rng.choice((0.0, 0.0, 0.8))),
            seed=int(rng.integers(2**62)),
            exit_threshold=threshold if self._adaptive else 1.0,
            stop_token_ids=stops,
            priority=int(rng.integers(-1, 2)),
            cache_salt=(None, None, None, "a", "b")[rng.integers(5)],
        )
        is_cancelled = rng.random() < self._spec.cancel
        cancel_after = int(rng.integers(_CANCEL_STEPS)) if is_cancelled else None
        return _Request(str(number), prompt, params, cancel_after)


class _Soak:
    """Adds and cancels requests, and keeps account of them."""

    def __init__(self, spec: SoakSpec, engine: BenchEngine):
        self._spec, self._parts = spec, engine.parts
        self._core = engine.parts.core
        adaptive = engine.configs.exit.mode != "weighted"
        self._draw = _Draw(spec, engine.model.config.vocab_size, adaptive)
        self._compiled_before = len(engine.parts.programs.compiled)
        self._started = time.perf_counter()
        self._num_added = self._steps = self._waves = 0
        self._live: dict[str, _Request] = {}
        self._cancels: dict[int, list[str]] = {}  # by the step in which they come
        self._cancelled: set[str] = set()  # and not ended yet
        self._ends: Counter[str] = Counter()
        self._tokens = self._preemptions = self._hits = 0
        self._most: Counter[str] = Counter()
        self._rss_after_warm_up = 0
        self._problems: list[str] = []

    def waves(self) -> Iterator[int]:
        """Runs them, until something does not add up; after each, the requests so far."""
        spec = self._spec
        size = self._warm_up_requests
        while self._num_added < spec.requests and not self._problems:
            self._wave(min(size, spec.requests - self._num_added))
            self._check_nothing_is_left()
            if not self._waves:
                self._rss_after_warm_up = resident_bytes()
            self._waves += 1
            size = int(self._draw.rng.integers(*_WAVE_REQUESTS))
            yield self._num_added

    @property
    def _warm_up_requests(self) -> int:
        return math.ceil(self._spec.requests / 10)

    def _wave(self, size: int) -> None:
        """Adds so many requests, a few at a time, and answers all."""
        core, rng, last = self._core, self._draw.rng, self._num_added + size
        ended_at = self._steps
        while self._num_added < last or core.has_unfinished_requests():
            waiting = core.scheduler.stats()["waiting"]
            for _ in range(min(rng.integers(4), self._spec.max_waiting - waiting)):
                if self._num_added < last:
                    self._add()
            for name in self._cancels.pop(self._steps, ()):
                if core.abort_request(name):
                    self._cancelled.add(name)
            for output in core.step(only_finished=True):
                self._end(output)
                ended_at = self._steps
            self._look()
            self._steps += 1
            if self._steps - ended_at > _STUCK_STEPS:
                raise RuntimeError(
                    f"no request has ended in {_STUCK_STEPS} steps: {core.scheduler.stats()}"
                )

    def _add(self) -> None:
        request = self._draw.request(self._num_added)
        self._core.add_request(request.name, request.prompt, request.params)
        self._live[request.name] = request
        self._num_added += 1
        if request.cancel_after is not None:
            step = self._steps + request.cancel_after
            self._cancels.setdefault(step, []).append(request.name)

    def _end(self, output: RequestOutput) -> None:
        name, reason = output.request_id, output.finish_reason
        request = self._live.pop(name, None)
        if request is None:
            self._problems.append(f"request {name!r} ended ({reason}), but it was not running")
            return
        self._ends[reason] += 1
        self._tokens += len(output.token_ids)
        self._preemptions += output.metrics.preemptions
        self._hits += output.num_cached_tokens > 0
        was_cancelled = name in self._cancelled
        self._cancelled.discard(name)
        wrong = _wrong_end(request, output, was_cancelled)
        if wrong:
            self._problems.append(f"request {name!r} {wrong}")

    def _look(self) -> None:
        """Between two steps."""
        stats = self._core.scheduler.stats()
        seen = {
            "waiting": stats["waiting"],
            "used": stats["total_blocks"] - stats["free_blocks"] - stats["cached_blocks"],
            "host": stats["host_blocks"],
        }
        for name, count in seen.items():
            self._most[name] = max(self._most[name], count)

    def _check_nothing_is_left(self) -> None:
        stats = self._core.scheduler.stats()
        free, cached, total = (stats.pop(f"{name}_blocks") for name in ("free", "cached", "total"))
        totals = self._core.scheduler.totals()
        problems = self._problems
        if self._live:
            problems.append(f"{len(self._live)} requests never ended: {sorted(self._live)[:10]}")
        if free + cached != total:
            problems.append(f"{free} free + {cached} cached blocks: must be {total} in all")
        left = {name: count for name, count in stats.items() if count}
        if left:
            problems.append(f"nothing runs, and there is still {left}")
        for name, seen in (("output_tokens", self._tokens), ("preemptions", self._preemptions)):
            if totals[name] != seen:
                problems.append(f"{name} = {totals[name]}: the requests report {seen}")

    def row(self) -> SoakRow:
        spec, rss = self._spec, resident_bytes()
        growth = rss - self._rss_after_warm_up
        problems = list(self._problems)
        if growth > spec.max_growth * 1e6:
            grown, most = number(growth / 1e6, 1), spec.max_growth
            problems.append(
                f"the process has grown by {grown} MB: must be <= {most} (--max-growth)"
            )
        stats, totals = self._core.scheduler.stats(), self._core.scheduler.totals()
        seconds = time.perf_counter() - self._started
        return SoakRow(
            requests=spec.requests,
            seed=spec.seed,
            **{reason: self._ends[reason] for reason in ("length", "stop", "abort", "error")},
            output_tokens=self._tokens,
            mean_depth=totals["mean_depth"],
            seconds=seconds,
            requests_per_s=self._ends.total() / seconds,
            steps=self._steps,
            waves=self._waves,
            hits=self._hits,
            prompt_tokens=totals["prompt_tokens"],
            cached_prompt_tokens=totals["cached_prompt_tokens"],
            preemptions=totals["preemptions"],
            most_waiting=self._most["waiting"],
            most_used_blocks=self._most["used"],
            most_host_blocks=self._most["host"],
            total_blocks=stats["total_blocks"],
            free_blocks=stats["free_blocks"],
            cached_blocks=stats["cached_blocks"],
            warm_up_requests=self._warm_up_requests,
            rss_after_warm_up=self._rss_after_warm_up,
            rss_at_end=rss,
            rss_growth=growth,
            compiled_meanwhile=len(self._parts.programs.compiled) - self._compiled_before,
            problems=tuple(problems),
        )


def _wrong_end(request: _Request, output: RequestOutput, was_cancelled: bool) -> str | None:
    """Why a request should not have ended as it did."""
    tokens, reason, params = output.token_ids, output.finish_reason, request.params
    if output.error is not None:
        return f"failed: {output.error}"
    if (reason == "abort") != was_cancelled:
        return f"ended ({reason}): it was {'' if was_cancelled else 'not '}cancelled"
    if len(tokens) > params.max_tokens or (reason == "length" and len(tokens) < params.max_tokens):
        return f"ended ({reason}) after {len(tokens)} tokens: it was to give {params.max_tokens}"
    stops = [i for i, token in enumerate(tokens) if token in params.stop_token_ids]
    if stops != ([len(tokens) - 1] if reason == "stop" else []):
        return f"ended ({reason}) after {len(tokens)} tokens, with stop tokens at {stops}"
    if output.prompt_token_ids != request.prompt:
        return "has got the prompt of another one"
    return None


def resident_bytes() -> int:
    """Memory of this process now, or the most so far where the system does not tell."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what was freed, more or less of it each time
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return peak_bytes(jax.local_devices(backend="cpu")[0])
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


COLUMNS = (
    "requests",
    "length",
    "stop",
    "abort",
    "error",
    "tokens",
    "requests/s",
    "hits",
    "preemptions",
    "most blocks",
    "free + cached",
    "MB grown",
    "adds up",
)


def table(rows: Sequence[SoakRow]) -> list[list[str]]:
    return [
        [
            f"{row.requests:,}",
            *(f"{count:,}" for count in (row.length, row.stop, row.abort, row.error)),
            f"{row.output_tokens:,}",
            number(row.requests_per_s, 1),
            f"{row.hits:,}",
            f"{row.preemptions:,}",
            f"{row.most_used_blocks:,} of {row.total_blocks:,}",
            f"{row.free_blocks:,} + {row.cached_blocks:,}",
            number(row.rss_growth / 1e6, 1),
            "no" if row.problems else "yes",
        ]
        for row in rows
    ]
