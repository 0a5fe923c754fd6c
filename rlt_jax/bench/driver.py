"""An engine under measurement: its start-up, its batches, its requests."""

import contextlib
import dataclasses
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import monitoring

from rlt_jax.assembly import Assembly, assemble
from rlt_jax.bench.limits import kv_blocks
from rlt_jax.bench.report import plain
from rlt_jax.bench.synthetic import BenchModel
from rlt_jax.config import CacheConfig, ExecutionConfig, ExitConfig, SchedulerConfig
from rlt_jax.engine.types import SchedulerOutput, Stage
from rlt_jax.host_memory import available_bytes
from rlt_jax.models.ouro import OuroConfig
from rlt_jax.outputs import RequestOutput
from rlt_jax.sampling_params import SamplingParams
from rlt_jax.validation import check_int, fail

_TEMPORARY_BYTES = 2 * 2**30  # more than programs take beside weights and K/V

_CACHE_EVENTS = {
    "/jax/compilation_cache/cache_hits": "hits",
    "/jax/compilation_cache/cache_misses": "misses",
}


@dataclasses.dataclass(frozen=True)
class Configs:
    """What an engine is built with."""

    cache: CacheConfig
    scheduler: SchedulerConfig
    exit: ExitConfig
    execution: ExecutionConfig

    def fitted(self, model: BenchModel, requests: int, positions: int) -> "Configs":
        """For `requests` requests at once of `positions` positions each, where the user left it
        open: as many sequences, and a KV pool for just them if the memory has room for it."""
        cache, scheduler = self.cache, self.scheduler
        if scheduler.max_num_seqs is None:
            scheduler = dataclasses.replace(scheduler, max_num_seqs=requests)
        if cache.num_blocks is None and cache.kv_cache_memory_bytes is None:
            config, itemsize = model.config, np.dtype(model.policy.kv_dtype).itemsize
            blocks = kv_blocks(config, cache.layout, cache.block_size, requests, positions)
            needed = blocks * cache.block_size * config.kv_bytes_per_position(itemsize)
            if needed <= pool_room(model.device, cache):
                cache = dataclasses.replace(cache, num_blocks=blocks)
        return dataclasses.replace(self, cache=cache, scheduler=scheduler)

    def as_dict(self, platform: str) -> dict[str, Any]:
        """With the platform's defaults filled in. Depths to replay are left out: they are drawn
        from the seed."""
        exits = plain(dataclasses.replace(self.exit, mode="ouro", depths_by_request=None))
        return {
            "cache_config": plain(self.cache),
            "scheduler_config": plain(self.scheduler.resolve(platform)),
            "exit_config": {**exits, "mode": self.exit.mode},
            "execution_config": plain(self.execution.resolve(platform)),
        }


class Recorder:
    """Notes every batch that is collected, how many tokens each request has by then, and how long
    the host submits and waits; an engine.core.Observer."""

    def __init__(self):
        self.submit_seconds = self.wait_seconds = 0.0
        self.collected: list[SchedulerOutput] = []
        self.sampled: Counter[int] = Counter()  # output tokens by request generation
        self.total = 0

    @contextlib.contextmanager
    def submitting(self, batch: SchedulerOutput, id_of: Callable[[int], str]) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.submit_seconds += time.perf_counter() - started

    @contextlib.contextmanager
    def collecting(self, batch: SchedulerOutput) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.wait_seconds += time.perf_counter() - started
        self.collected.append(batch)
        rows = batch.rows
        for generation in rows.generation[rows.exit_depth > 0].tolist():
            self.sampled[generation] += batch.num_tokens
            self.total += batch.num_tokens

    def lost(self, error: str) -> None:
        pass


class BenchEngine:
    """A running engine around a loaded model."""

    def __init__(self, model: BenchModel, configs: Configs):
        self.model = model
        self.configs = configs
        with _cache_events() as self._cache_events:
            self._parts: Assembly | None = assemble(
                model.config,
                model.params,
                policy=model.policy,
                device=model.device,
                cache_config=configs.cache,
                scheduler_config=configs.scheduler,
                exit_config=configs.exit,
                execution_config=configs.execution,
            )

    def __enter__(self) -> "BenchEngine":
        return self

    def __exit__(self, *exception: object) -> None:
        """Frees the device memory at once: another engine may need it."""
        self._parts = None
        gc.collect()

    @property
    def parts(self) -> Assembly:
        return self._parts

    @property
    def num_executables(self) -> int:
        return len(self.parts.programs.compiled)

    def describe(self) -> dict[str, Any]:
        """The configs and what became of them."""
        return {
            **self.configs.as_dict(self.model.device.platform),
            "memory_plan": plain(self.parts.memory_plan),
            "kernels": plain(self.parts.programs.spec.kernels),
        }

    def describe_startup(self) -> dict[str, Any]:
        """Seconds and counts; compilation_cache: what JAX's persistent cache gave while the
        engine was built ("off": it was not asked). Compile seconds are those so far."""
        hits, misses = self._cache_events["hits"], self._cache_events["misses"]
        cache = "mixed" if hits and misses else "warm" if hits else "cold" if misses else "off"
        return {
            "load_weights_seconds": self.model.load_seconds,
            **plain(self.parts.start_up),
            "executables_now": self.num_executables,
            "compile_seconds_by_program": dict(self.parts.programs.compile_seconds),
            "compilation_cache": cache,
            "cache_hits": hits,
            "cache_misses": misses,
        }

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        core, recorder = self.parts.core, Recorder()
        core.observers += (recorder,)
        try:
            yield recorder
        finally:
            core.observers = tuple(one for one in core.observers if one is not recorder)

    def finish(self, after_step: Callable[[list[RequestOutput]], None] | None = None) -> None:
        """Steps until no request is left. after_step: gets the outputs of ended requests.

        Raises RuntimeError when a request fails.
        """
        core = self.parts.core
        while core.has_unfinished_requests():
            ended = core.step(only_finished=True)
            for output in ended:
                if output.error is not None:
                    raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            if after_step is not None:
                after_step(ended)

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams, **ids: Any) -> None:
        """Answers all prompts; for warming up."""
        self.submit(prompts, params, **ids)
        self.finish()

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        first_id: int = 0,
        trace_ids: Sequence[str] | None = None,
    ) -> None:
        for i, prompt in enumerate(prompts):
            trace_id = None if trace_ids is None else trace_ids[i]
            self.add(str(first_id + i), prompt, params, trace_id)

    def add(
        self, name: str, prompt: Sequence[int], params: SamplingParams, trace_id: str | None = None
    ) -> None:
        self.parts.core.add_request(name, prompt, params, trace_id)

    def replay(self, batches: Sequence[SchedulerOutput]) -> float:
        """Seconds that the device takes for these batches, dispatched back to back.

        Their requests have ended: what is written no longer matters.
        """
        runner = self.parts.runner
        calls = [call for batch in batches for call in runner.prepare(batch)]
        results: Any = None
        for call in calls[:4]:
            results = runner.dispatch(call)
        jax.block_until_ready(results)
        started = time.perf_counter()
        for call in calls:
            results = runner.dispatch(call)
        jax.block_until_ready(results)
        return time.perf_counter() - started


def count_loops(batches: Sequence[SchedulerOutput], full_depth: int) -> int:
    """Loops of decode rows that these batches run."""
    loops = {Stage.RECURRENT: 1, Stage.BOUNDARY: 1, Stage.TOKENS: full_depth}

    def count(batch: SchedulerOutput) -> int:
        if batch.stage is Stage.MIXED:
            return int(batch.rows.num_decode > 0)
        return loops.get(batch.stage, 0) * batch.num_tokens

    return sum(map(count, batches))


def random_prompts(
    config: OuroConfig, requests: int, tokens: int, rng: np.random.Generator
) -> list[list[int]]:
    return rng.integers(0, config.vocab_size, (requests, tokens)).tolist()


def check_prompt(prompt: int, output_tokens: int, config: OuroConfig) -> None:
    """Raises ValueError when --prompt and --output-tokens do not fit the model's context."""
    check_int("--prompt", prompt, minimum=1)
    room = config.max_position_embeddings - output_tokens + 1
    if prompt > room:
        fail("--prompt", prompt, f"with --output-tokens {output_tokens} must be <= {room}")


def draw_depths(
    config: OuroConfig, depths: Sequence[int], requests: int, tokens: int, seed: int
) -> dict[str, tuple[int, ...]]:
    """Exit depths to replay, by trace id "0", "1", ...: the prompt's full depth, then one of
    `depths` for each further output token, all equally likely."""
    drawn = np.random.default_rng(seed).choice(depths, (requests, tokens))
    drawn[:, 0] = config.total_ut_steps
    return {str(i): tuple(row) for i, row in enumerate(drawn.tolist())}


def pool_room(device: jax.Device, cache: CacheConfig) -> float:
    """Bytes that a KV pool may take without asking the memory plan; of the host's on a CPU."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        return cache.gpu_memory_utilization * free - cache.memory_reserve_bytes - _TEMPORARY_BYTES
    return 0.8 * available_bytes()


def peak_bytes(device: jax.Device) -> int:
    """The most memory in use so far: the device's, or on a CPU the process's."""
    stats = device.memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    import resource  # there is none on Windows, where JAX has no GPU either

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextlib.contextmanager
def _cache_events() -> Iterator[Counter]:
    counts: Counter[str] = Counter()

    def listen(event: str, **_: Any) -> None:
        if event in _CACHE_EVENTS:
            counts[_CACHE_EVENTS[event]] += 1

    monitoring.register_event_listener(listen)
    try:
        yield counts
    finally:
        monitoring.unregister_event_listener(listen)
