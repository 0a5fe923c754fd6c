"""From the waiting requests to slots and pages: who comes in, and who must leave for it."""

from rlt_jax.config import SchedulerConfig
from rlt_jax.engine.admission import WaitingRequests
from rlt_jax.engine.exit_policy import ExitPolicy
from rlt_jax.engine.kv_accounting import KVAccounting
from rlt_jax.engine.preemption import HostMemory, Preemption
from rlt_jax.engine.request import Request
from rlt_jax.engine.slots import Slots

_MOST_URGENT, _LEAST_URGENT = -(2**62), 2**62


class Seating:
    """Gives requests a slot and blocks while there are any, reserved ones for what each may still
    need included: none runs out on the way. Where blocks can be had by preemption, and come one by
    one, nothing is reserved."""

    def __init__(
        self,
        config: SchedulerConfig,
        full_depth: int,
        tokens_per_dispatch: int,
        policy: ExitPolicy,
        kv: KVAccounting,
        waiting: WaitingRequests,
        slots: Slots,
        host: HostMemory,
        preemption: Preemption,
    ):
        self._preempts = config.enable_preemption
        self._by_priority = config.policy == "priority"
        self._overcommits = config.enable_preemption and kv.incremental
        self._full_depth = full_depth
        self._tokens_per_dispatch = tokens_per_dispatch
        self._policy = policy
        self._kv = kv
        self._waiting = waiting
        self._slots = slots
        self._host = host
        self._preemption = preemption
        # Positions by generation, and the state of the blocks for which they hold.
        self._shared: dict[int, int] = {}
        self._shared_at = -1

    def wait(self, request: Request) -> None:
        """A new request, or one that leaves its slot."""
        self._waiting.add(request, self._promise(request))

    def admit(self) -> list[Request]:
        """Those that come in now."""
        seated: list[Request] = []
        preemption, slots = self._preemption, self._slots
        if slots.has_free and not preemption.is_short_of_pages:
            for request in self._waiting.admissible(
                self._kv.room, self._shared_positions, only_first=preemption.is_making_way
            ):
                self._seat(request)
                seated.append(request)
                if not slots.has_free:
                    break
        first = self._waiting.first
        if self._preempts and first is not None:
            positions, hashes = self._promise(first), self._reusable(first)
            preemption.make_way(first, self._priority(first), positions, hashes)
        return seated

    def _seat(self, request: Request) -> None:
        """A slot and blocks for a request that no longer waits."""
        owner, kv, slots = request.generation, self._kv, self._slots
        promise, saved = self._promise(request), self._host.take(owner)
        if saved is not None:
            kv.allocate(owner, max(saved.positions, len(request.prompt)), promise)
        else:
            prefix = kv.find_prefix(self._reusable(request))
            kv.allocate(owner, len(request.prompt), promise, prefix)
            request.cached_tokens = len(prefix) * kv.geometry.block_size
        demand = kv.pages(request.max_positions)
        slots.fill(request, self._policy, self._full_depth, self._priority(request), demand)
        slots.capacity[request.slot] = kv.capacity(owner)
        if saved is not None:
            self._preemption.come_back(request.slot, saved)

    def _priority(self, request: Request) -> int:
        """Lower is more urgent; all beyond 2**62 are equally so."""
        if not self._by_priority:
            return 0
        return min(max(request.params.priority, _MOST_URGENT), _LEAST_URGENT)

    def _promise(self, request: Request) -> int:
        """Positions that a request must have room for to come in."""
        if not self._overcommits:
            return request.max_positions
        positions = max(self._host.saved_positions(request.generation) or 0, len(request.prompt))
        if request.preemptions:  # it must not leave again before its next dispatch of tokens
            positions += self._tokens_per_dispatch
        return min(positions, request.max_positions)

    # -- prefixes that are there -----------------------------------------------------------------

    def _reusable(self, request: Request) -> tuple[bytes, ...]:
        """The pages that may come from the cache: the last prompt token is always computed, since
        its hidden state gives the first output. What was saved comes back as a whole."""
        if self._host.saved_positions(request.generation) is not None:
            return ()
        return request.page_hashes[: (len(request.prompt) - 1) // self._kv.geometry.block_size]

    def _shared_positions(self, request: Request, wanted: int) -> int:
        """Those of a waiting request whose pages others hold, or 0 where they cannot be as many as
        wanted. Kept while nothing has changed: at every step the same requests are looked at."""
        if len(request.page_hashes) * self._kv.geometry.block_size < wanted:
            return 0
        if self._shared_at != self._kv.changes:
            self._shared_at = self._kv.changes
            self._shared.clear()
        if request.generation not in self._shared:
            shared = self._kv.shared_positions(self._reusable(request))
            self._shared[request.generation] = shared
        return self._shared[request.generation]
