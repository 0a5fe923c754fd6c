"""What generate and chat share: a loaded model, and streams shown while they run."""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rlt_jax.cli_options import engine_options
from rlt_jax.llm import LLM, StreamIncrement
from rlt_jax.outputs import RequestOutput

if TYPE_CHECKING:
    from rich.console import Console

    from rlt_jax.terminal import AnswerWriter


@contextlib.contextmanager
def loaded_llm(options: argparse.Namespace, notes: "Console") -> Iterator[LLM]:
    """The LLM of the engine flags; meanwhile whatever libraries print goes to stderr."""
    engine = engine_options(options)
    with contextlib.redirect_stdout(sys.stderr):
        start = time.perf_counter()
        with notes.status(f"loading {options.model}"):
            llm = LLM(**engine)
        with llm:
            if options.verbose:
                _print_startup(llm, time.perf_counter() - start)
            yield llm


class Stopwatch:
    """Seconds since it was made, and those of them that went into compiling."""

    def __init__(self, llm: LLM):
        self._engine = llm.engine
        self._compiled_before = self._compiling()
        self._start = time.perf_counter()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._start, self._compiling() - self._compiled_before

    def _compiling(self) -> float:
        return sum(self._engine.compile_seconds.values())


def write_live(
    stream: Iterator[StreamIncrement],
    latest: dict[str, RequestOutput],
    notes: "Console",
    writer: "AnswerWriter",
    begin: Callable[[], None],
) -> None:
    """Writes one answer as it comes; `begin` is called before its first token.

    latest: receives the output so far, so that it is not lost however this ends.
    """
    try:
        with contextlib.closing(stream), notes.status("waiting for the first token") as status:
            for increment in stream:
                if not latest:
                    status.stop()
                    begin()
                latest[increment.request_id] = increment.output
                writer.answer(increment.output)
    finally:
        if latest:
            writer.end()


def collect(
    stream: Iterator[StreamIncrement],
    latest: dict[str, RequestOutput],
    notes: "Console",
    stopwatch: Stopwatch,
    count: int,
) -> None:
    """Runs to the end; on a terminal a bar shows how far it is. latest: as for write_live."""
    from rich import progress

    bar = progress.Progress(
        progress.TextColumn("answering"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeElapsedColumn(),
        console=notes,
        transient=True,
        redirect_stdout=False,
        disable=not notes.is_terminal,
    )
    with contextlib.closing(stream), bar:
        task = bar.add_task("", total=count, rate="")
        tokens = 0
        for increment in stream:
            latest[increment.request_id] = increment.output
            tokens += len(increment.token_ids)
            seconds, compiling = stopwatch.read()
            rate = f"{tokens / max(seconds - compiling, 1e-9):,.0f} tokens/s"
            bar.update(task, advance=increment.finished, rate=rate)


def _print_startup(llm: LLM, seconds: float) -> None:
    phases = {**llm.startup_times, "other": seconds - sum(llm.startup_times.values())}
    print(f"start-up: {seconds:.2f} s", file=sys.stderr)
    _print_seconds(phases)
    plan = llm.engine.memory_plan
    print(
        f"KV pool: {plan.num_blocks} blocks of {plan.block_size} tokens, {plan.kv_bytes:,} bytes"
        f" ({plan.source}); weights: {plan.weight_bytes:,} bytes;"
        f" at most {llm.engine.max_executables} executables",
        file=sys.stderr,
    )


def print_compiling(llm: LLM, seconds: float, compiling: float) -> None:
    compiled = llm.engine.compile_seconds
    print(
        f"answering: {seconds:.2f} s, of it {compiling:.2f} s compiling {len(compiled)} programs",
        file=sys.stderr,
    )
    _print_seconds(compiled)


def _print_seconds(phases: dict[str, float]) -> None:
    for phase, spent in phases.items():
        print(f"  {phase:<24} {spent:8.2f} s", file=sys.stderr)
