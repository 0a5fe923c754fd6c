"""Sees from the batches and the requests who leaves its slot, and whether it had to."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping

from rlt_jax.engine.request import Request
from rlt_jax.engine.types import SchedulerOutput, Stage
from tests.engine.simulated_limits import TRANSFERS
from tests.engine.workloads import Workload


class PreemptionWatch:
    """An observer of the engine.

    A victim was chosen at some time after it ran last: what is asked for must have been so since.
    requests: every one that was added; ended: when each ended; both by number.
    """

    def __init__(
        self,
        workload: Workload,
        requests: Mapping[int, Request],
        ended: Mapping[int, float],
        clock: Callable[[], float],
        events: Counter,
    ):
        self._scheduling = workload.scheduling
        self._overcommits = workload.overcommits
        self._requests, self._ended = requests, ended
        self._clock, self._events = clock, events
        self._ran: dict[int, float] = {}  # when each was last part of a batch, by generation
        self._ran_before: dict[int, float] = {}  # the same before this step
        self._left: Counter[Request] = Counter()
        self._left_at: dict[Request, tuple[int, ...]] = {}  # what had happened when each left last
        self._sequence = 0

    def submitting(self, batch: SchedulerOutput, _) -> contextlib.AbstractContextManager:
        if batch.stage is Stage.SAVE and not batch.transfer.first:
            generation = batch.rows[0].generation
            by_generation = {one.generation: one for one in self._requests.values()}
            self._check_victim(by_generation[generation], self._ran)
        if batch.stage not in TRANSFERS:
            self._ran.update(dict.fromkeys(batch.rows.generation.tolist(), self._clock()))
        return contextlib.nullcontext()

    def collecting(self, batch: SchedulerOutput) -> contextlib.AbstractContextManager:
        """In the order of submission."""
        assert batch.sequence > self._sequence
        self._sequence = batch.sequence
        return contextlib.nullcontext()

    def lost(self, error: str) -> None:
        """Nothing of it is asked here."""

    def check_step(self) -> None:
        """Those that left without a SAVE."""
        tokens = sum(len(one.tokens) for one in self._requests.values())
        happened = (tokens, len(self._requests), len(self._ended))
        for one in self._requests.values():
            if one.preemptions > self._left[one]:
                assert one.preemptions == self._left[one] + 1, "it left twice in a step"
                assert self._left_at.get(one) != happened, "it left twice for nothing"
                self._left_at[one] = happened
                self._left[one] += 1
                self._check_victim(one, self._ran_before)
                self._events["preempted"] += 1
        self._ran_before = dict(self._ran)

    def place(self, request: Request) -> tuple[int, int]:
        """Among those that run or wait: the first is the most urgent, or the oldest of these."""
        by_priority = self._scheduling.policy == "priority"
        return (request.params.priority * by_priority, request.generation)

    def _check_victim(self, victim: Request, ran: Mapping[int, float]) -> None:
        assert self._scheduling.enable_preemption
        since = ran.get(victim.generation, victim.admitted)
        others = [
            one
            for number, one in self._requests.items()
            if one is not victim and self._ended.get(number, since) >= since
        ]
        place = self.place(victim)
        ran_too = (one for one in others if one.admitted is not None)
        first = min(map(self.place, ran_too), default=place)
        assert first < place, "the most urgent request had to leave"
        if not self._overcommits:
            waited = (o for o in others if o.admitted is None or o.admitted >= since)
            returned = (one for one in others if one.preemptions)
            places = map(self.place, (*waited, *returned))
            assert any(urgency < place[0] for urgency, _ in places), "nobody more urgent waits"
