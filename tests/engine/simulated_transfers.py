"""Slots that leave the simulated device for the host, and come back: SAVE and RESTORE."""

import dataclasses
import weakref
from collections import Counter
from collections.abc import Collection
from typing import Any

import numpy as np

from rlt_jax.engine.types import Row, SchedulerOutput, Stage
from tests.engine.simulated_kv import Pages, SimulatedKV, Slot
from tests.engine.simulated_limits import Limits

_STATE = ("prompt_ended", "hidden", "token", "position", "depth", "sampled", "signals", "left")


@dataclasses.dataclass(frozen=True, eq=False)
class Content:
    """What a SAVE gives: pages of a slot from the `first`-th on, and what else the slot holds."""

    generation: int
    first: int
    count: int
    pages: Pages
    texts: tuple[int, ...]
    state: dict[str, Any]


class Transfers:
    """Knows every request that ever had a slot, by its last one, and what was saved of it.

    Survives the loss of the device state, as what is saved does.
    """

    def __init__(self, limits: Limits, events: Counter):
        self._limits, self._events = limits, events
        self._last: dict[int, Slot] = {}  # by generation
        self._of_lost_devices: set[Slot] = set()
        self._contents: weakref.WeakSet[Content] = weakref.WeakSet()

    @property
    def pages_on_host(self) -> int:
        """Pages of the contents that somebody still has."""
        return sum(content.count for content in self._contents)

    def lose_device(self) -> None:
        self._of_lost_devices = set(self._last.values())

    # -- when a batch is submitted ----------------------------------------------------------------

    def enter(self, slot: Slot, stage: Stage, in_flight: Collection[Slot]) -> None:
        """A slot of a request that had none, or another one before."""
        before = self._last.get(slot.generation)
        self._last[slot.generation] = slot
        if before is None:
            assert stage is not Stage.RESTORE, "nothing was saved of it"
            return
        assert self._limits.preempts and before not in in_flight, "a slot is set twice"
        if stage is Stage.RESTORE:
            slot.lacking, slot.told_left = before.saved, before.told_left
            self._events["restored on another device"] += before in self._of_lost_devices
            self._events["restored into other pages"] += not np.array_equal(
                slot.table[: before.saved], before.table[: before.saved]
            )
        else:
            assert not before.saved, "what was saved is not restored"
            assert not before.sampled, "a request with output begins again"
            self._events["began again"] += 1

    def check(self, batch: SchedulerOutput, slot: Slot, in_flight: dict[Slot, set[Stage]]) -> None:
        """One row of any batch. in_flight: the stages of the batches of each slot."""
        stage, transfer = batch.stage, batch.transfer
        assert not slot.saved or stage is Stage.SAVE, "a victim runs on"
        assert not slot.lacking or stage is Stage.RESTORE, "it runs before all its pages are back"
        if transfer is None:
            return
        assert 1 <= transfer.count <= self._limits.pages_per_transfer
        assert transfer.first + transfer.count <= slot.table.size
        if stage is Stage.SAVE:
            assert in_flight.get(slot, set()) <= {Stage.SAVE}, "a victim is still in flight"
            assert not slot.awaited and transfer.content is None
            assert transfer.first == slot.saved, "pages are saved out of order"
            slot.saved += transfer.count
            return
        content = transfer.content
        assert content.generation == slot.generation, "what is restored is another request's"
        pages, saved = (transfer.first, transfer.count), (content.first, content.count)
        assert pages == saved, "other pages than those saved"
        assert transfer.first == slot.restored, "pages are restored out of order"
        assert transfer.count <= slot.lacking, "more than was saved"
        slot.sent = batch.rows[0].position
        slot.lacking -= transfer.count
        slot.restored += transfer.count

    # -- when it runs -----------------------------------------------------------------------------

    def save(self, kv: SimulatedKV, batch: SchedulerOutput, row: Row, slot: Slot) -> Content:
        transfer, events = batch.transfer, self._events
        state, texts = {name: getattr(slot, name) for name in _STATE}, kv.texts(slot)
        if slot.prompt_ended:
            assert row.position == slot.position
        else:
            # What is between its loops is lost.
            assert row.position <= slot.position
            state["position"], texts = row.position, texts[: row.position]
            for depth in range(1, self._limits.planes + 1):
                kv.read_prompt(slot, row.position, depth)
        if not transfer.first:
            events["saved in the prompt"] += not slot.prompt_ended
            events["saved between loops"] += slot.prompt_ended and slot.depth > 0
        state["signals"] = tuple(slot.signals)
        pages = kv.save(slot, transfer.first, transfer.count)
        content = Content(slot.generation, transfer.first, transfer.count, pages, texts, state)
        self._contents.add(content)
        return content

    def restore(self, kv: SimulatedKV, batch: SchedulerOutput, row: Row, slot: Slot) -> None:
        content = batch.transfer.content
        kv.restore(slot, content.first, content.pages, content.texts)
        for name, value in content.state.items():
            setattr(slot, name, value)
        slot.signals = list(slot.signals)
        assert row.position == slot.position
