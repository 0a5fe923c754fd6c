"""The slots and the K/V pages of the simulated device, and what every page holds.

Instead of K/V a place holds a mark: which request wrote it, for which position, after which loop.
So a read can tell whether it finds what was written for it, or what a cached prefix promises.
"""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from rlt_jax.engine.types import SlotUpdate
from tests.engine.simulated_limits import Limits
from tests.engine.simulated_model import FULL_DEPTH, read_prompt

_GENERATION, _POSITION = 20, 4  # bits of a mark below these
_DEPTHS = np.arange(1, FULL_DEPTH + 1)[:, None]  # [planes, 1]


class Slot:
    """One request on the device.

    table: the block table that was sent last; writers: who its pages were given to, to write.
    cached: prompt tokens whose K/V others have written. Of the table that has arrived, with the
    batch that it was sent with: cells: where the K/V of each position lies in a plane; marks: what
    tells its K/V there from all others, without the depth; history: the K/V that later tokens must
    find, in each plane.
    signals: of the token's loops. left: the device has decided that it runs no further loop.
    awaited: output index and loop of every signal that is asked for and not collected.
    told_left: output index of the last token whose leaving was collected. sent: prompt tokens of
    batches so far, and those cached.
    saved: pages that batches were to save. lacking, restored: those of the slot it had before that
    no batch was to restore yet, and the others.
    """

    def __init__(self, generation: int, update: SlotUpdate, limits: Limits, cached: int = 0):
        self.generation, self.cached = generation, cached
        self.temperature, self.seed = update.temperature, update.seed
        self.min_loops, self.threshold = update.min_loops, update.exit_threshold
        self.block_size = limits.block_size
        self.table = self.writers = self.cells = self.marks = np.zeros(0, np.int64)
        self.history = np.zeros((limits.planes, 0), np.int64)
        self.prompt_ended = False
        self.text = self.hidden = self.token = 0
        self.position, self.depth, self.sampled = cached, 0, 0
        self.signals: list[np.float32] = []
        self.left = False
        self.awaited: list[tuple[int, int]] = []
        self.told_left, self.sent = -1, cached
        self.saved = self.lacking = self.restored = 0

    def set_table(self, table: np.ndarray) -> None:
        """It arrives; nothing is written in its new pages."""
        block, planes = self.block_size, len(self.history)
        self.cells = (table[:, None] * block + np.arange(block)).reshape(-1)
        new = np.arange(len(self.marks), self.cells.size)
        marks = (self.generation << _GENERATION) + (new << _POSITION)
        self.marks = np.concatenate([self.marks, marks])
        self.history = np.concatenate([self.history, np.zeros((planes, len(new)), int)], axis=1)


@dataclasses.dataclass(frozen=True)
class Pages:
    """What lies in pages of a slot, [planes, positions], and what it knows of them."""

    places: np.ndarray
    marks: np.ndarray
    history: np.ndarray


@dataclasses.dataclass(frozen=True)
class Prefix:
    """What a request found in the pages that its table began with: prompt tokens, what was read of
    the prompt by then, who wrote them."""

    reader: int
    num_tokens: int
    text: int
    writers: frozenset[int]


class SimulatedKV:
    """Owns the content of the pages.

    Known when batches are submitted and collected: writers, the generation that each page was given
    to; completed, those of whose prompt tokens every loop was collected. served: what was found.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._writers = np.full(limits.num_pages, -1)
        self._completed = np.zeros(limits.num_pages, bool)
        self._places = np.zeros((limits.planes, limits.num_pages * limits.block_size), np.int64)
        self._texts: dict[int, list[int]] = {}  # after each prompt token, by generation
        self.served: list[Prefix] = []

    # -- when a batch is submitted or collected ---------------------------------------------------

    def give(self, slot: Slot, pages: Sequence[int], busy: Collection[int]) -> int:
        """A table is sent: new for the slot, or grown. busy: pages that batches in flight know.
        Returns how many completed pages are given up for it."""
        table = np.array(pages)
        assert len(set(pages)) == len(pages), "a page twice in one table"
        assert all(0 <= page < self._limits.num_pages for page in pages)
        assert (table[: slot.table.size] == slot.table).all(), "written pages are gone"
        start = slot.table.size
        if slot.cached and not start:
            assert self._limits.caches_prefixes and slot.cached % slot.block_size == 0
            start = slot.cached // slot.block_size
            assert self._completed[table[:start]].all(), "a page is shared that is not completed"
            slot.writers = self._writers[table[:start]]
        new = table[start:]
        assert busy.isdisjoint(new.tolist()), "a page is still in use"
        given_up = np.count_nonzero(self._completed[new])
        self._writers[new], self._completed[new] = slot.generation, False
        slot.table = table
        slot.writers = np.append(slot.writers, np.full(len(new), slot.generation))
        return int(given_up)

    def check_owner(self, slot: Slot) -> None:
        has_it = self._writers[slot.table] == slot.writers
        assert has_it.all(), "a page went to another request"

    def complete(self, slot: Slot, position: int) -> None:
        """Every prompt token before this position has run all its loops, as was collected."""
        self._completed[slot.table[: position // slot.block_size]] = True

    # -- when it runs -----------------------------------------------------------------------------

    def set_table(self, slot: Slot, table: np.ndarray) -> None:
        """It arrives; where the slot is new, with the prefix that lies in its first pages."""
        is_new = not slot.cells.size
        slot.set_table(table)
        if is_new and slot.cached:
            self._read_prefix(slot)

    def _read_prefix(self, slot: Slot) -> None:
        """From here on the slot has this prefix, whatever its prompt is."""
        found = self._places[:, slot.cells[: slot.cached]]
        marks = found[0] - 1
        assert (found == marks + _DEPTHS).all(), "a cached page lacks loops of its tokens"
        position = (marks >> _POSITION) % (1 << _GENERATION - _POSITION)
        assert (position == np.arange(slot.cached)).all(), "a cached page is of other positions"
        writers = (marks >> _GENERATION).tolist()
        for i, writer in enumerate(writers):
            before = self._texts[writer][i - 1] if i else 0
            assert before == slot.text, "a cached page follows another beginning"
            self._read_on(slot, i, self._texts[writer][i])
        slot.marks[: slot.cached] = marks
        slot.history[:, : slot.cached] = found
        self.served.append(Prefix(slot.generation, slot.cached, slot.text, frozenset(writers)))

    def read_tokens(self, slot: Slot, tokens: Sequence[int]) -> None:
        """A prompt goes on."""
        for position, token in enumerate(tokens, slot.position):
            self._read_on(slot, position, read_prompt(slot.text, token))
        slot.position += len(tokens)
        assert slot.position <= slot.cells.size

    def _read_on(self, slot: Slot, position: int, text: int) -> None:
        """Others may know its pages, even when it begins again."""
        slot.text = text
        texts = self._texts.setdefault(slot.generation, [])
        texts[position : position + 1] = [text]

    def write(self, slot: Slot, place: slice | int, depth: int) -> None:
        """The K/V of one loop of these positions."""
        self._places[self._plane(depth), slot.cells[place]] = slot.marks[place] + depth

    def write_prompt(self, slot: Slot, place: slice, depth: int) -> None:
        """The same of prompt tokens, which is final."""
        self.write(slot, place, depth)
        slot.history[self._plane(depth), place] = slot.marks[place] + depth

    def keep(self, slot: Slot, position: int, exit_depth: int) -> None:
        """Finalizes a token's K/V: in the planes beyond its exit depth, a copy of that depth's."""
        kept = slot.marks[position] + exit_depth
        if self._limits.planes > 1:
            kept = slot.marks[position] + np.minimum(_DEPTHS[:, 0], exit_depth)
        self._places[:, slot.cells[position]] = kept
        slot.history[:, position] = kept

    def check_written(self, slot: Slot, position: int, depth: int) -> None:
        """A loop's K/V of one position."""
        written = self._places[self._plane(depth), slot.cells[position]]
        assert written == slot.marks[position] + depth, "its own K/V is not there"

    def read_history(self, slot: Slot, end: int, depth: int) -> None:
        plane = self._plane(depth)
        found = self._places[plane, slot.cells[:end]]
        assert (found == slot.history[plane, :end]).all(), "history is not what was written"

    def read_prompt(self, slot: Slot, end: int, depth: int) -> None:
        """A chunk reads the prompt before it, which has run this loop, or all of them."""
        expected = slot.marks[:end] + (depth if self._limits.planes > 1 else FULL_DEPTH)
        found = self._places[self._plane(depth), slot.cells[:end]]
        assert (found == expected).all(), "the prompt before it has not run this loop"

    # -- to the host and back ---------------------------------------------------------------------

    def texts(self, slot: Slot) -> tuple[int, ...]:
        """What was read of its prompt after each token."""
        return tuple(self._texts[slot.generation])

    def save(self, slot: Slot, first: int, count: int) -> Pages:
        place = slice(first * slot.block_size, (first + count) * slot.block_size)
        places = self._places[:, slot.cells[place]]
        return Pages(places, slot.marks[place].copy(), slot.history[:, place].copy())

    def restore(self, slot: Slot, first: int, pages: Pages, texts: tuple[int, ...]) -> None:
        place = slice(first * slot.block_size, first * slot.block_size + len(pages.marks))
        self._places[:, slot.cells[place]] = pages.places
        slot.marks[place], slot.history[:, place] = pages.marks, pages.history
        for position, text in enumerate(texts):
            self._read_on(slot, position, text)

    def _plane(self, depth: int) -> int:
        return min(depth, self._limits.planes) - 1
