"""Random workloads on the real scheduler and engine core, over the simulated device.

simulate(workload) raises AssertionError at the first thing that is not as it must be.
"""

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np

from rlt_jax.engine.core import EngineCore, logger
from rlt_jax.engine.intake import ModelLimits
from rlt_jax.engine.kv_accounting import KVAccounting, KVGeometry
from rlt_jax.engine.request import Request
from rlt_jax.engine.scheduler import Scheduler
from rlt_jax.outputs import RequestOutput
from tests.engine.preemption_watch import PreemptionWatch
from tests.engine.simulated_device import Interrupt, ResetError, SimulatedDevice
from tests.engine.simulated_limits import TRANSFERS, Limits
from tests.engine.simulated_model import FULL_DEPTH, VOCAB_SIZE, read_text
from tests.engine.workloads import (
    EXIT_MODES,
    Ask,
    Choices,
    Workload,
    expected_output,
    make_workload,
)


class Simulation:
    """One workload on one engine; events counts what happened, the batches included."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self._clock = itertools.count().__next__  # no two things happen at the same time
        self.core, self.device = build(workload, self._clock)
        self.events = self.device.events
        self._live: dict[int, Ask] = {}  # added and not told to have ended, by number
        self._requests: dict[int, Request] = {}  # every one that was added, by number
        self._ended: dict[int, float] = {}  # when each ended, by number
        self._outputs: dict[int, RequestOutput] = {}  # the last one, by number
        self._aborted: set[int] = set()
        self._raised = False  # by the last step, which then told nothing
        self._watch = PreemptionWatch(
            workload, self._requests, self._ended, self._clock, self.events
        )
        self.core.observers = (self._watch,)

    def run(self) -> Counter:
        """Steps until everything has ended."""
        # What is logged of a failure would hold its batch, and what that restores.
        logger.disabled = True
        try:
            return self._run()
        finally:
            logger.disabled = False

    def _run(self) -> Counter:
        tokens = sum(len(ask.prompt) + ask.params.max_tokens for ask in self._asks)
        work = tokens * (FULL_DEPTH + 1)  # each loop and coda alone
        arrivals = max(ask.arrives for ask in self._asks)
        failures = 2 * len(self.workload.failures)
        steps = work + arrivals + failures + len(self._asks) + 1
        for step in itertools.count():
            if step >= steps + self._steps_of_preemption():
                break
            for ask in self._asks:
                if ask.arrives == step:
                    self._add(ask)
                if ask.aborted == step:
                    self._abort(ask)
            if self.core.has_unfinished_requests():
                self._step()
            elif step >= arrivals:
                self._check_end()
                return self.events
        raise AssertionError(f"not done after {step + 1} steps: {self.core.scheduler.stats()}")

    def _steps_of_preemption(self) -> int:
        """Transfers, and prompt tokens that ran in vain."""
        lost = sum(one.preemptions * len(one.prompt) for one in self._requests.values())
        transfers = sum(self.events[stage.value] for stage in TRANSFERS)
        return transfers + lost * (FULL_DEPTH + 1)

    @property
    def _asks(self) -> tuple[Ask, ...]:
        return self.workload.asks

    def _add(self, ask: Ask) -> None:
        workload = self.workload
        fits = -(-ask.positions // workload.block_size) <= workload.num_pages
        taken = self.core.scheduler.find(ask.name) is not None
        if not self._raised:
            assert taken == self._is_live(ask.name)
        trace_id = str(ask.number) if workload.exit_mode == "trace" else None
        try:
            self.core.add_request(ask.name, ask.prompt, ask.params, trace_id)
        except ValueError:
            assert taken or not fits
            self.events["name in use" if taken else "too large"] += 1
            return
        assert fits and not taken
        self.events["name used again"] += ask.name in {a.name for a in self._added()}
        self._live[ask.number] = ask
        self._requests[ask.number] = self.core.scheduler.find(ask.name)

    def _is_live(self, name: str) -> bool:
        return any(ask.name == name for ask in self._live.values())

    def _added(self) -> list[Ask]:
        return [ask for ask in self._asks if ask.number in self._requests]

    def _abort(self, ask: Ask) -> None:
        """Whoever has the name now is meant."""
        request = self.core.scheduler.find(ask.name)
        self.events[f"abort: {self._state_of(ask.name)}"] += 1
        assert self.core.abort_request(ask.name) == (request is not None)
        if request is not None:
            victim = self._live.pop(request.params.seed)
            assert request is self._requests[victim.number]
            self._aborted.add(victim.number)
            self._ended[victim.number] = self._clock()
        elif not self._raised:
            assert not self._is_live(ask.name)

    def _state_of(self, name: str) -> str:
        request = self.core.scheduler.find(name)
        if request is None:
            return "unknown"
        if request.slot is None and request.preemptions:
            return "preempted"
        busy = self.device.is_busy(request.generation)
        return self.core.scheduler.stage_of(name).name.lower() + (" in flight" if busy else "")

    def _step(self) -> None:
        device, core = self.device, self.core
        losses, refused = device.losses, set(device.refused)
        outputs = []
        may_fail = self._raised
        try:
            outputs = core.step(self.workload.only_finished)
            self._raised = False
        except (Interrupt, ResetError):
            self._raised = True
        newly_refused = device.refused - refused
        for output in outputs:
            self._told(output, may_fail or device.losses > losses, newly_refused)
        if device.losses > losses:
            assert core.scheduler.stats()["running"] == 0
        if not self._raised:
            live = {self._requests[number].generation for number in self._live}
            assert not live & newly_refused
        self._check_prefixes()
        self._check_stats()
        self._watch.check_step()

    def _told(self, output: RequestOutput, all_failed: bool, refused: set[int]) -> None:
        number = output.sampling_params.seed
        ask = self._asks[number]
        before = self._outputs.get(number)
        assert before is None or not before.finished, "told after its end"
        self._outputs[number] = output
        assert (output.request_id, output.prompt_token_ids) == (ask.name, ask.prompt)
        assert output.finished or not self.workload.only_finished
        if before is not None:
            self._check_growth(before, output)
        if not output.finished:
            assert number in self._live and output.token_ids and output.error is None
            return
        if number not in self._aborted:
            del self._live[number]
            self._ended[number] = self._clock()
        self.events[f"ended: {output.finish_reason}"] += 1
        assert (output.finish_reason == "abort") == (number in self._aborted)
        assert (output.finish_reason == "error") == (output.error is not None)
        if output.error is not None:
            self._check_error(self._requests[number], all_failed, refused)
            assert output.metrics.queue_time is not None, "it was waiting, and must wait on"
        assert output.metrics.preemptions == self._requests[number].preemptions

    def _check_error(self, request: Request, all_failed: bool, refused: set[int]) -> None:
        if not (all_failed or request.generation in refused):
            workload = self.workload
            assert workload.overcommits and "no host memory left" in request.error
            positions = len(request.prompt) + len(request.tokens)
            transfers = -(-positions // (workload.block_size * workload.pages_per_transfer))
            used = self.core.scheduler.stats()["host_blocks"] // workload.planes
            room = workload.host_pages - used
            assert transfers * workload.pages_per_transfer > room, "there was host memory for it"
            self.events["no host memory left"] += 1

    def _check_growth(self, before: RequestOutput, output: RequestOutput) -> None:
        count = len(before.token_ids)
        assert output.token_ids[:count] == before.token_ids
        assert len(output.token_ids) > count or output.finish_reason in ("abort", "error")

    def _check_prefixes(self) -> None:
        """What came from the cache is what was asked for, and was there to be shared."""
        by_generation = {request.generation: request for request in self._requests.values()}
        for prefix in self.device.served_prefixes():
            reader = by_generation[prefix.reader]
            count = prefix.num_tokens
            assert count == reader.cached_tokens < len(reader.prompt)
            assert prefix.text == read_text(reader.prompt[:count]), "a cached page of other tokens"
            writers = [by_generation[writer] for writer in prefix.writers]
            salts = {writer.params.cache_salt for writer in writers}
            assert salts == {reader.params.cache_salt}, "a cached page of another salt"
            self.events["prefix from the cache"] += 1
            whole = len(reader.prompt) - count == self.workload.block_size
            self.events["prefix of all pages but the last"] += whole
            self.events["prefix of several requests"] += len(writers) > 1
            self.events["prefix of an unfinished prompt"] += not all(w.finished for w in writers)
            self.events["prefix of a cancelled prompt"] += any(
                w.finish_reason == "abort" and not w.tokens for w in writers
            )

    def _check_stats(self) -> None:
        core, workload = self.core, self.workload
        stats = core.scheduler.stats()
        tables = core.scheduler.block_tables()
        pages = self._pages_in_use()
        assert stats["total_blocks"] == workload.num_pages * workload.planes
        unused = stats["free_blocks"] + stats["cached_blocks"]
        used = len(pages) * workload.planes
        assert used + unused == stats["total_blocks"], "not every block is in one place"
        assert 0 <= stats["cached_blocks"] <= stats["total_blocks"]
        assert workload.caches_prefixes or not stats["cached_blocks"]
        assert 0 <= stats["reserved_blocks"] <= unused, "a request may run out of blocks"
        assert workload.incremental or not stats["reserved_blocks"]
        assert bool(pages) == bool(stats["running"])
        assert len(tables) <= stats["running"] <= workload.scheduling.max_num_seqs
        assert stats["prefill"] + stats["recurrent"] + stats["coda"] <= stats["running"]
        assert stats["staged"] <= stats["prefill"]
        assert stats["preempted"] <= stats["waiting"]
        counted = stats["host_blocks"] // workload.planes
        there = self.device.transfers.pages_on_host
        assert max(counted, there) <= workload.host_pages, "too much on the host"
        assert 0 <= stats["waiting"] <= len(self._live) or self._raised
        self.events["waiting for a slot or blocks"] += stats["waiting"] > 0

    def _pages_in_use(self) -> set[int]:
        """Those of all requests that have a slot; what two have in common is the same for both."""
        size = self.workload.block_size
        holders: dict[int, tuple[Request, int]] = {}  # with the index in its table
        for request in self._requests.values():
            if request.slot is None:
                continue
            for i, page in enumerate(self.core.scheduler.kv.table(request.generation)):
                other, index = holders.setdefault(page, (request, i))
                if other is not request:
                    end = (i + 1) * size
                    inside = end <= min(len(request.prompt), len(other.prompt))
                    same = inside and request.prompt[:end] == other.prompt[:end]
                    assert index == i and same, "a page of two prompts"
                    salts = {request.params.cache_salt, other.params.cache_salt}
                    assert len(salts) == 1, "a page of two salts"
        return set(holders)

    def _check_end(self) -> None:
        for ask in self._added():
            output = self._outputs[ask.number]
            assert output.finished, "its end was not told"
            tokens, depths, reason = expected_output(ask, self.workload)
            count = len(output.token_ids)
            if output.finish_reason in ("abort", "error"):
                assert count < len(tokens), "it had ended by itself"
            else:
                assert (count, output.finish_reason) == (len(tokens), reason)
            assert output.token_ids == tuple(tokens[:count])
            assert output.exit_depths == tuple(depths[:count])
            logprobs = None if ask.params.logprobs is None else (-0.5,) * count
            assert output.logprobs == logprobs
            assert output.num_cached_tokens % self.workload.block_size == 0
            self.events.update(f"exit at {depth}" for depth in depths[1:count])
        assert not self._live
        self._check_overtaking()
        self._check_totals()
        stats = self.core.scheduler.stats()
        cached = stats.pop("cached_blocks")
        assert stats.pop("free_blocks") + cached == stats.pop("total_blocks")
        assert set(stats.values()) == {0}, stats
        assert self.core.scheduler.block_tables() == {}
        assert not self.device.transfers.pages_on_host, "what was saved is still there"
        if self.workload.exit_mode == "trace":
            assert not self.events["gates"]

    def _check_overtaking(self) -> None:
        """Nobody was overtaken more often than allowed: passed by one behind it while it waited."""
        scheduling, requests = self.workload.scheduling, self._requests

        for number, one in requests.items():
            until = self._ended[number] if one.admitted is None else one.admitted
            overtaken = sum(
                other.admitted is not None
                and one.arrived < other.admitted < until
                and self._watch.place(other) > self._watch.place(one)
                for other in requests.values()
            )
            assert overtaken <= scheduling.max_admission_bypasses, "overtaken too often"
            self.events["overtaken"] += overtaken > 0
            as_often_as_allowed = overtaken and overtaken == scheduling.max_admission_bypasses
            self.events["overtaken as often as allowed"] += bool(as_often_as_allowed)

    def _check_totals(self) -> None:
        totals = self.core.scheduler.totals()
        depths = [depth for output in self._outputs.values() for depth in output.exit_depths]
        assert totals["output_tokens"] == len(depths)
        assert totals["mean_depth"] == (np.mean(depths) if depths else None)
        admitted = [one for one in self._requests.values() if one.admitted is not None]
        assert totals["prompt_tokens"] == sum(len(one.prompt) for one in admitted)
        assert totals["preemptions"] == sum(one.preemptions for one in admitted)
        if not totals["preemptions"]:
            assert totals["cached_prompt_tokens"] == sum(one.cached_tokens for one in admitted)
        if all(output.finish_reason == "length" for output in self._outputs.values()):
            assert totals["idle_row_loops"] == self.events["loops in vain"]


def build(workload: Workload, clock: Callable[[], float]) -> tuple[EngineCore, SimulatedDevice]:
    scheduling = workload.scheduling.resolve("cpu")
    limits = ModelLimits(VOCAB_SIZE, FULL_DEPTH, 512, workload.eos_token_ids)
    mode = EXIT_MODES[workload.exit_mode]
    policy = mode.policy(workload.asks)
    geometry = KVGeometry(workload.num_pages, workload.planes, workload.block_size)
    kv = KVAccounting(geometry, workload.incremental, workload.watermark_ratio)
    scheduler = Scheduler(
        scheduling,
        limits,
        policy,
        kv,
        workload.tokens_per_dispatch,
        workload.run_ahead,
        workload.caches_prefixes,
        workload.host_pages,
        workload.pages_per_transfer,
        clock,
    )
    sizes = Limits(
        num_pages=workload.num_pages,
        planes=workload.planes,
        block_size=workload.block_size,
        num_slots=scheduling.max_num_seqs,
        max_rows=min(scheduling.max_num_seqs, scheduling.max_num_batched_tokens),
        max_prompt_tokens=scheduling.max_num_batched_tokens,
        chunk=scheduling.prefill_chunk_size,
        max_in_flight=workload.max_in_flight,
        tokens_per_dispatch=workload.tokens_per_dispatch,
        run_ahead=workload.run_ahead,
        lag=mode.lag,
        incremental=workload.incremental,
        caches_prefixes=workload.caches_prefixes,
        preempts=scheduling.enable_preemption,
        pages_per_transfer=workload.pages_per_transfer,
    )
    decides = mode.triggers if workload.device_decides else None
    device = SimulatedDevice(sizes, workload.failures, workload.lateness, decides)
    return EngineCore(scheduler, device, limits, policy, workload.max_in_flight, clock), device


def simulate(workload: Workload) -> Counter:
    return Simulation(workload).run()


def simulate_seed(seed: int) -> Counter:
    """The workload of this seed, which a failure names."""
    try:
        return simulate(make_workload(Choices(seed)))
    except BaseException as error:
        error.add_note(f"to run this workload alone: RLT_SIMULATOR_SEED={seed}")
        raise
