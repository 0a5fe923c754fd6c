"""LLMEngine: the one interface behind the Python API and the command line."""

import contextlib
import dataclasses
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from rlt_jax.assembly import Assembly, assemble
from rlt_jax.checkpoints_convert.checkpoint import open_checkpoint, resolve_folder
from rlt_jax.checkpoints_convert.load import load_params
from rlt_jax.config import DTYPES, CacheConfig, ExecutionConfig, ExitConfig, SchedulerConfig
from rlt_jax.engine.types import SchedulerOutput, Stage
from rlt_jax.models.ouro import DTypePolicy
from rlt_jax.outputs import RequestOutput
from rlt_jax.profiling import Profiler
from rlt_jax.run_trace import TraceRecorder
from rlt_jax.runtime.programs import Kind
from rlt_jax.sampling_params import SamplingParams
from rlt_jax.tokenizer import IncrementalDecoder, Tokenizer
from rlt_jax.validation import check_choice, fail

logger = logging.getLogger(__name__)


class LLMEngine:
    """Add requests, then step() until none is unfinished.

    model: a folder (Hugging Face or Orbax) or a hub id. tokenizer: a Tokenizer, a folder or a hub
    id (None: the model's own; a model without one takes and gives token ids only). dtype:
    "bfloat16" or "float32" (None: bfloat16 on a GPU, float32 on a CPU). device: "cpu", "gpu",
    "gpu:1" or a jax.Device (None: JAX's first). total_ut_steps: loops to run, at most the
    model's own.

    startup_times: seconds by phase. memory_plan: how the KV pool was sized.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: Tokenizer | str | Path | None = None,
        dtype: str | None = None,
        device: str | jax.Device | None = None,
        total_ut_steps: int | None = None,
        cache_config: CacheConfig | None = None,
        scheduler_config: SchedulerConfig | None = None,
        exit_config: ExitConfig | None = None,
        execution_config: ExecutionConfig | None = None,
    ):
        self._parts: Assembly | None = None
        self._watching: dict[str, TraceRecorder | Profiler] = {}
        self._lock = threading.RLock()  # callers on several threads take turns
        self.startup_times: dict[str, float] = {}
        configs = {
            "cache_config": (cache_config, CacheConfig),
            "scheduler_config": (scheduler_config, SchedulerConfig),
            "exit_config": (exit_config, ExitConfig),
            "execution_config": (execution_config, ExecutionConfig),
        }
        for name, (config, kind) in configs.items():
            if config is not None and not isinstance(config, kind):
                fail(name, config, f"must be of type {kind.__name__} or None")
        if dtype is not None:
            check_choice("dtype", dtype, DTYPES)
        with self._timed("find device"):
            self.device = resolve_device(device)
        with self._timed("open checkpoint"):
            checkpoint = open_checkpoint(model)
            self.model_config = checkpoint.config.with_total_ut_steps(total_ut_steps)
            self.tokenizer = _open_tokenizer(tokenizer, checkpoint.folder)
        self.dtype = dtype or ("float32" if self.device.platform == "cpu" else "bfloat16")
        policy = DTypePolicy.on(self.device.platform, self.dtype)
        with self._timed("load weights"):
            sharding = jax.sharding.SingleDeviceSharding(self.device)
            params = load_params(checkpoint, policy, sharding)
        eos = self.tokenizer.eos_token_ids if self.tokenizer else ()
        with self._timed("plan and compile ahead"):
            self._parts = assemble(
                self.model_config,
                params,
                policy=policy,
                device=self.device,
                eos_token_ids=tuple(sorted({*self.model_config.eos_token_ids, *eos})),
                **{name: config for name, (config, _) in configs.items()},
            )
        self.memory_plan = self._parts.memory_plan
        self._model = str(model)
        self._configs = {name: config or kind() for name, (config, kind) in configs.items()}

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        trace_id: str | None = None,
    ) -> None:
        """Queues a prompt (text or token ids). Raises ValueError, and then nothing has changed.

        trace_id: the name in ExitConfig.depths_by_request, where it differs from request_id.
        """
        tokens = self.encode(prompt)
        params = SamplingParams() if sampling_params is None else sampling_params
        text_of = None if self.tokenizer is None else _Text(self.tokenizer).extend
        with self._lock:
            self._running().core.add_request(request_id, tokens, params, trace_id, text_of)

    def encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """Text to token ids; token ids are returned as they are."""
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            fail("prompt", prompt, "must be token ids: this model has no tokenizer.json")
        return self.tokenizer.encode(prompt)

    def step(self, only_finished: bool = False) -> list[RequestOutput]:
        """Runs one batch; an output for every request that got a token or ended.

        only_finished: outputs of ended requests alone, which saves time where nobody watches the
        others grow.
        """
        with self._lock:
            return self._running().core.step(only_finished)

    def abort_request(self, request_id: str) -> bool:
        """Ends a request; False when there is none. The next step() returns its last output."""
        with self._lock:
            return self._running().core.abort_request(request_id)

    def has_unfinished_requests(self) -> bool:
        with self._lock:
            return self._parts is not None and self._parts.core.has_unfinished_requests()

    def stats(self) -> dict[str, int | float | None]:
        """How the engine stands, and what it has done since it was built.

        Now: running, waiting; prefill, recurrent, coda, held (of the running ones, those that wait
        for that stage, or for the signal of a loop in flight), saving, restoring (whose pages are
        on their way to the host or back); staged (of those in prefill, the prompts that are between
        two loops); preempted (of the waiting ones, those saved on the host), host_blocks (taken
        there by them and those on their way); free_blocks, cached_blocks (held by the prefix cache
        alone, and given up as soon as they are needed), reserved_blocks (of both, those that
        running requests may still need), total_blocks; in_flight (batches). So far: output_tokens;
        mean_depth, loops per output token; batch_occupancy, decode rows of all batches over padded
        ones; idle_row_loops, loops run by rows that had already left; prompt_tokens, and
        cached_prompt_tokens, those of them that were not computed; preemptions, times that a
        request had to leave its slot; executables at hand, and late_compiles. None: nothing to take
        a mean of yet.
        """
        with self._lock:
            parts = self._running()
            return {
                **parts.core.scheduler.stats(),
                "in_flight": parts.core.in_flight,
                **parts.core.scheduler.totals(),
                "batch_occupancy": parts.runner.occupancy,
                "executables": len(parts.programs.compiled),
                "late_compiles": parts.programs.late_compiles,
            }

    def start_trace(self, path: str | os.PathLike) -> None:
        """From now on every batch becomes a line of JSON in `path` (docs/tracing.md), until
        stop_trace() or shutdown()."""
        self._start("trace", lambda: TraceRecorder(path, self._describe(), self._bucket_of))

    def stop_trace(self) -> None:
        self._stop("trace")

    def start_profile(self, directory: str | os.PathLike) -> None:
        """From now on jax.profiler records the process, until stop_profile() or shutdown(), which
        write what it saw under `directory`."""
        self._start("profile", lambda: Profiler(directory))

    def stop_profile(self) -> None:
        self._stop("profile")

    def _start(self, what: str, make: Callable[[], TraceRecorder | Profiler]) -> None:
        with self._lock:
            core = self._running().core
            if what in self._watching:
                path = self._watching[what].path
                raise RuntimeError(f"start_{what}: one to {path!r} is running; stop_{what}() first")
            self._watching[what] = make()
            core.observers = tuple(self._watching.values())

    def _stop(self, what: str) -> None:
        with self._lock:
            core = self._running().core
            if what not in self._watching:
                raise RuntimeError(f"stop_{what}: none is running; start_{what}() first")
            observer = self._watching.pop(what)
            core.observers = tuple(self._watching.values())
            observer.stop()

    def _describe(self) -> dict[str, Any]:
        """The header of a trace. Depths to replay are left out: the rows show them."""
        configs = dict(self._configs)
        for name in ("scheduler_config", "execution_config"):
            configs[name] = configs[name].resolve(self.device.platform)
        described = {name: dict(vars(config)) for name, config in configs.items()}
        described["exit_config"].pop("depths_by_request")
        packages = {name: metadata.version(name) for name in ("rlt-jax", "jax", "jaxlib")}
        return {
            "versions": {"python": platform.python_version(), **packages},
            "device": self.device.device_kind,
            "model": self._model,
            "dtype": self.dtype,
            "model_config": dataclasses.asdict(self.model_config),
            **described,
        }

    def _bucket_of(self, batch: SchedulerOutput) -> int | None:
        """Rows, in a prefill or mixed batch prompt tokens, that a batch is padded to; None: it does
        not fit, or has pages to move and no rows to run."""
        if batch.transfer is not None:
            return None
        kinds = {
            Stage.CODA: Kind.CODA_GREEDY,
            Stage.PREFILL: Kind.PREFILL,
            Stage.MIXED: Kind.MIXED,
        }
        kind, count = kinds.get(batch.stage, Kind.RECURRENT), len(batch.rows)
        if kind in (Kind.PREFILL, Kind.MIXED) and self.memory_plan.planes > 1:
            count = int(batch.rows.size.sum())
        try:
            return self._running().programs.buckets.fit(kind, count)
        except ValueError:
            return None

    @property
    def max_executables(self) -> int:
        """Programs times buckets that this engine can reach."""
        return len(self._running().programs.all_keys())

    @property
    def compile_seconds(self) -> dict[str, float]:
        """Seconds this engine spent compiling, by program; shared programs cost nothing again."""
        return dict(self._running().programs.compile_seconds)

    def shutdown(self) -> None:
        """Frees the device memory; unfinished requests are dropped. Again is harmless."""
        with self._lock:
            for what in list(self._watching):
                try:
                    self._stop(what)
                except Exception as error:
                    logger.error("the %s is lost: %s", what, error)
            self._parts = None

    def _running(self) -> Assembly:
        if self._parts is None:
            raise RuntimeError("LLMEngine: it has been shut down; make a new one")
        return self._parts

    @contextlib.contextmanager
    def _timed(self, phase: str):
        started = time.perf_counter()
        yield
        self.startup_times[phase] = time.perf_counter() - started


class _Text:
    """A request's text so far. The token that stopped it (end of sequence, stop id) gives none."""

    def __init__(self, tokenizer: Tokenizer):
        self._decoder = IncrementalDecoder(tokenizer)
        self._decoded = 0
        self._text = ""

    def extend(self, token_ids: Sequence[int], finish_reason: str | None) -> str:
        end = len(token_ids) - (finish_reason == "stop")
        if end > self._decoded:
            self._text += self._decoder.push(token_ids[self._decoded : end])
            self._decoded = end
        if finish_reason is not None:
            self._text += self._decoder.finish()
        return self._text


def resolve_device(device: str | jax.Device | None) -> jax.Device:
    """A device from "cpu", "gpu", "cuda", "gpu:1", a jax.Device, or None (JAX's first)."""
    if device is None:
        return jax.local_devices()[0]
    if isinstance(device, jax.Device):
        return device
    rule = 'must be "cpu", "gpu" or "cuda", with an optional ":index" of a device that JAX sees'
    if not isinstance(device, str):
        fail("device", device, rule)
    platform, _, index = device.partition(":")
    if platform not in ("cpu", "gpu", "cuda") or (index and not index.isdecimal()):
        fail("device", device, rule)
    try:
        return jax.local_devices(backend=platform)[int(index or 0)]
    except (RuntimeError, IndexError):
        fail("device", device, rule)


def _open_tokenizer(tokenizer: Tokenizer | str | Path | None, folder: Path) -> Tokenizer | None:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer is not None and not isinstance(tokenizer, (str, os.PathLike)):
        fail("tokenizer", tokenizer, "must be a Tokenizer, a folder or a hub id, or None")
    if tokenizer is not None:
        return Tokenizer.from_folder(resolve_folder(tokenizer, weights=False))
    return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
