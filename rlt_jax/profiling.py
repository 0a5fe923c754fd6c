"""A jax.profiler trace of an engine's steps, each named for what runs in it."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import jax

from rlt_jax.engine.types import SchedulerOutput, Stage
from rlt_jax.validation import check_path, fail


class Profiler:
    """Profiles from its making until stop(); an engine.core.Observer.

    Every submit is a step of the profile, under the batch's name and sequence number.
    """

    def __init__(self, directory: str | os.PathLike):
        """Raises ValueError when there can be no such folder, RuntimeError when JAX is already
        profiling."""
        check_profile_directory("directory", directory)
        try:
            Path(directory).mkdir(exist_ok=True)
        except OSError as error:
            rule = f"must be a folder that can be made: {error.strerror}"
            fail("directory", os.fspath(directory), rule)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call would make the steps much slower
        jax.profiler.start_trace(os.fspath(directory), profiler_options=options)
        self.path = os.fspath(directory)

    def submitting(
        self, batch: SchedulerOutput, id_of: Callable[[int], str]
    ) -> contextlib.AbstractContextManager:
        return jax.profiler.StepTraceAnnotation(name_of(batch), step_num=batch.sequence)

    def collecting(self, batch: SchedulerOutput) -> contextlib.AbstractContextManager:
        return jax.profiler.TraceAnnotation(f"collect {name_of(batch)}")

    def lost(self, error: str) -> None:
        pass

    def stop(self) -> None:
        """Writes the profile."""
        jax.profiler.stop_trace()


def name_of(batch: SchedulerOutput) -> str:
    """For example "recurrent rows=8 depths=1-3", "prefill rows=2 tokens=96", "coda rows=3",
    "mixed rows=5 tokens=96 depths=1-4"."""
    rows = batch.rows
    name = f"{batch.stage.value} rows={len(rows)}"
    prompt_tokens = rows.size.sum()
    if prompt_tokens:
        name += f" tokens={prompt_tokens}"
    if batch.stage is Stage.PREFILL:
        return name
    depths = rows.depth[rows.depth > 0]
    if len(depths):
        low, high = depths.min(), depths.max()
        name += f" depths={low}" if low == high else f" depths={low}-{high}"
    if batch.num_loops > 1:
        name += f" num_loops={batch.num_loops}"
    return name if batch.num_tokens == 1 else f"{name} num_tokens={batch.num_tokens}"


def check_profile_directory(field: str, path: object) -> None:
    """Before anything is started: can there be a folder of this name?"""
    rule = "must be a folder, or a new one in a folder that exists"
    check_path(field, path, rule)
    if not Path(path).is_dir() and (
        Path(path).exists() or not Path(path).absolute().parent.is_dir()
    ):
        fail(field, os.fspath(path), rule)
