"""Compiled programs: one executable per (program, bucket), shared by the whole process."""

import dataclasses
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from rlt_jax.models.ouro import abstract_params
from rlt_jax.runtime.device_state import abstract_state
from rlt_jax.runtime.programs import (
    SEVERAL_TOKENS,
    SLOT_UPDATE_ROWS,
    Kind,
    ProgramSpec,
    build,
    content_to_restore,
    input_layout,
)
from rlt_jax.validation import fail

logger = logging.getLogger(__name__)


class LateCompileError(RuntimeError):
    """A program was compiled after everything should have been (an error in tests only)."""


# Tests set this; in production a late compile is a counted warning.
late_compile_is_error = False


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The powers of two that batches are padded to.

    rows: of decode rows. prompts: of prompt tokens (of requests in the SHARED layout's prefill).
    tokens_per_dispatch: with more than 1, there is a program for that many tokens. mixed: there is
    one for batches of prompts and decode rows. transfers: there are those that save a slot and
    restore it, a row each.
    """

    rows: tuple[int, ...]
    prompts: tuple[int, ...]
    tokens_per_dispatch: int = 1
    mixed: bool = False
    transfers: bool = False

    @classmethod
    def plan(
        cls,
        max_rows: int,
        min_rows: int,
        max_prompts: int,
        min_prompts: int,
        tokens_per_dispatch: int = 1,
        mixed: bool = False,
        transfers: bool = False,
    ) -> "Buckets":
        return cls(
            _powers_of_two(min_rows, max_rows),
            _powers_of_two(min_prompts, max_prompts),
            tokens_per_dispatch,
            mixed,
            transfers,
        )

    def of(self, kind: Kind) -> tuple[int, ...]:
        if kind is Kind.SET_SLOTS:
            return (SLOT_UPDATE_ROWS,)
        if kind in (Kind.SAVE, Kind.RESTORE):
            return (1,) if self.transfers else ()
        if kind is Kind.PREFILL:
            return self.prompts
        if kind is Kind.MIXED:
            return _largest(self.prompts, every=2) if self.mixed else ()
        if kind in (Kind.CODA_GREEDY, Kind.CODA_SAMPLE):
            # Alone it runs rarely, and reads the head at any size.
            return _largest(self.rows, every=3)
        if SEVERAL_TOKENS.get(kind, self.tokens_per_dispatch) != self.tokens_per_dispatch:
            return ()
        return self.rows

    def fit(self, kind: Kind, count: int) -> int:
        """The smallest bucket that holds `count`; raises ValueError when none does."""
        for bucket in self.of(kind):
            if count <= bucket:
                return bucket
        largest = max(self.of(kind), default=0)
        raise ValueError(f"{count} rows in a {kind.value} batch: must be <= {largest}")


def _largest(buckets: tuple[int, ...], every: int) -> tuple[int, ...]:
    """The largest, and every second or third below it."""
    return buckets[::-1][::every][::-1]


def _powers_of_two(first: int, covered: int) -> tuple[int, ...]:
    buckets = [first]
    while buckets[-1] < covered:
        buckets.append(2 * buckets[-1])
    return tuple(buckets)


@dataclasses.dataclass(frozen=True)
class _Key:
    spec: ProgramSpec
    device: jax.Device


# The process keeps the executables of this many specs, the latest used ones.
MAX_KEPT_SPECS = 32
_executables: OrderedDict[_Key, dict[tuple[Kind, int], Future]] = OrderedDict()
_lock = threading.Lock()


_GPU_OPTIONS = {
    # Rounds to bfloat16 wherever the model says so: the same everywhere, fused or not.
    "xla_allow_excess_precision": False,
    # It reckons without donation and tries to shrink programs that need no shrinking.
    "xla_disable_hlo_passes": "rematerialization",
}


def compile_program(
    kind: Kind, bucket: int, spec: ProgramSpec, device: jax.Device
) -> jax.stages.Compiled:
    """Compiles one program for a device."""
    sharding = jax.sharding.SingleDeviceSharding(device)

    def placed(tree):
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    state = placed(abstract_state(spec.config, spec.policy, spec.shape))
    params = placed(abstract_params(spec.config, spec.policy))
    packed = jax.ShapeDtypeStruct((input_layout(kind, bucket, spec).size,), np.int32)
    content = placed(content_to_restore(kind, spec))
    options = _GPU_OPTIONS if device.platform == "gpu" else None
    program = jax.jit(build(kind, bucket, spec), donate_argnums=0, compiler_options=options)
    return program.lower(state, params, packed, *content).compile()


class Programs:
    """One engine's view of the process-wide executables.

    Compiles on first use; after `warm_up` (every bucket compiled) a further compile is counted
    in `late_compiles` and warned of.
    """

    def __init__(self, spec: ProgramSpec, buckets: Buckets, device: jax.Device):
        self.spec = spec
        self.buckets = buckets
        self.device = device
        self.late_compiles = 0
        self._compiled: dict[tuple[Kind, int], jax.stages.Compiled] = {}
        self.compile_seconds: dict[str, float] = {}
        self._warm = False

    @property
    def compiled(self) -> set[tuple[Kind, int]]:
        """The programs that this engine has at hand."""
        return set(self._compiled)

    def all_keys(self) -> list[tuple[Kind, int]]:
        """Every (program, bucket) that this engine can reach."""
        return [(kind, bucket) for kind in Kind for bucket in self.buckets.of(kind)]

    def get(self, kind: Kind, bucket: int) -> jax.stages.Compiled:
        executable = self._compiled.get((kind, bucket))
        if executable is None:
            executable = self._compiled[kind, bucket] = self._share(kind, bucket)
        return executable

    def _key(self, kind: Kind) -> _Key:
        return _Key(self.spec.of(kind), self.device)

    def _share(self, kind: Kind, bucket: int) -> jax.stages.Compiled:
        """The process's executable of a program, compiled here if nobody has it."""
        key = self._key(kind)
        with _lock:
            shared = _executables.setdefault(key, {})
            _executables.move_to_end(key)
            while len(_executables) > MAX_KEPT_SPECS:
                _executables.popitem(last=False)
            future = shared.get((kind, bucket))
            mine = future is None
            if mine:
                self._note_late_compile(kind, bucket)
                future = shared[kind, bucket] = Future()
        if mine:
            self._fill(future, shared, kind, bucket)
        return future.result()

    def _fill(self, future: Future, shared: dict, kind: Kind, bucket: int) -> None:
        started = time.perf_counter()
        try:
            future.set_result(compile_program(kind, bucket, self.spec, self.device))
        except BaseException as error:
            with _lock:
                del shared[kind, bucket]  # the next caller may try again
            # Others who wait for it are not the ones who pressed Ctrl-C.
            mine = isinstance(error, Exception)
            future.set_exception(error if mine else RuntimeError("compiling was interrupted"))
            raise
        self.compile_seconds[f"{kind.value}_{bucket}"] = time.perf_counter() - started

    def prefetch(self, keys: Iterable[tuple[Kind, int]]) -> None:
        """Compiles in threads (XLA releases the GIL) and waits for all."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda key: self.get(*key), keys))

    def warm_up(self) -> None:
        """Compiles everything, largest buckets first."""
        keys = self.all_keys()
        with _lock:
            missing = any(key not in _executables.get(self._key(key[0]), {}) for key in keys)
        if missing and self.device.platform == "gpu":
            self._autotune()
        self.prefetch(sorted(keys, key=lambda key: -key[1]))
        self._warm = True

    def _autotune(self) -> None:
        """Lets XLA choose the matrix products of every bucket, one program after the other: those
        that are compiled together disturb each other's timings. One layer has them all; XLA keeps
        its choices for the programs to come."""
        config = dataclasses.replace(self.spec.config, num_hidden_layers=1)
        shape = dataclasses.replace(self.spec.shape, num_pages=1)
        one_layer = dataclasses.replace(self.spec, config=config, shape=shape)
        for kind in (Kind.TOKEN_GREEDY, Kind.PREFILL, Kind.MIXED):
            for bucket in self.buckets.of(kind):
                compile_program(kind, bucket, one_layer, self.device)

    def _note_late_compile(self, kind: Kind, bucket: int) -> None:
        if not self._warm:
            return
        self.late_compiles += 1
        message = f"{kind.value}_{bucket} was compiled after warm-up"
        if late_compile_is_error:
            raise LateCompileError(message)
        logger.warning(message)


def use_compilation_cache(folder: str | None) -> None:
    """Keeps compiled programs in `folder` between runs (None: leaves JAX's setting alone).

    JAX has one such folder per process: the last engine's choice holds for all. Raises
    ValueError when it is not a folder and cannot be made.
    """
    if folder is None:
        return
    folder = os.path.abspath(os.path.expanduser(folder))
    try:
        os.makedirs(folder, exist_ok=True)
    except (OSError, ValueError) as error:
        fail("ExecutionConfig.compilation_cache_dir", folder, f"must be a folder ({error})")
    if jax.config.jax_compilation_cache_dir != folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()  # an open cache would keep its old folder
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
