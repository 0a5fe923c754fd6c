"""The progress of admitted requests: one entry per slot of every array."""

import enum
from typing import Any

import numpy as np

from rlt_jax.engine.exit_policy import ONE, ExitPolicy
from rlt_jax.engine.request import Request


class RequestStage(enum.IntEnum):
    """What a request waits for. HELD: for the signal of a batch in flight, which decides what
    comes next; LAST: for its last token; ENDED: for the last batch that knows it; SAVING,
    RESTORING: for its pages, on their way to the host or back. The stages of a token's loops lie
    side by side, from RECURRENT to HELD."""

    FREE = 0
    PREFILL = 1
    RECURRENT = 2
    CODA = 3
    HELD = 4
    LAST = 5
    ENDED = 6
    SAVING = 7
    RESTORING = 8
    WAITING = 9  # has no slot


# Plain numbers, for the hundreds of comparisons of a step.
FREE, PREFILL, RECURRENT, CODA, HELD, LAST, ENDED, SAVING, RESTORING = map(
    int, list(RequestStage)[:9]
)

# What a request that leaves its slot takes with it; the rest comes from what it asked.
_PROGRESS = [
    "stage",
    "position",
    "completed",
    "depth",
    "exit_depth",
    "sampled",
    "heard",
    "remaining",
]


class Slots:
    """Progress is what is scheduled; it may run ahead of the results.

    stage: RequestStage. turn: the order in which requests came to their stages. request: who has
    the slot. position: of the token being computed (in prefill, the next prompt token of which no
    loop is scheduled). completed: prompt tokens known to have run all loops. prompt_size: tokens of
    the prompt. capacity: positions that its block table holds. depth: loops that the token has run.
    exit_depth: where it leaves, as far as is known. sampled: output tokens, max_tokens of them in
    the end. remaining: probability that the token has not exited.
    heard: the last loop whose signal was applied. first_gate .. last_gate: loops whose signal is
    read. replays: exits where it is told to. whole: every token runs to full depth.
    draws: samples at a temperature above 0. in_flight: batches submitted and not collected.
    on_device: the device knows the slot, with its whole table. paused: no batch takes it.
    priority: lower is more urgent. demand: pages that it may need in all.
    """

    def __init__(self, count: int):
        self.stage = np.zeros(count, np.int8)
        self.turn = np.zeros(count, np.int64)
        self.request: list[Request | None] = [None] * count
        self.generation = np.zeros(count, np.int64)
        self.position, self.depth, self.exit_depth, self.sampled, self.max_tokens = (
            np.zeros(count, np.int32) for _ in range(5)
        )
        self.min_loops, self.max_loops, self.first_gate, self.last_gate, self.heard = (
            np.zeros(count, np.int32) for _ in range(5)
        )
        self.in_flight, self.prompt_size, self.completed, self.capacity = (
            np.zeros(count, np.int32) for _ in range(4)
        )
        self.remaining, self.threshold = np.ones(count, np.float32), np.ones(count, np.float32)
        self.whole, self.draws, self.on_device, self.replays, self.paused = (
            np.zeros(count, bool) for _ in range(5)
        )
        self.priority, self.demand = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._next_turn = 0
        self._free = list(range(count - 1, -1, -1))

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def fill(
        self, request: Request, policy: ExitPolicy, full_depth: int, priority: int, demand: int
    ) -> None:
        """Gives a request a slot; its prompt is next."""
        slot = request.slot = self._free.pop()
        bounds, params, gates = request.bounds, request.params, policy.gate_loops(request.bounds)
        self.request[slot] = request
        self.generation[slot] = request.generation
        for array in (self.depth, self.sampled, self.heard, self.in_flight):
            array[slot] = 0
        self.position[slot] = self.completed[slot] = request.cached_tokens
        self.max_tokens[slot] = params.max_tokens
        self.prompt_size[slot] = len(request.prompt)
        self.min_loops[slot], self.max_loops[slot] = bounds.min_loops, bounds.max_loops
        self.threshold[slot], self.replays[slot] = bounds.threshold, bounds.depths is not None
        self.first_gate[slot], self.last_gate[slot] = gates.start, gates.stop - 1
        self.whole[slot] = policy.fixed_depth(bounds) == full_depth
        self.draws[slot] = params.temperature > 0
        self.on_device[slot] = self.paused[slot] = False
        self.priority[slot], self.demand[slot] = priority, demand
        self.enter(np.array([slot]), RequestStage.PREFILL)

    def free(self, slot: int) -> None:
        self.request[slot].slot = None
        self.request[slot] = None
        self.stage[slot] = RequestStage.FREE
        self._free.append(slot)

    def progress_of(self, slot: int) -> dict[str, Any]:
        """All that cannot be told from the request itself."""
        return {name: getattr(self, name)[slot].item() for name in _PROGRESS}

    def put_progress(self, slot: int, progress: dict[str, Any]) -> None:
        for name in _PROGRESS:
            getattr(self, name)[slot] = progress[name]

    def enter(self, slot_n: np.ndarray, stage: RequestStage | np.ndarray) -> None:
        """These come to a stage, one after the other."""
        self.stage[slot_n] = stage
        self.turn[slot_n] = np.arange(self._next_turn, self._next_turn + len(slot_n))
        self._next_turn += len(slot_n)

    def oldest(self, chosen: np.ndarray, most: int) -> np.ndarray:
        """The slots of a mask [slots], those that came first before the others, `most` at most."""
        slot_n = np.flatnonzero(chosen)
        return slot_n[np.argsort(self.turn[slot_n])[:most]]

    def start_token(self, slot_n: np.ndarray) -> None:
        """The next token of these begins."""
        self.depth[slot_n] = 0
        self.heard[slot_n] = 0
        self.remaining[slot_n] = ONE
        self.exit_depth[slot_n] = self.max_loops[slot_n]
        for slot in slot_n[self.replays[slot_n]].tolist():
            self.exit_depth[slot] = self.request[slot].bounds.depths[self.sampled[slot]]
