"""Which rows run next. Owns every request's progress and the block tables.

schedule() -> SchedulerOutput -> (runner) -> RunnerOutput -> update(). Progress that needs no
result is made when a batch is scheduled: sampled tokens stay on the device, so the next batch of a
request may be submitted before this one is read. Only a request whose next stage hangs on its gate
is held, in no queue, until update() has the hazard.
"""

import enum
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from rlt_jax.config import SchedulerConfig
from rlt_jax.engine.exit_policy import FULL_REMAINING, ExitPolicy
from rlt_jax.engine.intake import ModelLimits
from rlt_jax.engine.kv_accounting import KVAccounting
from rlt_jax.engine.request import Request, RequestStage
from rlt_jax.engine.types import (
    SHARED_PREFILL_TOKENS,
    Row,
    RowResult,
    RunnerOutput,
    SchedulerOutput,
    SlotUpdate,
    Stage,
)
from rlt_jax.validation import fail

_QUEUED_STAGES = (RequestStage.PREFILL, RequestStage.RECURRENT, RequestStage.CODA)

_HOTTEST = 1e30  # already uniform, and still a float32


class _Phase(enum.Enum):
    """no_refill: admit and prefill, run all loops (or one whole token), then sample everything."""

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
        tokens_per_dispatch: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`config` must be resolved: no None left."""
        self._config = config
        self._limits = limits
        self._policy = policy
        self._kv = kv
        self._tokens_per_dispatch = tokens_per_dispatch
        self._clock = clock
        self._max_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._waiting: deque[Request] = deque()
        self._by_id: dict[str, Request] = {}
        self._by_generation: dict[int, Request] = {}
        self._sequence = 0
        self._turn = 0
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
        request.whole_tokens = self._policy.fixed_depth(request.bounds) == self._limits.full_depth
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
            self._finish(request, "abort")
        return request

    def fail(self, generations: Iterable[int], error: str) -> list[Request]:
        """Ends these requests with an error."""
        failed = [self._by_generation[g] for g in generations if g in self._by_generation]
        failed = [request for request in failed if not request.finished]
        for request in failed:
            request.error = error
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
            request.queued = False
        self._by_id = {request.id: request for request in waiting}
        self._by_generation = {request.generation: request for request in waiting}
        self._waiting = deque(waiting)
        self._start_empty()
        return failed

    def _start_empty(self) -> None:
        """No request admitted: every queue empty, every slot and block free."""
        self._queues = {stage: deque() for stage in _QUEUED_STAGES}
        self._held = 0
        self._free_slots = list(range(self._config.max_num_seqs - 1, -1, -1))
        self._kv.release_all()
        self._prefills_since_decode = 0
        self._phase = _Phase.FILL

    def discard(self, batch: SchedulerOutput) -> None:
        """Forgets a batch that never reached the device."""
        for row in batch.rows:
            request = self._by_generation.get(row.generation)
            if request is not None:
                self._land(request, row)

    # -- choosing a batch ------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next batch, or None when nothing can run now."""
        if self._config.mode == "refill":
            stage = self._choose_refill()
        else:
            stage = self._choose_no_refill()
        if stage is None:
            return None
        rows = self._take(stage)
        if stage is Stage.BOUNDARY and not any(row.exit_depth for row in rows):
            stage = Stage.RECURRENT  # the rows that exit had to wait for older ones
        requests = [self._by_generation[row.generation] for row in rows]
        samples = any(
            request.params.temperature > 0
            for request, row in zip(requests, rows, strict=True)
            if row.exit_depth
        )
        num_tokens = 1
        if stage is Stage.TOKENS and not samples:
            n = self._tokens_per_dispatch
            if all(request.params.max_tokens - request.sampled >= n for request in requests):
                num_tokens = n
        updates = [self._slot_update(request) for request in requests if not request.on_device]
        for request, row in zip(requests, rows, strict=True):
            request.in_flight += 1
            request.on_device = True
            self._progress(request, stage, row, num_tokens)
        if stage is Stage.PREFILL:
            self._prefills_since_decode += 1
        elif stage is not Stage.CODA:
            self._prefills_since_decode = 0
        self._sequence += 1
        return SchedulerOutput(self._sequence, stage, rows, tuple(updates), samples, num_tokens)

    def _choose_refill(self) -> Stage | None:
        recurrent, coda = self._queues[RequestStage.RECURRENT], self._queues[RequestStage.CODA]
        # Without the held rows a batch would stream the weights for a part of the rows only.
        can_decode = not self._held and bool(recurrent or coda)
        coda_due = can_decode and self._enough_exits()
        limit = self._config.max_prefill_batches_before_decode
        decode_waits = self._held or can_decode
        if not decode_waits or self._prefills_since_decode < limit:
            self._admit()
            if self._queues[RequestStage.PREFILL]:
                return Stage.CODA if coda_due else Stage.PREFILL
        if not can_decode:
            return None
        return self._choose_coda() if coda_due else self._choose_loop()

    def _enough_exits(self) -> bool:
        coda = self._queues[RequestStage.CODA]
        if len(coda) >= self._config.min_coda_batch_size:
            return True
        # Whole tokens bring no row to the coda, nor do no rows at all: no use to wait for more.
        return bool(coda) and self._choose_loop() is Stage.TOKENS

    def _choose_coda(self) -> Stage:
        """Rows that exit run their next loop in the same batch, unless whole tokens are next."""
        going_on = [r for r in self._queues[RequestStage.CODA] if not self._samples_last(r)]
        whole = all(r.whole_tokens for r in going_on) and self._only_whole_tokens()
        return Stage.CODA if whole else Stage.BOUNDARY

    def _choose_loop(self) -> Stage:
        recurrent = self._queues[RequestStage.RECURRENT]
        ready = self._only_whole_tokens() and all(r.depth == 0 for r in recurrent)
        return Stage.TOKENS if ready else Stage.RECURRENT

    def _only_whole_tokens(self) -> bool:
        return all(r.whole_tokens for r in self._queues[RequestStage.RECURRENT])

    def _samples_last(self, request: Request) -> bool:
        return request.sampled + 1 == request.params.max_tokens

    def _choose_no_refill(self) -> Stage | None:
        queues = self._queues
        if self._held:
            return None
        for _ in range(len(_Phase) + 1):  # once around, from wherever it stands
            if self._phase is _Phase.FILL:
                self._admit()
                if queues[RequestStage.PREFILL]:
                    return Stage.PREFILL
                self._phase = _Phase.CORE
            if self._phase is _Phase.CORE:
                if queues[RequestStage.RECURRENT]:
                    stage = self._choose_loop()
                    if stage is Stage.TOKENS:
                        self._phase = _Phase.CODA
                    return stage
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

    def _take(self, stage: Stage) -> tuple[Row, ...]:
        """Takes a batch's requests out of their queues, within the token budget."""
        if stage is Stage.PREFILL:
            return self._take_prompts()
        queues = self._queues
        sources = {
            Stage.CODA: [queues[RequestStage.CODA]],
            Stage.BOUNDARY: [queues[RequestStage.CODA], queues[RequestStage.RECURRENT]],
        }.get(stage, [queues[RequestStage.RECURRENT]])
        # Full-depth rows that are out of step meet at the start of a token.
        meet = stage is Stage.RECURRENT and self._only_whole_tokens()
        taken: list[Request] = []
        left: list[Request] = []
        while len(taken) < self._max_rows and any(sources):
            # Whoever waits longest, in whichever queue: where not all fit, none is passed over.
            request = self._pop(min(filter(None, sources), key=lambda queue: queue[0].turn))
            (left if meet and request.depth == 0 else taken).append(request)
        for request in left:
            self._enqueue(request, RequestStage.RECURRENT)
        return tuple(self._decode_row(request, stage) for request in taken)

    def _take_prompts(self) -> tuple[Row, ...]:
        queue, budget = self._queues[RequestStage.PREFILL], self._config.max_num_batched_tokens
        rows: list[Row] = []
        while queue and budget > 0:
            request = self._pop(queue)
            size = min(self._config.prefill_chunk_size, budget)
            if self._kv.geometry.planes == 1:
                size = min(size, SHARED_PREFILL_TOKENS)
            end = min(request.position + size, len(request.prompt))
            rows.append(
                Row(
                    request.generation,
                    request.slot,
                    request.position,
                    depth=self._limits.full_depth,
                    tokens=request.prompt[request.position : end],
                    ends_prompt=end == len(request.prompt),
                )
            )
            budget -= end - request.position
        return tuple(rows)

    def _decode_row(self, request: Request, stage: Stage) -> Row:
        exit_depth, loop = 0, request.depth + 1
        if stage is Stage.TOKENS:
            exit_depth = loop = self._limits.full_depth
        elif request.stage is RequestStage.CODA:
            exit_depth = request.depth
            loop = 1 if stage is Stage.BOUNDARY and not self._samples_last(request) else 0
        return Row(
            request.generation,
            request.slot,
            request.position,
            depth=loop,
            exit_depth=exit_depth,
            output_index=request.sampled,
            reads_gate=stage is not Stage.TOKENS
            and loop > 0
            and self._policy.reads_gate(request.bounds, loop),
        )

    def _progress(self, request: Request, stage: Stage, row: Row, num_tokens: int) -> None:
        """What a scheduled row will have done, as far as no result is needed to know."""
        if stage is Stage.PREFILL:
            request.position += len(row.tokens)
            if row.ends_prompt:
                request.position -= 1  # the last prompt position gives the first output
                request.depth = row.depth
            self._enqueue(request, RequestStage.CODA if row.ends_prompt else RequestStage.PREFILL)
            return
        if row.exit_depth:
            request.sampled += num_tokens
            if request.sampled == request.params.max_tokens:
                return  # ends when the token is there
            request.position += num_tokens
            request.depth, request.remaining = 0, FULL_REMAINING
        if stage is Stage.RECURRENT or stage is Stage.BOUNDARY:
            request.depth = row.depth
            if row.reads_gate:
                request.held = True
                self._held += 1
            else:
                self._decide(request, None)
        else:
            self._enqueue(request, RequestStage.RECURRENT)

    def _decide(self, request: Request, probability: np.float32 | None) -> None:
        """Where a request goes after a loop."""
        leaves, request.remaining = self._policy.decide(
            request.bounds, request.sampled, request.depth, request.remaining, probability
        )
        self._enqueue(request, RequestStage.CODA if leaves else RequestStage.RECURRENT)

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
            if request is None or not self._land(request, row):
                continue
            if result.tokens:
                grown.append(request)
                self._emit(request, row, result)
            if row.reads_gate and not request.finished:
                self._decide(request, result.exit_probability)
        return grown

    def _emit(self, request: Request, row: Row, result: RowResult) -> None:
        """Applies sampled tokens, up to the one that ends the request."""
        request.last_token = self._clock()
        if request.first_token is None:
            request.first_token = request.last_token
        params = request.params
        for token, logprob in zip(result.tokens, result.logprobs, strict=True):
            request.tokens.append(token)
            request.depths.append(row.exit_depth)
            request.logprobs.append(logprob)
            if token in params.stop_token_ids or (
                not params.ignore_eos and token in self._limits.eos_token_ids
            ):
                return self._finish(request, "stop")
            if len(request.tokens) == params.max_tokens:
                return self._finish(request, "length")

    # -- moving requests -------------------------------------------------------------------------

    def _enqueue(self, request: Request, stage: RequestStage) -> None:
        request.stage = stage
        request.queued = True
        request.turn = self._turn
        self._turn += 1
        self._queues[stage].append(request)

    def _pop(self, queue: deque[Request]) -> Request:
        request = queue.popleft()
        request.queued = False
        return request

    def _land(self, request: Request, row: Row) -> bool:
        """One batch of the request came back; False when the request has ended meanwhile."""
        request.in_flight -= 1
        if row.reads_gate and request.held:
            request.held = False
            self._held -= 1
        if request.finished and not request.in_flight:
            self._release(request)
        return not request.finished

    def _finish(self, request: Request, reason: str) -> None:
        """Ends a request, whatever it waits for."""
        if request.queued:
            self._queues[request.stage].remove(request)
            request.queued = False
        elif request.stage is RequestStage.WAITING:
            self._waiting.remove(request)
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
