"""The life of requests: admission, progress, results, ends. Owns their progress and block tables.

Who is admitted next is decided in admission.py, which rows run next in batching.py; how they come
on is in progress.py.

schedule() -> SchedulerOutput -> (runner) -> RunnerOutput -> update(). Progress that needs no
result is made when a batch is scheduled: sampled tokens stay on the device, so the next batch of a
request may be submitted before this one is read. Only a request whose next stage hangs on a
signal is held until update() has it: without run_ahead that of its last loop, with it that of the
loop before. So loop r + 2 never starts before the signal of loop r was applied.
"""

import time
from collections.abc import Callable, Iterable

import numpy as np

from rlt_jax.config import SchedulerConfig
from rlt_jax.engine.admission import WaitingRequests
from rlt_jax.engine.batching import Batcher, Choice
from rlt_jax.engine.exit_policy import ExitPolicy
from rlt_jax.engine.intake import ModelLimits
from rlt_jax.engine.kv_accounting import KVAccounting
from rlt_jax.engine.preemption import HostMemory, Preemption
from rlt_jax.engine.prefix_cache import page_hashes
from rlt_jax.engine.progress import Progress
from rlt_jax.engine.request import Request
from rlt_jax.engine.seating import Seating
from rlt_jax.engine.slots import ENDED, RequestStage, Slots
from rlt_jax.engine.staging import Staging
from rlt_jax.engine.types import (
    Row,
    Rows,
    RunnerOutput,
    SchedulerOutput,
    SlotUpdate,
    Stage,
)
from rlt_jax.validation import fail

_HOTTEST = 1e30  # already uniform, and still a float32


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
        caches_prefixes: bool = False,
        host_pages: int = 0,
        pages_per_transfer: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        """config: resolved, no None left. run_ahead: submit a request's next loop before the
        signal of the last one is read, which the policy's lag or a device that decides by itself
        must allow. host_pages: logical pages that may be saved of preempted requests.
        pages_per_transfer: those of a SAVE batch at most."""
        self._config = config
        self._limits = limits
        self._policy = policy
        self._kv = kv
        self._tokens_per_dispatch = tokens_per_dispatch
        self._run_ahead = run_ahead
        self._caches_prefixes = caches_prefixes
        self._host = HostMemory(host_pages)
        self._pages_per_transfer = pages_per_transfer
        self._clock = clock
        self._waiting = WaitingRequests(config)
        self._by_id: dict[str, Request] = {}
        self._by_generation: dict[int, Request] = {}
        self._sequence = 0
        self._counts = {
            "tokens": 0,
            "loops": 0,
            "idle_row_loops": 0,
            "prompt_tokens": 0,
            "cached_prompt_tokens": 0,
            "preemptions": 0,
        }
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
        """What is there now: all zero but the blocks when nothing runs. staged: prompts with chunks
        between their loops. cached_blocks: those that only the prefix cache holds. preempted: of
        the waiting requests those saved on the host, where they take host_blocks with those on
        their way."""
        by_stage = np.bincount(self._slots.stage, minlength=len(RequestStage))
        named = ("PREFILL", "RECURRENT", "CODA", "HELD", "SAVING", "RESTORING")
        return {
            "running": len(self._by_generation) - len(self._waiting),
            "waiting": len(self._waiting),
            **{name.lower(): int(by_stage[RequestStage[name]]) for name in named},
            "staged": len(self._staging),
            "free_blocks": self._kv.free_blocks,
            "cached_blocks": self._kv.cached_blocks,
            "reserved_blocks": self._kv.reserved_blocks,
            "preempted": len(self._host),
            "host_blocks": self._host.used_pages * self._kv.geometry.planes,
            "total_blocks": self._kv.total_blocks,
        }

    def totals(self) -> dict[str, float]:
        """Since the engine was built. mean_depth: loops per output token (None: no token yet).
        idle_row_loops: loops run in vain by rows that had already left. prompt_tokens: of all
        requests admitted, cached_prompt_tokens: those of them that were not computed. preemptions:
        times that a request had to leave its slot."""
        tokens = self._counts["tokens"]
        counted = ("idle_row_loops", "prompt_tokens", "cached_prompt_tokens", "preemptions")
        return {
            "output_tokens": tokens,
            "mean_depth": self._counts["loops"] / tokens if tokens else None,
            **{name: self._counts[name] for name in counted},
        }

    def add(self, request: Request) -> None:
        """Queues a request; raises ValueError when its id is in use."""
        if request.id in self._by_id:
            fail("request_id", request.id, "must not be the id of an unfinished request")
        eos = () if request.params.ignore_eos else self._limits.eos_token_ids
        request.stop_ids = frozenset((*request.params.stop_token_ids, *eos))
        if self._caches_prefixes:
            size, salt = self._kv.geometry.block_size, request.params.cache_salt
            request.page_hashes = page_hashes(request.prompt, size, salt)
        self._by_id[request.id] = request
        self._by_generation[request.generation] = request
        self._seating.wait(request)

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
        known = (self._by_generation.get(generation) for generation in dict.fromkeys(generations))
        failed = [request for request in known if request is not None and not request.finished]
        for request in failed:
            request.error = error
            self._finish(request, "error")
        return failed

    def fail_for_memory(self) -> list[Request]:
        """Where nobody can go on for want of pages, and nobody can be saved: ends the least urgent
        of them with an error, so that the others can."""
        request = self._preemption.least_urgent_starved()
        if request is None:
            return []
        error = (
            "preempted, but there is no host memory left to save it in: a larger"
            " CacheConfig.host_memory_bytes or KV pool is needed"
        )
        return self.fail([request.generation], error)

    def fail_running(self, error: str) -> list[Request]:
        """After the device state was lost: every admitted request ends with an error, waiting
        ones stay queued.

        Nothing is in flight any more, and everything is built anew from the waiting queue: the
        call holds whatever an interrupted schedule() or update() left half done.
        """
        self._waiting.drop_finished()
        waiting = list(self._waiting)
        self._host.keep_only(request.generation for request in waiting)
        known = {*self._by_generation.values(), *self._by_id.values()} - set(waiting)
        failed = sorted((r for r in known if not r.finished), key=lambda r: r.generation)
        for request in failed:
            request.error = error
            request.finish_reason = "error"
        for request in (*known, *waiting):
            request.slot = None
        self._by_id = {request.id: request for request in waiting}
        self._by_generation = {request.generation: request for request in waiting}
        self._start_empty()
        return failed

    def _start_empty(self) -> None:
        """No request admitted: every slot and block free."""
        config, full_depth = self._config, self._limits.full_depth
        self._kv.release_all()
        self._slots = Slots(config.max_num_seqs)
        self._staging = Staging(full_depth * config.max_num_batched_tokens, full_depth)
        self._batcher = Batcher(
            config,
            full_depth,
            self._tokens_per_dispatch,
            self._slots,
            self._staging,
            shared=self._kv.geometry.planes == 1,
        )
        self._progress = Progress(
            self._slots, self._staging, self._policy, full_depth, self._run_ahead
        )
        self._preemption = Preemption(
            self._slots,
            self._kv,
            self._staging,
            self._host,
            self._pages_per_transfer,
            self._wait_again,
        )
        self._seating = Seating(
            config,
            full_depth,
            self._tokens_per_dispatch,
            self._policy,
            self._kv,
            self._waiting,
            self._slots,
            self._host,
            self._preemption,
        )
        self._transferred = False

    def discard(self, batch: SchedulerOutput) -> None:
        """Forgets a batch that never reached the device."""
        self._land(batch)

    # -- making a batch --------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next batch, or None when nothing can run now."""
        self._preemption.begin_saving()
        self._preemption.feed()
        self._admit()
        # Pages go to the host and back while the device works on other batches in between.
        batch = None if self._transferred else self._schedule_transfer()
        self._transferred = batch is not None
        return batch or self._schedule_rows() or self._schedule_transfer()

    def _schedule_rows(self) -> SchedulerOutput | None:
        choice = self._batcher.choose()
        while choice is not None and self._kv.incremental:
            starved = self._extend_tables(choice)
            if not starved:
                break
            choice = choice.without(starved)
            if len(choice.rows):
                break
            self._preemption.feed()
            choice = self._batcher.choose()
        if choice is None:
            return None
        rows = choice.rows
        samples = bool((self._slots.draws[rows.slot] & (rows.exit_depth > 0)).any())
        updates = self._send(rows)
        self._progress.schedule(choice)
        return SchedulerOutput(
            self._sequence,
            choice.stage,
            rows,
            updates,
            samples,
            choice.num_tokens,
            choice.num_loops,
        )

    def _schedule_transfer(self) -> SchedulerOutput | None:
        """Pages of a request that leaves or comes back."""
        transfer = self._preemption.next_transfer()
        if transfer is None:
            return None
        stage, slot, pages = transfer
        generation, position = self._slots.generation[slot], self._slots.position[slot]
        rows = Rows.of([Row(int(generation), slot, int(position))])
        return SchedulerOutput(self._sequence + 1, stage, rows, self._send(rows), transfer=pages)

    def _send(self, rows: Rows) -> tuple[SlotUpdate, ...]:
        """These are in flight from now on; what the device must be told of their slots."""
        slots, slot_n = self._slots, rows.slot
        new = slot_n[~slots.on_device[slot_n]].tolist()
        updates = tuple(self._slot_update(slots.request[slot]) for slot in new)
        slots.in_flight[slot_n] += 1
        slots.on_device[slot_n] = True
        self._sequence += 1
        return updates

    def _admit(self) -> None:
        for request in self._seating.admit():
            if request.admitted is None:
                request.admitted = self._clock()
                self._counts["prompt_tokens"] += len(request.prompt)
                self._counts["cached_prompt_tokens"] += request.cached_tokens

    def _wait_again(self, request: Request) -> None:
        """It leaves its slot."""
        self._counts["preemptions"] += 1
        self._seating.wait(request)

    def _extend_tables(self, choice: Choice) -> list[int]:
        """Blocks for decode rows that come to a new page; their tables go up with the batch.
        Returns the slots for which there are none."""
        slots, slot_n, last_position = self._slots, choice.rows.slot, choice.last_position
        lacking = last_position >= slots.capacity[slot_n]
        starved: list[int] = []
        if not lacking.any():
            return starved
        for slot, position in zip(
            slot_n[lacking].tolist(), last_position[lacking].tolist(), strict=True
        ):
            owner = slots.request[slot].generation
            if not self._kv.can_extend(owner, position + 1):
                self._preemption.starve(slot, position + 1)
                starved.append(slot)
                continue
            self._kv.extend(owner, position + 1)
            slots.capacity[slot] = self._kv.capacity(owner)
            slots.on_device[slot] = False
        return starved

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
        if batch.stage is Stage.PREFILL or batch.stage is Stage.MIXED:
            self._complete_prompts(batch)
        alive = self._land(batch)
        if batch.transfer is not None:
            if alive.all():
                self._preemption.landed(batch, output.content)
            return []
        grown = self._emit(batch.rows, output, alive) if output.rows.token is not None else []
        if batch.reads_gate:
            self._counts["idle_row_loops"] += self._progress.hear(batch.rows, output)
        return grown

    def _complete_prompts(self, batch: SchedulerOutput) -> None:
        """Prompt tokens that have run all their loops, and this is the evidence: what their pages
        hold is there for others, too, even if their own request has ended."""
        slots, rows = self._slots, batch.rows
        ends = rows.size > 0
        if batch.stage is Stage.MIXED:
            ends = ends & (rows.depth + batch.num_loops > self._limits.full_depth)
        ends_at = (rows.position + rows.size)[ends]
        size = self._kv.geometry.block_size
        for slot, completed in zip(rows.slot[ends].tolist(), ends_at.tolist(), strict=True):
            request = slots.request[slot]
            first, slots.completed[slot] = int(slots.completed[slot]) // size, completed
            hashes = request.page_hashes[first : completed // size]
            if hashes:
                self._kv.publish(request.generation, hashes, first)

    def _land(self, batch: SchedulerOutput) -> np.ndarray:
        """A batch came back; which of its rows' requests have not ended, [rows] bool."""
        slots, slot_n = self._slots, batch.rows.slot
        slots.in_flight[slot_n] -= 1
        alive = slots.stage[slot_n] != ENDED
        # A prompt may have several rows in a batch.
        for slot in set(slot_n[~alive & (slots.in_flight[slot_n] == 0)].tolist()):
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

    # -- how requests end ------------------------------------------------------------------------

    def _finish(self, request: Request, reason: str) -> None:
        """Ends a request, whatever it waits for."""
        request.finish_reason = reason
        del self._by_id[request.id]
        self._host.forget(request.generation)
        if request.slot is None:
            self._waiting.remove(request)
            del self._by_generation[request.generation]
            return
        self._slots.stage[request.slot] = ENDED
        self._staging.drop(request.slot)
        self._preemption.forget(request.slot)
        if not self._slots.in_flight[request.slot]:
            self._release(request)

    def _release(self, request: Request) -> None:
        del self._by_generation[request.generation]
        self._kv.release(request.generation)
        self._slots.free(request.slot)
