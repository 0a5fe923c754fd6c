"""Which rows run next. Owns every request's progress and the block tables.

schedule() -> SchedulerOutput -> (runner) -> RunnerOutput -> update(). A scheduled request is in
no queue; update() puts it into the queue of its next stage.
"""

import enum
import time
from collections import deque
from collections.abc import Callable, Iterable

from rlt_jax.config import SchedulerConfig
from rlt_jax.engine.exit_policy import FULL_REMAINING, ExitPolicy
from rlt_jax.engine.intake import ModelLimits
from rlt_jax.engine.kv_accounting import KVAccounting
from rlt_jax.engine.request import Request, RequestStage
from rlt_jax.engine.types import (
    PREFILL_TILE,
    Row,
    RowResult,
    RunnerOutput,
    SchedulerOutput,
    SlotUpdate,
    Stage,
)
from rlt_jax.validation import fail

_STAGE_OF_QUEUE = {
    RequestStage.PREFILL: Stage.PREFILL,
    RequestStage.PRELUDE: Stage.PRELUDE,
    RequestStage.RECURRENT: Stage.RECURRENT,
    RequestStage.CODA: Stage.CODA,
}

_HOTTEST = 1e30  # already uniform, and still a float32


class _Phase(enum.Enum):
    """no_refill: admit and prefill, run all loops, then sample everything."""

    FILL = 0
    CORE = 1
    CODA = 2


class Scheduler:
    """Continuous depth batching: requests at different depths share recurrent batches."""

    def __init__(
        self,
        config: SchedulerConfig,
        limits: ModelLimits,
        policy: ExitPolicy,
        kv: KVAccounting,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`config` must be resolved: no None left."""
        self._config = config
        self._limits = limits
        self._policy = policy
        self._kv = kv
        self._clock = clock
        self._max_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._waiting: deque[Request] = deque()
        self._by_id: dict[str, Request] = {}
        self._by_generation: dict[int, Request] = {}
        self._sequence = 0
        self._start_empty()

    # -- what the engine asks and tells --------------------------------------------------------

    @property
    def kv(self) -> KVAccounting:
        return self._kv

    def has_unfinished_requests(self) -> bool:
        return bool(self._by_id)

    def block_tables(self) -> dict[int, tuple[int, ...]]:
        """The block table of every slot that the device was told of."""
        return {
            request.slot: self._kv.table(request.generation)
            for request in self._by_generation.values()
            if request.on_device
        }

    def stats(self) -> dict[str, int]:
        counts = {stage.value: len(queue) for stage, queue in self._queues.items()}
        return {
            "running": len(self._by_generation) - len(self._waiting),
            "waiting": len(self._waiting),
            **counts,
            "free_blocks": self._kv.free_blocks,
            "total_blocks": self._kv.total_blocks,
        }

    def add(self, request: Request) -> None:
        """Queues a request; raises ValueError when its id is in use."""
        if request.id in self._by_id:
            fail("request_id", request.id, "must not be the id of an unfinished request")
        self._by_id[request.id] = request
        self._by_generation[request.generation] = request
        self._waiting.append(request)

    def find(self, request_id: str) -> Request | None:
        """The unfinished request of this id, to look at."""
        return self._by_id.get(request_id)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in any stage; None when there is none of this id. Its slot and blocks
        return once nothing of it is in flight; its id is free at once."""
        request = self.find(request_id)
        if request is not None:
            self._withdraw(request)
            self._finish(request, "abort")
        return request

    def fail(self, generations: Iterable[int], error: str) -> list[Request]:
        """Ends these requests with an error."""
        failed = [self._by_generation[g] for g in generations if g in self._by_generation]
        failed = [request for request in failed if not request.finished]
        for request in failed:
            request.error = error
            self._withdraw(request)
            self._finish(request, "error")
        return failed

    def fail_running(self, error: str) -> list[Request]:
        """After the device state was lost: every admitted request ends with an error, waiting
        ones stay queued.

        Nothing is in flight any more, and everything is built anew from the waiting queue: the
        call holds whatever an interrupted schedule() or update() left half done.
        """
        waiting = [request for request in self._waiting if not request.finished]
        known = {*self._by_generation.values(), *self._by_id.values()} - set(waiting)
        failed = sorted((r for r in known if not r.finished), key=lambda r: r.generation)
        for request in failed:
            request.error = error
            request.finish_reason = "error"
        for request in known:
            request.stage = RequestStage.FINISHED
        for request in waiting:
            request.stage, request.slot, request.in_flight = RequestStage.WAITING, None, 0
        self._by_id = {request.id: request for request in waiting}
        self._by_generation = {request.generation: request for request in waiting}
        self._waiting = deque(waiting)
        self._start_empty()
        return failed

    def _start_empty(self) -> None:
        """No request admitted: every queue empty, every slot and block free."""
        self._queues = {stage: deque() for stage in _STAGE_OF_QUEUE}
        self._free_slots = list(range(self._config.max_num_seqs - 1, -1, -1))
        self._kv.release_all()
        self._prefills_since_decode = 0
        self._phase = _Phase.FILL

    def discard(self, batch: SchedulerOutput) -> None:
        """Forgets a batch that never reached the device."""
        for row in batch.rows:
            request = self._by_generation.get(row.generation)
            if request is not None:
                self._land(request)

    # -- choosing a batch ------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next batch, or None when nothing can run now."""
        if self._config.mode == "refill":
            stage = self._choose_refill()
        else:
            stage = self._choose_no_refill()
        if stage is None:
            return None
        rows, updates = self._take(stage)
        if stage is Stage.PREFILL:
            self._prefills_since_decode += 1
        elif stage is Stage.RECURRENT:
            self._prefills_since_decode = 0
        requests = [self._by_generation[row.generation] for row in rows]
        self._sequence += 1
        return SchedulerOutput(
            sequence=self._sequence,
            stage=stage,
            rows=tuple(rows),
            slot_updates=tuple(updates),
            reads_gate=stage is Stage.RECURRENT
            and any(
                self._policy.reads_gate(request.bounds, row.depth)
                for request, row in zip(requests, rows, strict=True)
            ),
            samples=stage is Stage.CODA and any(r.params.temperature > 0 for r in requests),
        )

    def _choose_refill(self) -> Stage | None:
        queues = self._queues
        recurrent = len(queues[RequestStage.RECURRENT])
        coda = len(queues[RequestStage.CODA])
        if queues[RequestStage.PRELUDE]:
            return Stage.PRELUDE
        if coda and (coda >= self._config.min_coda_batch_size or not recurrent):
            return Stage.CODA
        limit = self._config.max_prefill_batches_before_decode
        if recurrent and self._prefills_since_decode >= limit:
            return Stage.RECURRENT
        self._admit()
        if queues[RequestStage.PREFILL]:
            return Stage.PREFILL
        return Stage.RECURRENT if recurrent else None

    def _choose_no_refill(self) -> Stage | None:
        queues = self._queues
        for _ in _Phase:  # at most once around
            if self._phase is _Phase.FILL:
                if queues[RequestStage.PRELUDE]:
                    return Stage.PRELUDE
                self._admit()
                if queues[RequestStage.PREFILL]:
                    return Stage.PREFILL
                self._phase = _Phase.CORE
            if self._phase is _Phase.CORE:
                if queues[RequestStage.RECURRENT]:
                    return Stage.RECURRENT
                self._phase = _Phase.CODA
            if queues[RequestStage.CODA]:
                return Stage.CODA
            self._phase = _Phase.FILL
        return None

    def _admit(self) -> None:
        """First come, first served, each with all the blocks it can ever need."""
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            if not self._kv.can_allocate(request.max_positions):
                return
            self._waiting.popleft()
            self._kv.allocate(request.generation, request.max_positions)
            request.slot = self._free_slots.pop()
            request.admitted = self._clock()
            self._enqueue(request, RequestStage.PREFILL)

    def _take(self, stage: Stage) -> tuple[list[Row], list[SlotUpdate]]:
        """Moves rows from a stage's queue into a batch, within the token budget."""
        queue = self._queues[RequestStage(stage.value)]
        budget = self._config.max_num_batched_tokens if stage is Stage.PREFILL else self._max_rows
        rows: list[Row] = []
        updates: list[SlotUpdate] = []
        while queue and budget > 0:
            request = queue.popleft()
            row = self._row(request, stage, budget)
            budget -= len(row.tokens) if stage is Stage.PREFILL else 1
            request.in_flight += 1
            if not request.on_device:
                request.on_device = True
                updates.append(self._slot_update(request))
            rows.append(row)
        return rows, updates

    def _row(self, request: Request, stage: Stage, budget: int) -> Row:
        common = {
            "generation": request.generation,
            "slot": request.slot,
            "position": request.position,
        }
        if stage is Stage.PREFILL:
            size = min(self._config.prefill_chunk_size, budget)
            if self._kv.geometry.planes == 1:
                size = min(size, PREFILL_TILE)
            end = min(request.position + size, len(request.prompt))
            return Row(
                **common,
                depth=self._limits.full_depth,
                tokens=request.prompt[request.position : end],
                ends_prompt=end == len(request.prompt),
            )
        if stage is Stage.CODA:
            return Row(**common, depth=request.depth, output_index=len(request.tokens))
        return Row(**common, depth=request.depth + 1)

    def _slot_update(self, request: Request) -> SlotUpdate:
        return SlotUpdate(
            slot=request.slot,
            block_table=self._kv.table(request.generation),
            temperature=min(request.params.temperature, _HOTTEST),
            top_k=request.params.top_k,
            top_p=request.params.top_p,
            seed=request.params.seed,
        )

    # -- applying results ------------------------------------------------------------------------

    def update(self, batch: SchedulerOutput, output: RunnerOutput) -> list[Request]:
        """Applies a batch's results; returns the requests that got a token.

        A result whose request has ended meanwhile only brings its resources home.
        """
        if output.sequence != batch.sequence:
            raise RuntimeError(f"results of batch {output.sequence} for batch {batch.sequence}")
        grown = []
        for row, result in zip(batch.rows, output.rows, strict=True):
            request = self._by_generation.get(result.generation)
            if request is None:
                continue
            if not self._land(request):
                continue
            if batch.stage is Stage.CODA:
                grown.append(request)
            self._advance(request, batch.stage, row, result)
        return grown

    def _advance(self, request: Request, stage: Stage, row: Row, result: RowResult) -> None:
        if stage is Stage.PREFILL:
            request.position += len(row.tokens)
            if row.ends_prompt:
                request.position -= 1  # the last prompt position gives the first output
                request.depth = row.depth
                self._enqueue(request, RequestStage.CODA)
            else:
                self._enqueue(request, RequestStage.PREFILL)
        elif stage is Stage.PRELUDE:
            request.depth = 0
            request.remaining = FULL_REMAINING
            self._enqueue(request, RequestStage.RECURRENT)
        elif stage is Stage.RECURRENT:
            request.depth = row.depth
            leaves, request.remaining = self._policy.decide(
                request.bounds,
                len(request.tokens),
                row.depth,
                request.remaining,
                result.exit_probability,
            )
            self._enqueue(request, RequestStage.CODA if leaves else RequestStage.RECURRENT)
        else:
            self._emit(request, row, result)

    def _emit(self, request: Request, row: Row, result: RowResult) -> None:
        request.tokens.append(result.token)
        request.depths.append(row.depth)
        request.logprobs.append(result.logprob)
        request.last_token = self._clock()
        if request.first_token is None:
            request.first_token = request.last_token
        params = request.params
        if result.token in params.stop_token_ids or (
            not params.ignore_eos and result.token in self._limits.eos_token_ids
        ):
            self._finish(request, "stop")
        elif len(request.tokens) == params.max_tokens:
            self._finish(request, "length")
        else:
            request.position += 1
            self._enqueue(request, RequestStage.PRELUDE)

    # -- moving requests -------------------------------------------------------------------------

    def _enqueue(self, request: Request, stage: RequestStage) -> None:
        request.stage = stage
        self._queues[stage].append(request)

    def _land(self, request: Request) -> bool:
        """One batch of the request came back; False when the request has ended meanwhile."""
        request.in_flight -= 1
        if request.finished and not request.in_flight:
            self._release(request)
        return not request.finished

    def _withdraw(self, request: Request) -> None:
        """Takes a request that ends from outside out of its queue; in flight it is in none."""
        waiting = request.stage is RequestStage.WAITING
        queue = self._waiting if waiting else self._queues[request.stage]
        if not request.in_flight and request in queue:
            queue.remove(request)

    def _finish(self, request: Request, reason: str) -> None:
        """Ends a request that is in no queue."""
        request.finish_reason = reason
        request.stage = RequestStage.FINISHED
        del self._by_id[request.id]
        if not request.in_flight:
            self._release(request)

    def _release(self, request: Request) -> None:
        del self._by_generation[request.generation]
        if request.slot is not None:
            self._kv.release(request.generation)
            self._free_slots.append(request.slot)
            request.slot = None
