"""Prompt chunks between their loops, and the place that each has in the device's prompt window.

The window is cut into rings of `full_depth` chunks, one ring for each prompt that has chunks
between their loops. A ring is free as soon as the last loop of the last of them is scheduled:
programs run in the order in which they are submitted, so the next owner writes after the former
has read.
"""

import dataclasses
from collections import deque


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


@dataclasses.dataclass
class _Ring:
    """Of one prompt. chunks: oldest first, each at least one loop behind the one before it."""

    first_row: int
    chunks: deque[Chunk] = dataclasses.field(default_factory=deque)
    started: int = 0


class Staging:
    """Owns the chunks between their loops and the rings, by the slot of their request."""

    def __init__(self, num_rings: int, chunk_size: int, full_depth: int):
        """chunk_size: of the largest chunk."""
        self.num_rings = num_rings
        self._chunk_size, self._full_depth = chunk_size, full_depth
        ring_rows = full_depth * chunk_size
        self._free = [ring * ring_rows for ring in range(num_rings - 1, -1, -1)]
        self._rings: dict[int, _Ring] = {}

    def __len__(self) -> int:
        """Prompts between their loops."""
        return len(self._rings)

    def chunks_of(self, slot: int) -> tuple[Chunk, ...]:
        """Those between their loops, oldest first: each may run its next loop."""
        return tuple(self._rings[slot].chunks) if slot in self._rings else ()

    def has_ring(self, slot: int) -> bool:
        """Whether a chunk of this request could start."""
        return slot in self._rings or bool(self._free)

    def start(self, slot: int, part: Part) -> int:
        """A chunk that is about to run its first loop; returns its place in the window."""
        if slot not in self._rings:
            self._rings[slot] = _Ring(self._free.pop())
        ring = self._rings[slot]
        window = ring.first_row + ring.started % self._full_depth * self._chunk_size
        ring.chunks.append(Chunk(part, window))
        ring.started += 1
        return window

    def advance(self, slot: int, position: int, num_loops: int) -> None:
        """The chunk at this position has run more loops; after its last one it is forgotten."""
        chunks = self._rings[slot].chunks
        chunk = next(chunk for chunk in chunks if chunk.part.position == position)
        chunk.depth += num_loops
        if chunk.depth == self._full_depth:
            chunks.remove(chunk)
            if not chunks:
                self.drop(slot)

    def drop(self, slot: int) -> None:
        """The request has ended, or nothing of it is between its loops."""
        ring = self._rings.pop(slot, None)
        if ring is not None:
            self._free.append(ring.first_row)
