"""Which rows run next. Owns every request's progress and the block tables.

schedule() -> SchedulerOutput -> (runner) -> RunnerOutput -> update(). Progress that needs no
result is made when a batch is scheduled: sampled tokens stay on the device, so the next batch of a
request may be submitted before this one is read. Only a request whose next stage hangs on a
signal is held until update() has it: without run_ahead that of its last loop, with it that of the
loop before. So loop r + 2 never starts before the signal of loop r was applied.
"""

import enum
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from rlt_jax.config import SchedulerConfig
from rlt_jax.engine.exit_policy import ExitPolicy
from rlt_jax.engine.intake import ModelLimits
from rlt_jax.engine.kv_accounting import KVAccounting
from rlt_jax.engine.request import Request
from rlt_jax.engine.slots import (
    CODA,
    ENDED,
    HELD,
    LAST,
    PREFILL,
    RECURRENT,
    RequestStage,
    Slots,
)
from rlt_jax.engine.types import (
    SHARED_PREFILL_TOKENS,
    Row,
    Rows,
    RunnerOutput,
    SchedulerOutput,
    SlotUpdate,
    Stage,
)
from rlt_jax.validation import fail

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
        run_ahead: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """config: resolved, no None left. run_ahead: submit a request's next loop before the
        signal of the last one is read, which the policy's lag or a device that decides by itself
        must allow."""
        self._config = config
        self._limits = limits
        self._policy = policy
        self._kv = kv
        self._tokens_per_dispatch = tokens_per_dispatch
        self._ahead = int(run_ahead)
        self._clock = clock
        self._max_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._waiting: deque[Request] = deque()
        self._by_id: dict[str, Request] = {}
        self._by_generation: dict[int, Request] = {}
        self._sequence = 0
        self._counts = {"tokens": 0, "loops": 0, "idle_row_loops": 0}
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
            slot: self._kv.table(request.generation)
            for slot, request in enumerate(self._slots.request)
            if request is not None and self._slots.on_device[slot]
        }

    def stage_of(self, request_id: str) -> RequestStage:
        """Where an unfinished request is."""
        request = self._by_id[request_id]
        if request.slot is None:
            return RequestStage.WAITING
        return RequestStage(self._slots.stage[request.slot])

    def stats(self) -> dict[str, int]:
        """What is there now: all zero but the blocks when nothing runs."""
        by_stage = np.bincount(self._slots.stage, minlength=len(RequestStage))
        named = ("PREFILL", "RECURRENT", "CODA", "HELD")
        return {
            "running": len(self._by_generation) - len(self._waiting),
            "waiting": len(self._waiting),
            **{name.lower(): int(by_stage[RequestStage[name]]) for name in named},
            "free_blocks": self._kv.free_blocks,
            "total_blocks": self._kv.total_blocks,
        }

    def totals(self) -> dict[str, float]:
        """Since the engine was built. mean_depth: loops per output token (None: no token yet).
        idle_row_loops: loops run in vain by rows that had already left."""
        tokens = self._counts["tokens"]
        return {
            "output_tokens": tokens,
            "mean_depth": self._counts["loops"] / tokens if tokens else None,
            "idle_row_loops": self._counts["idle_row_loops"],
        }

    def add(self, request: Request) -> None:
        """Queues a request; raises ValueError when its id is in use."""
        if request.id in self._by_id:
            fail("request_id", request.id, "must not be the id of an unfinished request")
        eos = () if request.params.ignore_eos else self._limits.eos_token_ids
        request.stop_ids = frozenset((*request.params.stop_token_ids, *eos))
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
        for request in (*known, *waiting):
            request.slot = None
        self._by_id = {request.id: request for request in waiting}
        self._by_generation = {request.generation: request for request in waiting}
        self._waiting = deque(waiting)
        self._start_empty()
        return failed

    def _start_empty(self) -> None:
        """No request admitted: every slot and block free."""
        self._slots = Slots(self._config.max_num_seqs)
        self._kv.release_all()
        self._prefills_since_decode = 0
        self._phase = _Phase.FILL

    def discard(self, batch: SchedulerOutput) -> None:
        """Forgets a batch that never reached the device."""
        self._land(batch)

    # -- choosing a batch ------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next batch, or None when nothing can run now."""
        choose = self._choose_refill if self._config.mode == "refill" else self._choose_no_refill
        stage = choose()
        if stage is None:
            return None
        slots, num_tokens = self._slots, 1
        if stage is Stage.PREFILL:
            rows = self._take_prompts()
        else:
            stage, slot_n = self._take(stage)
            rows = self._decode_rows(slot_n, stage)
        slot_n = rows.slot
        samples = bool((slots.draws[slot_n] & (rows.exit_depth > 0)).any())
        if stage is Stage.TOKENS and not samples:
            n = self._tokens_per_dispatch
            if (slots.max_tokens[slot_n] - slots.sampled[slot_n] >= n).all():
                num_tokens = n
        new = slot_n[~slots.on_device[slot_n]].tolist()
        updates = tuple(self._slot_update(slots.request[slot]) for slot in new)
        slots.in_flight[slot_n] += 1
        slots.on_device[slot_n] = True
        if stage is Stage.PREFILL:
            self._progress_prompts(rows)
            self._prefills_since_decode += 1
        else:
            self._progress(rows, stage, num_tokens)
            if stage is not Stage.CODA:
                self._prefills_since_decode = 0
        self._sequence += 1
        return SchedulerOutput(self._sequence, stage, rows, updates, samples, num_tokens)

    def _at(self, stage: int) -> np.ndarray:
        return self._slots.stage == stage

    def _choose_refill(self) -> Stage | None:
        recurrent, coda = self._at(RECURRENT), self._at(CODA)
        # Without the held rows a batch would stream the weights for a part of the rows only.
        held = bool(self._at(HELD).any())
        can_decode = not held and bool(recurrent.any() or coda.any())
        coda_due = can_decode and self._enough_exits(recurrent, coda)
        limit = self._config.max_prefill_batches_before_decode
        if not (held or can_decode) or self._prefills_since_decode < limit:
            self._admit()
            if self._at(PREFILL).any():
                return Stage.CODA if coda_due else Stage.PREFILL
        if not can_decode:
            return None
        if coda_due:
            return self._choose_coda(recurrent, coda)
        return self._choose_loop(recurrent)

    def _enough_exits(self, recurrent: np.ndarray, coda: np.ndarray) -> bool:
        count = np.count_nonzero(coda)
        if count >= self._config.min_coda_batch_size:
            return True
        # Whole tokens bring no row to the coda, nor do no rows at all: no use to wait for more.
        return count > 0 and self._choose_loop(recurrent) is Stage.TOKENS

    def _choose_coda(self, recurrent: np.ndarray, coda: np.ndarray) -> Stage:
        """Rows that exit run their next loop in the same batch, unless whole tokens are next."""
        slots = self._slots
        going_on = coda & (slots.sampled + 1 < slots.max_tokens)
        return Stage.CODA if slots.whole[going_on | recurrent].all() else Stage.BOUNDARY

    def _choose_loop(self, recurrent: np.ndarray) -> Stage:
        slots = self._slots
        ready = slots.whole[recurrent].all() and not slots.depth[recurrent].any()
        return Stage.TOKENS if ready else Stage.RECURRENT

    def _choose_no_refill(self) -> Stage | None:
        if self._at(HELD).any():
            return None
        for _ in range(len(_Phase) + 1):  # once around, from wherever it stands
            if self._phase is _Phase.FILL:
                self._admit()
                if self._at(PREFILL).any():
                    return Stage.PREFILL
                self._phase = _Phase.CORE
            if self._phase is _Phase.CORE:
                recurrent = self._at(RECURRENT)
                if recurrent.any():
                    stage = self._choose_loop(recurrent)
                    if stage is Stage.TOKENS:
                        self._phase = _Phase.CODA
                    return stage
                self._phase = _Phase.CODA
            if self._at(CODA).any():
                return Stage.CODA
            self._phase = _Phase.FILL
        return None

    def _admit(self) -> None:
        """First come, first served, each with all the blocks it can ever need."""
        while self._waiting and self._slots.has_free:
            request = self._waiting[0]
            if not self._kv.can_allocate(request.max_positions):
                return
            self._waiting.popleft()
            self._kv.allocate(request.generation, request.max_positions)
            request.admitted = self._clock()
            self._slots.fill(request, self._policy, self._limits.full_depth)

    def _take(self, stage: Stage) -> tuple[Stage, np.ndarray]:
        """The slots of a decode batch, within the token budget; whoever waits longest comes first,
        in whichever stage: where not all fit, none is passed over."""
        slots = self._slots
        recurrent, coda = self._at(RECURRENT), self._at(CODA)
        if stage is Stage.CODA:
            return stage, slots.oldest(coda, self._max_rows)
        if stage is Stage.BOUNDARY:
            slot_n = slots.oldest(coda | recurrent, self._max_rows)
            if coda[slot_n].any():
                return stage, slot_n
            return Stage.RECURRENT, slot_n  # the rows that exit had to wait for older ones
        if stage is Stage.RECURRENT and slots.whole[recurrent].all():
            # Full-depth rows that are out of step meet at the start of a token.
            recurrent &= slots.depth > 0
        return stage, slots.oldest(recurrent, self._max_rows)

    def _take_prompts(self) -> Rows:
        slots, budget = self._slots, self._config.max_num_batched_tokens
        rows: list[Row] = []
        queue = slots.oldest(self._at(PREFILL), self._max_rows).tolist()[::-1]
        while queue and budget > 0:
            slot = queue.pop()
            request, position = slots.request[slot], int(slots.position[slot])
            size = min(self._config.prefill_chunk_size, budget)
            if self._kv.geometry.planes == 1:
                size = min(size, SHARED_PREFILL_TOKENS)
            end = min(position + size, len(request.prompt))
            rows.append(
                Row(
                    request.generation,
                    slot,
                    position,
                    depth=self._limits.full_depth,
                    size=end - position,
                    tokens=request.prompt[position:end],
                    ends_prompt=end == len(request.prompt),
                )
            )
            budget -= end - position
        return Rows.of(rows)

    def _decode_rows(self, slot_n: np.ndarray, stage: Stage) -> Rows:
        slots = self._slots
        exits = slots.stage[slot_n] == CODA
        sampled, none = slots.sampled[slot_n], np.zeros(len(slot_n), np.int32)
        reads_gate = none > 0
        if stage is Stage.TOKENS:
            depth = exit_depth = none + self._limits.full_depth
        else:
            exit_depth = np.where(exits, slots.exit_depth[slot_n], 0)
            begins = (stage is Stage.BOUNDARY) & (sampled + 1 < slots.max_tokens[slot_n])
            depth = np.where(exits, begins, slots.depth[slot_n] + 1)
            # With no gate to read the first is behind the last.
            reads_gate = (depth >= slots.first_gate[slot_n]) & (depth <= slots.last_gate[slot_n])
        return Rows(
            generation=slots.generation[slot_n],
            slot=slot_n,
            position=slots.position[slot_n],
            depth=depth,
            exit_depth=exit_depth,
            output_index=sampled,
            reads_gate=reads_gate,
            ends_prompt=none > 0,
            size=none,
            window=none,
        )

    def _progress_prompts(self, rows: Rows) -> None:
        slots = self._slots
        for i, slot in enumerate(rows.slot.tolist()):
            slots.position[slot] += len(rows.tokens[i])
            if rows.ends_prompt[i]:
                slots.position[slot] -= 1  # the last prompt position gives the first output
                slots.depth[slot] = slots.exit_depth[slot] = rows.depth[i]
        slots.enter(rows.slot, np.where(rows.ends_prompt, CODA, PREFILL))

    def _progress(self, rows: Rows, stage: Stage, num_tokens: int) -> None:
        """What scheduled rows will have done, as far as no result is needed to know."""
        slots = self._slots
        exits = rows.exit_depth > 0
        if exits.any():
            slot_n = rows.slot[exits]
            slots.sampled[slot_n] += num_tokens
            last = slots.sampled[slot_n] >= slots.max_tokens[slot_n]
            slots.stage[slot_n[last]] = LAST
            going_on = slot_n[~last]
            slots.position[going_on] += num_tokens
            slots.start_token(going_on)
            if stage is Stage.CODA or stage is Stage.TOKENS:
                slots.enter(going_on, RECURRENT)
        if stage is Stage.RECURRENT or stage is Stage.BOUNDARY:
            loops = rows.depth > 0
            slots.depth[rows.slot[loops]] = rows.depth[loops]
            self._route(rows.slot[loops])

    def _route(self, slot_n: np.ndarray) -> None:
        """Where requests go after their last scheduled loop, by what is known by now."""
        slots = self._slots
        depth = slots.depth[slot_n]
        # The signals up to this loop, or the one before, must be known.
        needed = np.minimum(depth - self._ahead, slots.last_gate[slot_n])
        awaited = needed >= np.maximum(slots.heard[slot_n] + 1, slots.first_gate[slot_n])
        leaves = depth >= slots.exit_depth[slot_n]
        known = np.where(leaves, CODA, RECURRENT)
        slots.enter(slot_n, np.where(awaited, HELD, known))

    def _slot_update(self, request: Request) -> SlotUpdate:
        return SlotUpdate(
            slot=request.slot,
            block_table=self._kv.table(request.generation),
            temperature=min(request.params.temperature, _HOTTEST),
            top_k=request.params.top_k,
            top_p=request.params.top_p,
            seed=request.params.seed,
            min_loops=request.bounds.min_loops,
            exit_threshold=request.bounds.threshold,
        )

    # -- applying results ------------------------------------------------------------------------

    def update(self, batch: SchedulerOutput, output: RunnerOutput) -> list[Request]:
        """Applies a batch's results; returns the requests that got a token.

        A result whose request has ended meanwhile only brings its resources home.
        """
        if output.sequence != batch.sequence:
            raise RuntimeError(f"results of batch {output.sequence} for batch {batch.sequence}")
        if not np.array_equal(output.rows.of.generation, batch.rows.generation):
            raise RuntimeError(f"results of other requests for batch {batch.sequence}")
        alive = self._land(batch)
        grown = self._emit(batch.rows, output, alive) if output.rows.token is not None else []
        if batch.reads_gate:
            self._apply_signals(batch.rows, output)
        return grown

    def _land(self, batch: SchedulerOutput) -> np.ndarray:
        """A batch came back; which of its rows' requests have not ended, [rows] bool."""
        slots, slot_n = self._slots, batch.rows.slot
        slots.in_flight[slot_n] -= 1
        alive = slots.stage[slot_n] != ENDED
        for slot in slot_n[~alive & (slots.in_flight[slot_n] == 0)].tolist():
            self._release(slots.request[slot])
        return alive

    def _emit(self, rows: Rows, output: RunnerOutput, alive: np.ndarray) -> list[Request]:
        """Gives requests their sampled tokens, each up to the one that ends it."""
        now, request = self._clock(), self._slots.request
        sampled = np.flatnonzero(alive & (rows.exit_depth > 0))
        grown, emitted, loops = [], 0, 0
        for slot, depth, tokens, logprobs in zip(
            rows.slot[sampled].tolist(),
            rows.exit_depth[sampled].tolist(),
            output.rows.token[sampled].tolist(),
            output.rows.logprob[sampled].tolist(),
            strict=True,
        ):
            one = request[slot]
            grown.append(one)
            one.last_token = now
            if one.first_token is None:
                one.first_token = now
            for token, logprob in zip(tokens, logprobs):
                one.tokens.append(token)
                one.depths.append(depth)
                one.logprobs.append(logprob)
                emitted += 1
                loops += depth
                if token in one.stop_ids:
                    self._finish(one, "stop")
                    break
                if len(one.tokens) == one.params.max_tokens:
                    self._finish(one, "length")
                    break
        self._counts["tokens"] += emitted
        self._counts["loops"] += loops
        return grown

    def _apply_signals(self, rows: Rows, output: RunnerOutput) -> None:
        slots = self._slots
        # Only of the token that the request is at.
        current = rows.output_index + (rows.exit_depth > 0) == slots.sampled[rows.slot]
        stage = slots.stage[rows.slot]
        current &= rows.reads_gate & (stage >= RECURRENT) & (stage <= HELD)
        slots.heard[rows.slot[current]] = rows.depth[current]
        # Not of a loop that was run in vain, or whose exit is decided.
        decides = current & (rows.depth < slots.exit_depth[rows.slot])
        slot_n, loop = rows.slot[decides], rows.depth[decides]
        if output.rows.leaves is not None:
            leaves = output.rows.leaves[decides]
        else:
            leaves, slots.remaining[slot_n] = self._policy.decide(
                output.rows.exit_probability[decides],
                slots.remaining[slot_n],
                loop,
                slots.min_loops[slot_n],
                slots.threshold[slot_n],
            )
        slot_n = slot_n[leaves]
        slots.exit_depth[slot_n] = loop[leaves] + self._policy.lag
        in_vain = slots.depth[slot_n] - slots.exit_depth[slot_n]
        self._counts["idle_row_loops"] += int(in_vain[in_vain > 0].sum())
        slot_n = rows.slot[current]
        held = slots.stage[slot_n] == HELD
        has_left = slots.depth[slot_n] >= slots.exit_depth[slot_n]
        self._route(slot_n[held | (has_left & (slots.stage[slot_n] == RECURRENT))])

    # -- how requests end ------------------------------------------------------------------------

    def _finish(self, request: Request, reason: str) -> None:
        """Ends a request, whatever it waits for."""
        request.finish_reason = reason
        del self._by_id[request.id]
        if request.slot is None:
            self._waiting.remove(request)
            del self._by_generation[request.generation]
            return
        self._slots.stage[request.slot] = ENDED
        if not self._slots.in_flight[request.slot]:
            self._release(request)

    def _release(self, request: Request) -> None:
        del self._by_generation[request.generation]
        self._kv.release(request.generation)
        self._slots.free(request.slot)
