"""Prompt chunks between their loops, and the place that each has in the device's prompt window.

A chunk has the first rows that are free: so those of a lone prompt, at most `full_depth` at a time,
go around a ring. Its place is free as soon as its last loop is scheduled: programs run in the order
in which they are submitted, so the next owner writes after the former has read.
"""

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class Part:
    """Of a prompt: `size` tokens from `position` on."""

    position: int
    size: int
    ends_prompt: bool


@dataclasses.dataclass
class Chunk:
    """A part that has run `depth` loops and waits for the next one. window: the first of its rows
    in the prompt window."""

    part: Part
    window: int
    depth: int = 0


class Staging:
    """Owns the chunks between their loops, by the slot of their request."""

    def __init__(self, num_rows: int, full_depth: int):
        """num_rows: of the window."""
        self._num_rows, self._full_depth = num_rows, full_depth
        # Of a prompt the oldest first, each at least one loop behind the one before it.
        self._chunks: dict[int, list[Chunk]] = {}

    def __len__(self) -> int:
        """Prompts between their loops."""
        return len(self._chunks)

    def chunks_of(self, slot: int) -> tuple[Chunk, ...]:
        """Those between their loops, oldest first: each may run its next loop."""
        return tuple(self._chunks.get(slot, ()))

    def start(self, slot: int, part: Part) -> int | None:
        """A chunk that is about to run its first loop: its place in the window, None without one
        (and then it has not started)."""
        window = self._first_gap(part.size)
        if window is not None:
            self._chunks.setdefault(slot, []).append(Chunk(part, window))
        return window

    def _first_gap(self, size: int) -> int | None:
        chunks = itertools.chain.from_iterable(self._chunks.values())
        placed = sorted((chunk.window, chunk.window + chunk.part.size) for chunk in chunks)
        starts = [0, *(end for _, end in placed)]  # of the gaps, some of them empty
        ends = [*(start for start, _ in placed), self._num_rows]
        return next((first for first, end in zip(starts, ends) if first + size <= end), None)

    def advance(self, slot: int, position: int, num_loops: int) -> None:
        """The chunk at this position has run more loops; after its last one it is forgotten."""
        chunks = self._chunks[slot]
        chunk = next(chunk for chunk in chunks if chunk.part.position == position)
        chunk.depth += num_loops
        if chunk.depth == self._full_depth:
            chunks.remove(chunk)
            if not chunks:
                self.drop(slot)

    def drop(self, slot: int) -> None:
        """The request has ended, or nothing of it is between its loops."""
        self._chunks.pop(slot, None)
