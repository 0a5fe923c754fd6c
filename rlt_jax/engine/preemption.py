"""Who leaves its slot before its end, and what is kept of it meanwhile.

A victim is paused: no further batch takes it. Once nothing of it is in flight, its pages go to the
host, a few in each batch of their own, and it waits again. When it is admitted for the second time
they come back the same way, and it goes on where it stood.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from rlt_jax.engine.kv_accounting import KVAccounting
from rlt_jax.engine.request import Request
from rlt_jax.engine.slots import ENDED, FREE, HELD, LAST, PREFILL, RESTORING, SAVING, Slots
from rlt_jax.engine.staging import Staging
from rlt_jax.engine.types import SchedulerOutput, Stage, Transfer


@dataclasses.dataclass
class Saved:
    """What is kept of a request. progress: the entries of its slot. positions: those whose K/V is
    kept, num_pages pages. pieces: they, in order. sent: pages on their way so far."""

    progress: dict[str, Any]
    positions: int
    num_pages: int
    pieces: list[Transfer] = dataclasses.field(default_factory=list)
    sent: int = 0


class HostMemory:
    """Owns what is saved, by the request's generation. Pages count from the decision that their
    request leaves until it is back, or has ended."""

    def __init__(self, num_pages: int):
        self._num_pages = num_pages
        self._pages: dict[int, int] = {}
        self._saved: dict[int, Saved] = {}

    @property
    def free_pages(self) -> int:
        return self._num_pages - self.used_pages

    @property
    def used_pages(self) -> int:
        return sum(self._pages.values())

    def __len__(self) -> int:
        """Requests that wait to be restored."""
        return len(self._saved)

    def reserve(self, generation: int, pages: int) -> None:
        self._pages[generation] = pages

    def holds(self, generation: int) -> bool:
        """Whether pages are reserved for it."""
        return generation in self._pages

    def keep(self, generation: int, saved: Saved) -> None:
        self._saved[generation] = saved

    def saved_positions(self, generation: int) -> int | None:
        """None: nothing is saved of it."""
        saved = self._saved.get(generation)
        return None if saved is None else saved.positions

    def take(self, generation: int) -> Saved | None:
        """What is saved, on its way back to the device."""
        return self._saved.pop(generation, None)

    def forget(self, generation: int) -> None:
        self._saved.pop(generation, None)
        self._pages.pop(generation, None)

    def keep_only(self, generations: Iterable[int]) -> None:
        """The others have ended."""
        for generation in set(self._pages) - set(generations):
            self.forget(generation)


class Preemption:
    """Owns which slots are being left, come back to, or lack pages."""

    def __init__(
        self,
        slots: Slots,
        kv: KVAccounting,
        staging: Staging,
        host: HostMemory,
        pages_per_transfer: int,
        wait_again: Callable[[Request], None],
    ):
        """wait_again: takes a request that is about to lose its slot."""
        self._slots = slots
        self._kv = kv
        self._staging = staging
        self._host = host
        self._pages_per_transfer = pages_per_transfer
        self._wait_again = wait_again
        self._leaving: dict[int, Saved | None] = {}  # by slot; None: still in flight
        self._returning: dict[int, Saved] = {}  # by slot
        self._starved: dict[int, int] = {}  # positions that a slot must have to go on
        self._way_for: Request | None = None  # whom others have left for

    @property
    def is_making_way(self) -> bool:
        """Whether somebody leaves, or has left for one that still waits: who left must not come
        back before that one is in."""
        coming = self._way_for
        return bool(self._leaving) or bool(coming and coming.slot is None and not coming.finished)

    @property
    def is_short_of_pages(self) -> bool:
        return bool(self._starved)

    # -- victims ---------------------------------------------------------------------------------

    def make_way(
        self, coming: Request, priority: int, positions: int, hashes: Sequence[bytes]
    ) -> None:
        """Pauses requests less urgent than one that waits, and lacks a slot, or pages for so many
        positions, which may begin with those of these hashes. Nobody, where that would not do."""
        slots = self._slots
        candidates = list(self._able_to_leave(slots.priority > priority))
        if not candidates:
            return
        going = self._going()
        owners = [slots.request[slot].generation for slot in going + candidates]
        least = len(going) or int(not slots.has_free)
        for count, lacking in enumerate(self._kv.lacking(positions, hashes, owners)):
            if lacking <= 0 and count >= least:
                for slot in candidates[: count - len(going)]:
                    self._way_for = coming
                    self._pause(slot)
                return

    def _going(self) -> list[int]:
        """Slots that come free though nobody else leaves."""
        stage = self._slots.stage
        return [*self._leaving, *np.flatnonzero((stage == LAST) | (stage == ENDED)).tolist()]

    def feed(self) -> None:
        """Pages for those that lack some, the most urgent first; where there are none, somebody
        must leave for it, if only itself. Where nobody can, the others have what is there."""
        for slot in sorted(self._starved, key=self._urgency):
            while slot in self._starved and not self._extend(slot):
                if self._going():
                    return
                if not self._preempt_for(slot):
                    break

    def _extend(self, slot: int) -> bool:
        """Whether there were pages for it."""
        slots, kv, positions = self._slots, self._kv, self._starved[slot]
        owner = slots.request[slot].generation
        if not kv.can_extend(owner, positions):
            return False
        kv.extend(owner, positions)
        slots.capacity[slot] = kv.capacity(owner)
        slots.on_device[slot] = slots.paused[slot] = False
        del self._starved[slot]
        return True

    def starve(self, slot: int, positions: int) -> None:
        """This slot cannot go on without pages for so many positions."""
        self._starved[slot] = positions
        self._slots.paused[slot] = True

    def least_urgent_starved(self) -> Request | None:
        """Whom to give up where nobody can go on; None: nobody lacks pages."""
        if not self._starved:
            return None
        return self._slots.request[max(self._starved, key=self._urgency)]

    def _preempt_for(self, starved: int) -> bool:
        """Whether anybody can leave."""
        slots = self._slots
        victim = next(self._able_to_leave(slots.priority >= slots.priority[starved]), None)
        if victim is not None:
            self._pause(victim)
        return victim is not None

    def _able_to_leave(self, eligible: np.ndarray) -> Iterator[int]:
        """Victims for which there is host memory, beside those before them, or which may begin
        again."""
        room, slot_n = self._host.free_pages, self._victims(eligible)
        kept_n, sampled_n = self._pages_to_keep(slot_n), self._slots.sampled[slot_n]
        for slot, kept, sampled in zip(
            slot_n.tolist(), kept_n.tolist(), sampled_n.tolist(), strict=True
        ):
            if kept <= room:
                room -= kept
            elif sampled:
                continue
            yield slot

    def _victims(self, eligible: np.ndarray) -> np.ndarray:
        """Slots of a mask [slots], the least urgent first, of these the largest demand, then the
        latest. Never the oldest of the most urgent: whoever else leaves, it comes to its end."""
        slots = self._slots
        running = (slots.stage != FREE) & (slots.stage != ENDED)
        running[list(self._leaving)] = False
        may_leave = eligible & running & (slots.stage >= PREFILL) & (slots.stage <= HELD)
        may_leave[list(self._returning)] = False
        slot_n = np.flatnonzero(may_leave)
        if len(slot_n) == 0:
            return slot_n
        running_n = np.flatnonzero(running)
        first = running_n[np.lexsort((slots.generation[running_n], slots.priority[running_n]))[0]]
        keys = slots.generation[slot_n], slots.demand[slot_n], slots.priority[slot_n]
        slot_n = slot_n[np.lexsort(keys)[::-1]]
        return slot_n[slot_n != first]

    def _urgency(self, slot: int) -> tuple[int, int]:
        return int(self._slots.priority[slot]), int(self._slots.generation[slot])

    def _positions_to_keep(self, slot_n: np.ndarray | int) -> np.ndarray:
        """Of a prompt those that have run all loops: at most its position."""
        return self._slots.position[slot_n] + (self._slots.depth[slot_n] > 0)

    def _pages_to_keep(self, slot_n: np.ndarray | int) -> np.ndarray:
        """In host memory, where each transfer takes as much as a full one."""
        positions_of_one = self._kv.geometry.block_size * self._pages_per_transfer
        transfers = -(-self._positions_to_keep(slot_n) // positions_of_one)
        return transfers * self._pages_per_transfer

    # -- leaving ---------------------------------------------------------------------------------

    def _pause(self, slot: int) -> None:
        self._slots.paused[slot] = True
        self._starved.pop(slot, None)
        self._staging.drop(slot)  # of a prompt, what is between its loops is lost
        self._leaving[slot] = None
        pages = int(self._pages_to_keep(slot))
        if pages <= self._host.free_pages:
            self._host.reserve(self._slots.request[slot].generation, pages)
        if not self._slots.in_flight[slot]:
            self._begin_saving(slot)

    def begin_saving(self) -> None:
        """Of victims of which nothing is in flight any more."""
        waiting = [slot for slot, saved in self._leaving.items() if saved is None]
        for slot in waiting:
            if not self._slots.in_flight[slot]:
                self._begin_saving(slot)

    def _begin_saving(self, slot: int) -> None:
        slots, generation = self._slots, self._slots.request[slot].generation
        if slots.stage[slot] == PREFILL:
            slots.position[slot] = slots.completed[slot]
        positions = int(self._positions_to_keep(slot))
        computed = positions > slots.request[slot].cached_tokens
        if not computed or not self._host.holds(generation):
            return self._leave(slot, None)
        saved = Saved(slots.progress_of(slot), positions, self._kv.pages(positions))
        slots.stage[slot] = SAVING
        self._leaving[slot] = saved

    def _leave(self, slot: int, saved: Saved | None) -> None:
        """Gives up the slot and the pages. Nothing saved: the request begins again."""
        request = self._slots.request[slot]
        request.preemptions += 1
        if saved is None:
            self._host.forget(request.generation)
        else:
            self._host.keep(request.generation, saved)
        self._way_for = None if request is self._way_for else self._way_for  # it was in
        self._wait_again(request)
        del self._leaving[slot]
        self._kv.release(request.generation)
        self._slots.free(slot)

    # -- transfers -------------------------------------------------------------------------------

    def come_back(self, slot: int, saved: Saved) -> None:
        """A request whose pages are to be restored before it goes on."""
        self._slots.put_progress(slot, saved.progress)
        self._slots.stage[slot] = RESTORING
        saved.sent = 0
        self._returning[slot] = saved

    def next_transfer(self) -> tuple[Stage, int, Transfer] | None:
        """The next batch of pages, and whose."""
        for slot, saved in self._leaving.items():
            if saved is not None and saved.sent < saved.num_pages:
                count = min(self._pages_per_transfer, saved.num_pages - saved.sent)
                transfer = Transfer(saved.sent, count)
                saved.sent += count
                return Stage.SAVE, slot, transfer
        for slot, saved in self._returning.items():
            if saved.sent < saved.num_pages:
                transfer = next(piece for piece in saved.pieces if piece.first == saved.sent)
                saved.sent += transfer.count
                if saved.sent == saved.num_pages:
                    # What comes next finds the pages there: batches run in the order of submission.
                    self._slots.enter(np.array([slot]), saved.progress["stage"])
                return Stage.RESTORE, slot, transfer
        return None

    def landed(self, batch: SchedulerOutput, content: Any) -> None:
        """A transfer is complete, and its request has not ended."""
        row, transfer = batch.rows[0], batch.transfer
        saves = batch.stage is Stage.SAVE
        saved = self._leaving[row.slot] if saves else self._returning[row.slot]
        is_last = transfer.first + transfer.count == saved.num_pages
        if saves:
            saved.pieces.append(dataclasses.replace(transfer, content=content))
            if is_last:
                self._leave(row.slot, saved)
        elif is_last:
            del self._returning[row.slot]
            self._host.forget(row.generation)

    def forget(self, slot: int) -> None:
        """The request of this slot has ended."""
        for slots in (self._leaving, self._returning, self._starved):
            slots.pop(slot, None)
