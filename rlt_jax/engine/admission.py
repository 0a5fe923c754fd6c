"""The requests that wait, and which of them are admitted next.

They stand in the order of the policy. One that does not fit may be overtaken by later ones that do,
but only so often: then nobody behind it is admitted before it.
"""

import bisect
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator

from rlt_jax.config import SchedulerConfig
from rlt_jax.engine.request import Request


@dataclasses.dataclass(eq=False)
class _Waiting:
    """order: sorts by policy. bypasses_left: how often it may still be overtaken."""

    order: tuple[int, int]
    request: Request
    positions: int
    bypasses_left: int


_ORDER = operator.attrgetter("order")


class WaitingRequests:
    """A sorted list: at ten thousand entries, to put one in or take one out anywhere is still a
    matter of microseconds, and the first ones lie side by side for the scan."""

    def __init__(self, config: SchedulerConfig):
        self._by_priority = config.policy == "priority"
        self._scan_limit = config.admission_scan_limit
        self._max_bypasses = config.max_admission_bypasses
        self._queue: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        """In the order of the policy."""
        return (one.request for one in self._queue)

    @property
    def first(self) -> Request | None:
        """Whose turn it is."""
        return self._queue[0].request if self._queue else None

    def add(self, request: Request, positions: int | None = None) -> None:
        """positions: those that it must have room for to be admitted (None: all it may need)."""
        positions = positions or request.max_positions
        one = _Waiting(self._order(request), request, positions, self._max_bypasses)
        bisect.insort(self._queue, one, key=_ORDER)

    def remove(self, request: Request) -> None:
        """The request has ended while it waited."""
        del self._queue[bisect.bisect_left(self._queue, self._order(request), key=_ORDER)]

    def drop_finished(self) -> None:
        """Those whose end was interrupted before they were removed."""
        self._queue = [one for one in self._queue if not one.request.finished]

    def admissible(
        self,
        room: Callable[[], int],
        shared: Callable[[Request, int], int] = lambda *_: 0,
        only_first: bool = False,
    ) -> Iterator[Request]:
        """Takes out those whose turn it is, one by one; each must have its blocks before the next
        is asked for. room: positions that one request can have now. shared: those that it would
        have in common with others, and need no room; asked with those that are lacking, it may
        say 0 where there cannot be as many. only_first: nobody overtakes."""
        passed = 0  # those at the head of the queue that do not fit
        bypasses_left = math.inf  # of the one among them with the fewest
        most = room()
        for _ in range(1 if only_first else self._scan_limit):
            if passed == len(self._queue) or not bypasses_left:
                return
            one = self._queue[passed]
            lacking = one.positions - most
            if lacking <= 0 or lacking <= shared(one.request, lacking):
                for overtaken in self._queue[:passed]:
                    overtaken.bypasses_left -= 1
                bypasses_left -= 1
                del self._queue[passed]
                yield one.request
                most = room()
            else:
                passed += 1
                bypasses_left = min(bypasses_left, one.bypasses_left)

    def _order(self, request: Request) -> tuple[int, int]:
        """Generations count arrivals."""
        return (request.params.priority if self._by_priority else 0, request.generation)
