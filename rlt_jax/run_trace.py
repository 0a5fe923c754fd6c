"""A run on record: a JSON line per batch, with what ran in it and when.

The first line is a header. A batch's line is written once it is collected, or known to have ended
without results. Times are seconds since the trace was started.
"""

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlt_jax.engine.types import SchedulerOutput, Stage
from rlt_jax.validation import check_float, check_int, check_path, fail

FORMAT, VERSION = "rlt-jax run trace", 1
_MAX_INT = 2**53
_MOST = 1000  # loops of a token, and tokens of a row: a picture has no room for more

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TracedRow:
    """A request's part of a batch, as in engine.types.Row; tokens: how many of its prompt.

    generation tells requests apart that had the same id one after the other.
    """

    request: str
    generation: int
    position: int
    depth: int
    exit_depth: int
    tokens: int
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class TracedBatch:
    """bucket: what the batch was padded to: rows, in a prefill or mixed batch prompt tokens (None:
    unknown). num_loops: loops of every row, as in engine.types.SchedulerOutput.

    submitted: when it had been handed to the device (None: it never was). collected: when its
    results were there (None: it has none, and `error` says why).
    """

    sequence: int
    stage: Stage
    bucket: int | None
    submitted: float | None
    collected: float | None
    error: str | None
    rows: tuple[TracedRow, ...]
    num_loops: int = 1

    def line(self) -> str:
        rows = [vars(row) for row in self.rows]
        return json.dumps({**vars(self), "stage": self.stage.value, "rows": rows}) + "\n"


@dataclasses.dataclass(frozen=True)
class RunTrace:
    """What a file holds; batches in the order in which they were scheduled."""

    header: Mapping[str, Any]
    batches: tuple[TracedBatch, ...]


class TraceRecorder:
    """Writes what an engine does; an engine.core.Observer. stop() it, or the file stays open."""

    def __init__(
        self,
        path: str | os.PathLike,
        header: Mapping[str, Any],
        bucket_of: Callable[[SchedulerOutput], int | None] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """header: what is known of the engine. Raises ValueError when `path` cannot be written."""
        check_trace_path("path", path)
        try:
            self._file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
            line = {"format": FORMAT, "version": VERSION, **header}
            self._file.write(json.dumps(line, default=str) + "\n")
        except OSError as error:
            fail("path", os.fspath(path), f"must be a file that can be written: {error.strerror}")
        self.path = os.fspath(path)
        self._bucket_of = bucket_of
        self._clock, self._start = clock, clock()
        self._in_flight: dict[int, TracedBatch] = {}
        self._error: OSError | None = None

    @contextlib.contextmanager
    def submitting(self, batch: SchedulerOutput, id_of: Callable[[int], str]) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._write(self._traced(batch, id_of, None, _described(error)))
            raise
        # What takes time comes after: the device is at work now.
        self._in_flight[batch.sequence] = self._traced(batch, id_of, self._now(), None)

    @contextlib.contextmanager
    def collecting(self, batch: SchedulerOutput) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._land(batch.sequence, error=_described(error))
            raise
        self._land(batch.sequence, collected=self._now())

    def lost(self, error: str) -> None:
        for sequence in list(self._in_flight):
            self._land(sequence, error=error)

    def stop(self) -> None:
        """Closes the file. Raises OSError when something could not be written."""
        self.lost("in flight when the trace was stopped")
        try:
            self._file.close()
        except OSError as error:
            self._error = self._error or error
        if self._error is not None:
            raise OSError(f"{self.path}: the trace is not complete: {self._error}")

    def _traced(
        self,
        batch: SchedulerOutput,
        id_of: Callable[[int], str],
        submitted: float | None,
        error: str | None,
    ) -> TracedBatch:
        rows = tuple(
            TracedRow(
                id_of(row.generation),
                row.generation,
                row.position,
                row.depth,
                row.exit_depth,
                row.size,
                batch.num_tokens,
            )
            for row in batch.rows
        )
        return TracedBatch(
            batch.sequence,
            batch.stage,
            self._bucket_of(batch),
            submitted,
            None,
            error,
            rows,
            batch.num_loops,
        )

    def _now(self) -> float:
        return round(self._clock() - self._start, 6)

    def _land(self, sequence: int, **fields: Any) -> None:
        batch = self._in_flight.pop(sequence, None)
        if batch is not None:  # otherwise submitted before the trace was started
            self._write(dataclasses.replace(batch, **fields))

    def _write(self, batch: TracedBatch) -> None:
        """A full disk, say, ends the trace and not the requests."""
        if self._error is None:
            try:
                self._file.write(batch.line())
            except OSError as error:
                self._error = error
                logger.error("%s: cannot be written: %s; the trace ends here", self.path, error)


def check_trace_path(field: str, path: object) -> None:
    """Before anything is started: can there be a file of this name?"""
    rule = "must be a file that can be written, in a folder that exists"
    check_path(field, path, rule)
    file, folder = Path(path), Path(path).absolute().parent
    writable = os.access(file if file.exists() else folder, os.W_OK)
    if file.is_dir() or not folder.is_dir() or not writable:
        fail(field, os.fspath(path), rule)


def read_trace(path: str | os.PathLike) -> RunTrace:
    """A file that TraceRecorder wrote. Raises ValueError naming the file and the rule.

    A last line without its end is left out: the process was killed while it wrote.
    """
    try:
        *lines, _ = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        lines = []
    header = _object(lines[0]) if lines else {}
    if header.get("format") != FORMAT:
        rule = "must be what --trace-output or start_trace() wrote: it has no such first line"
        raise ValueError(f"{path}: {rule}")
    if header.get("version") != VERSION:
        found = header.get("version")
        raise ValueError(f"{path}: version = {found!r}: must be {VERSION}, what is read here")
    batches = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            batches.append(_parse(_object(line)))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            rule = f"must be a batch of a run trace: {_rule_of(error)}"
            raise ValueError(f"{path}: line {number}: {rule}") from None
    model = header.get("model_config", {})
    try:
        loops = model["total_ut_steps"] if model else None
        check_int("model_config.total_ut_steps", loops, minimum=1, maximum=_MOST, optional=True)
    except (ValueError, TypeError, KeyError) as error:
        rule = f"must be the header of a run trace: {_rule_of(error)}"
        raise ValueError(f"{path}: line 1: {rule}") from None
    return RunTrace(header, tuple(sorted(batches, key=lambda batch: batch.sequence)))


def _parse(fields: dict[str, Any]) -> TracedBatch:
    """A batch's line, every field checked."""
    rows = tuple(TracedRow(**row) for row in fields.pop("rows"))
    batch = TracedBatch(stage=Stage(fields.pop("stage")), rows=rows, **fields)
    check_int("sequence", batch.sequence, minimum=0, maximum=_MAX_INT)
    check_int("bucket", batch.bucket, minimum=1, maximum=_MAX_INT, optional=True)
    check_int("num_loops", batch.num_loops, minimum=1, maximum=_MOST)
    for name in ("submitted", "collected"):
        time = getattr(batch, name)
        if time is not None:
            check_float(name, time, ">= 0", lambda seconds: seconds >= 0)
    if batch.collected is not None and not (batch.submitted or 0) <= batch.collected:
        fail("collected", batch.collected, f"must be >= submitted = {batch.submitted}")
    if not rows:
        fail("rows", [], "must be at least one")
    for row in rows:
        if not isinstance(row.request, str):
            fail("request", row.request, "must be a string")
        for name in ("generation", "position", "tokens"):
            check_int(name, getattr(row, name), minimum=0, maximum=_MAX_INT)
        for name in ("depth", "exit_depth"):
            check_int(name, getattr(row, name), minimum=0, maximum=_MOST)
        check_int("num_tokens", row.num_tokens, minimum=1, maximum=_MOST)
    return batch


def _object(line: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
        return value if isinstance(value, dict) else {}
    return {}


def _rule_of(error: Exception) -> str:
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def _described(error: BaseException) -> str:
    return str(error) or type(error).__name__
