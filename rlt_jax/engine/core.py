"""The engine loop: schedule, submit, collect, update; and what happens when a batch fails."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlt_jax.engine.exit_policy import ExitPolicy
from rlt_jax.engine.intake import ModelLimits, make_request
from rlt_jax.engine.request import Request
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


class EngineCore:
    """Drives one scheduler and one runner, one batch at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: BatchRunner,
        limits: ModelLimits,
        policy: ExitPolicy,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self._limits = limits
        self._policy = policy
        self._clock = clock
        self._next_generation = 0
        self._ended: list[Request] = []  # aborted or failed outside update(), not yet told

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        trace_id: str | None = None,
    ) -> None:
        """Queues a request of token ids. Raises ValueError, and then nothing has changed."""
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
        self.scheduler.add(request)
        self._next_generation += 1

    def abort_request(self, request_id: str) -> bool:
        """Ends a request; False when there is none. The next step() reports it."""
        request = self.scheduler.abort(request_id)
        if request is not None:
            self._ended.append(request)
        return request is not None

    def has_unfinished_requests(self) -> bool:
        return bool(self._ended) or self.scheduler.has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """Runs one batch; outputs of the requests that got a token or ended, without text."""
        changed, self._ended = self._ended, []
        batch = self.scheduler.schedule()
        if batch is not None:
            changed += self._run(batch)
        return [request.output() for request in changed]

    def _run(self, batch: SchedulerOutput) -> list[Request]:
        try:
            ticket = self.runner.submit(batch)
            return self.scheduler.update(batch, self.runner.collect(ticket))
        except BatchError as error:
            logger.error("%s", error)
            self.scheduler.discard(batch)
            return self.scheduler.fail([row.generation for row in batch.rows], str(error))
        except DeviceLostError as error:
            logger.error("%s; the device state is rebuilt", error)
            failed = self.scheduler.fail_running(str(error))
            self.runner.reset()
            return failed
        except BaseException:
            # Interrupted half-way (Ctrl-C, say): no telling what the device state holds.
            self._ended += self.scheduler.fail_running("interrupted")
            self.runner.reset()
            raise
