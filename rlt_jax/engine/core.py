"""The engine loop: schedule, submit ahead, collect, update; and what happens on a failure."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from rlt_jax.engine.exit_policy import ExitPolicy
from rlt_jax.engine.intake import ModelLimits, make_request
from rlt_jax.engine.request import Request, TextOf
from rlt_jax.engine.scheduler import Scheduler
from rlt_jax.engine.types import BatchError, DeviceLostError, RunnerOutput, SchedulerOutput
from rlt_jax.outputs import RequestOutput
from rlt_jax.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class BatchRunner(Protocol):
    """What the engine needs of a runner."""

    def submit(self, batch: SchedulerOutput) -> Any: ...

    def collect(self, ticket: Any) -> RunnerOutput: ...

    def reset(self) -> None: ...


class Observer(Protocol):
    """Sees every batch go and come back; it only looks and must not raise."""

    def submitting(
        self, batch: SchedulerOutput, id_of: Callable[[int], str]
    ) -> contextlib.AbstractContextManager:
        """Around the call that submits a batch; id_of: the request id of a row's generation."""

    def collecting(self, batch: SchedulerOutput) -> contextlib.AbstractContextManager:
        """Around the call that waits for a batch and reads its results."""

    def lost(self, error: str) -> None:
        """The batches in flight will never be collected."""


class EngineCore:
    """Drives one scheduler and one runner, with up to `max_in_flight` batches on the device."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: BatchRunner,
        limits: ModelLimits,
        policy: ExitPolicy,
        max_in_flight: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self._limits = limits
        self._policy = policy
        self._max_in_flight = max_in_flight
        self._clock = clock
        self.observers: tuple[Observer, ...] = ()
        self._in_flight: deque[tuple[SchedulerOutput, Any]] = deque()  # with their tickets
        self._next_generation = 0
        self._live: dict[int, Request] = {}  # added and not told to have ended, by generation
        self._untold: dict[int, Request] = {}  # changed since the last outputs, by generation
        self._lost: str | None = None  # why the device state must be rebuilt

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        trace_id: str | None = None,
        text_of: TextOf | None = None,
    ) -> None:
        """Queues a request of token ids. Raises ValueError, and then nothing has changed.

        text_of: turns the request's tokens into the text of its outputs.
        """
        request = make_request(
            request_id,
            prompt,
            params,
            generation=self._next_generation,
            arrived=self._clock(),
            limits=self._limits,
            policy=self._policy,
            kv=self.scheduler.kv,
            trace_id=trace_id,
        )
        request.text_of = text_of
        self._next_generation += 1
        self.scheduler.add(request)
        self._live[request.generation] = request

    def abort_request(self, request_id: str) -> bool:
        """Ends a request; False when there is none. The next step() reports it."""
        request = self.scheduler.abort(request_id)
        if request is not None:
            self._tell([request])
        return request is not None

    @property
    def in_flight(self) -> int:
        """Batches submitted and not collected."""
        return len(self._in_flight)

    def has_unfinished_requests(self) -> bool:
        """Whether step() has anything to do: a batch in flight still holds blocks."""
        return bool(self._untold or self._in_flight) or self.scheduler.has_unfinished_requests()

    def step(self, only_finished: bool = False) -> list[RequestOutput]:
        """Submits what it can, collects one batch; outputs of the requests it gave a token or end.

        only_finished: leave out those that only grew, and the cost of describing them.

        A failed batch ends its requests with an error, or all running ones where the device
        state went with it. Whatever else comes in between (Ctrl-C, say) may have left a batch
        half-way: the running requests end with an error, the next step() reports them, and the
        exception goes on. No output is lost by an exception.
        """
        try:
            self._recover()
            self._submit_ahead()
            if self._in_flight:
                self._collect_oldest()
            elif not self._untold and self.scheduler.has_unfinished_requests():
                failed = self.scheduler.fail_for_memory()
                if not failed:
                    raise RuntimeError(f"no request can run: {self.scheduler.stats()}")
                self._tell(failed)
        except BaseException as error:
            self._lost = self._lost or f"interrupted: {type(error).__name__}: {error}"
            self._recover()
            raise
        outputs = [
            request.output()
            for request in self._untold.values()
            if request.finished or not only_finished
        ]
        for generation, request in self._untold.items():
            if request.finished:
                self._live.pop(generation, None)
        self._untold.clear()
        return outputs

    def _submit_ahead(self) -> None:
        while len(self._in_flight) < self._max_in_flight:
            batch = self.scheduler.schedule()
            if batch is None:
                return
            try:
                self._in_flight.append((batch, self._submit(batch)))
            except BatchError as error:
                logger.error("%s", error)
                self.scheduler.discard(batch)
                generations = [row.generation for row in batch.rows]
                self._tell(self.scheduler.fail(generations, str(error)))
                return
            except DeviceLostError as error:
                return self._lose(error)

    def _collect_oldest(self) -> None:
        batch, ticket = self._in_flight.popleft()
        try:
            self._tell(self.scheduler.update(batch, self._collect(batch, ticket)))
        except DeviceLostError as error:
            self._lose(error)

    def _submit(self, batch: SchedulerOutput) -> Any:
        if not self.observers:
            return self.runner.submit(batch)
        with contextlib.ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer.submitting(batch, self._id_of))
            return self.runner.submit(batch)

    def _collect(self, batch: SchedulerOutput, ticket: Any) -> RunnerOutput:
        if not self.observers:
            return self.runner.collect(ticket)
        with contextlib.ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer.collecting(batch))
            return self.runner.collect(ticket)

    def _id_of(self, generation: int) -> str:
        return self._live[generation].id

    def _lose(self, error: DeviceLostError) -> None:
        logger.error("%s; the device state is rebuilt", error)
        self._lost = str(error)
        self._recover()

    def _recover(self) -> None:
        """After the device state was lost: fails the running requests, builds a new state.

        May itself be interrupted or fail: the next step() tries again.
        """
        if self._lost is not None:
            self._in_flight.clear()
            for observer in self.observers:
                observer.lost(self._lost)
            self._tell(self.scheduler.fail_running(self._lost))
            self._tell(request for request in self._live.values() if request.finished)
            self.runner.reset()
            self._lost = None

    def _tell(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._untold[request.generation] = request
