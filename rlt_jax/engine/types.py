"""Plain data passed between the scheduler and the runner. Depths count from 1.

Batches are columns, one entry per row: at a hundred rows an object for each would cost more than
the device takes for a loop. Iterating gives the rows one by one, for whoever has the time.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# In the SHARED layout a request advances at most this many prompt tokens per batch, one by one.
SHARED_PREFILL_TOKENS = 16


class Stage(enum.Enum):
    """What a batch does with its rows.

    A row's coda finalizes the K/V of its exit depth and samples the next token; its first loop
    begins with the prelude, which reads the last sampled token on the device.
    """

    PREFILL = "prefill"  # prompt tokens through every loop
    RECURRENT = "recurrent"  # one loop; rows may be at different depths
    CODA = "coda"  # rows that exit sample
    BOUNDARY = "boundary"  # rows that exit sample, then one loop: theirs and the others'
    TOKENS = "tokens"  # whole tokens at full depth: every loop, then the coda
    MIXED = "mixed"  # one loop of decode rows and of prompt chunks, each at its own depth
    SAVE = "save"  # some pages of a slot, and what else the slot holds, to the host
    RESTORE = "restore"  # and back


@dataclasses.dataclass(frozen=True)
class Row:
    """One request's part of a batch.

    generation: names the request in this engine, never reused (request ids and slots are).
    position: the token position at the start of the batch; the first one in a prefill row.
    exit_depth: the depth at which the token at `position` exits and the coda samples (0: no coda).
    depth: the loop to run, after the coda that of the next position (0: none); in a prefill the
    full depth.
    output_index: which output token the coda samples; without one, which the loop works for.
    reads_gate: the scheduler waits for the signal of the loop.
    size: prompt tokens of a chunk (0: a decode row). tokens: theirs, where the chunk begins (in a
    mixed batch at depth 1). ends_prompt: the chunk has the prompt's last token. window: where the
    device keeps the hidden states of a chunk in between mixed batches, the first of `size`.
    """

    generation: int
    slot: int
    position: int
    depth: int = 0
    exit_depth: int = 0
    output_index: int = 0
    reads_gate: bool = False
    ends_prompt: bool = False
    size: int = 0
    window: int = 0
    tokens: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Rows(Sequence):
    """The rows of a batch as columns of the same names and meanings, each [rows].

    In a mixed batch the decode rows come first. tokens: one tuple per row, or nothing at all where
    no row has any.
    """

    generation: np.ndarray
    slot: np.ndarray
    position: np.ndarray
    depth: np.ndarray
    exit_depth: np.ndarray
    output_index: np.ndarray
    reads_gate: np.ndarray
    ends_prompt: np.ndarray
    size: np.ndarray
    window: np.ndarray
    tokens: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Rows":
        columns = {
            field.name: np.array([getattr(row, field.name) for row in rows], field.type)
            for field in dataclasses.fields(Row)
            if field.name != "tokens"
        }
        return cls(**columns, tokens=tuple(row.tokens for row in rows))

    def followed_by(self, other: "Rows") -> "Rows":
        """These rows, then the others."""
        columns = {
            name: np.concatenate([column, getattr(other, name)]) for name, column in self._columns()
        }
        return Rows(**columns, tokens=(self.tokens or ((),) * len(self)) + other.tokens)

    def _columns(self) -> Iterator[tuple[str, np.ndarray]]:
        """All but the tokens, by name."""
        names = (field.name for field in dataclasses.fields(Row) if field.name != "tokens")
        return ((name, getattr(self, name)) for name in names)

    def where(self, kept: np.ndarray) -> "Rows":
        """Those of a mask [rows]."""
        columns = {name: column[kept] for name, column in self._columns()}
        tokens = tuple(t for t, keep in zip(self.tokens, kept.tolist()) if keep)
        return Rows(**columns, tokens=tokens)

    @functools.cached_property  # asked for at every step of a batch's way
    def num_decode(self) -> int:
        """How many are decode rows: prompt rows have a size."""
        return int(np.count_nonzero(self.size == 0))

    def __len__(self) -> int:
        return len(self.slot)

    def __iter__(self) -> Iterator[Row]:
        *numbers, tokens = (getattr(self, field.name) for field in dataclasses.fields(Row))
        numbers = (column.tolist() for column in numbers)
        yield from map(Row, *numbers, tokens or ((),) * len(self))

    def __getitem__(self, i: int) -> Row:
        columns = {name: column[i].item() for name, column in self._columns()}
        return Row(**columns, tokens=self.tokens[i] if self.tokens else ())


@dataclasses.dataclass(frozen=True)
class SlotUpdate:
    """What the device must know of a slot: its block table, how it samples, when it exits.

    Sent when a request gets the slot, and again when its table has grown.
    """

    slot: int
    block_table: tuple[int, ...]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_loops: int = 1
    exit_threshold: float = 1.0


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Pages of a slot on their way: `count` of its block table from the `first`-th on. content:
    what SAVE gave for them (None in a SAVE); only the runner looks inside."""

    first: int
    count: int
    content: Any = None


@dataclasses.dataclass(frozen=True)
class SchedulerOutput:
    """One batch. `slot_updates` take effect before it, and belong to its rows.

    samples: a row that samples draws. num_tokens: tokens that every row of a TOKENS batch runs.
    num_loops: loops that every row of a MIXED batch runs, from its depth on; more than one in a
    batch of prompt chunks alone. transfer: of a SAVE or RESTORE batch, whose one row names the
    slot.
    """

    sequence: int
    stage: Stage
    rows: Rows
    slot_updates: tuple[SlotUpdate, ...] = ()
    samples: bool = False
    num_tokens: int = 1
    num_loops: int = 1
    transfer: Transfer | None = None

    @property
    def reads_gate(self) -> bool:
        return bool(self.rows.reads_gate.any())

    @property
    def has_coda(self) -> bool:
        return bool(self.rows.exit_depth.any())


@dataclasses.dataclass(frozen=True)
class RowResult:
    """What came back for one row, tagged so that it can only touch the request it belongs to.

    tokens, logprobs: what its coda sampled. After its loop, for rows that read the gate:
    exit_probability, the gate's; leaves, the program's own decision, where it decides.
    """

    generation: int
    position: int
    depth: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    exit_probability: float | None = None
    leaves: bool | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class RowResults(Sequence):
    """The results of a batch as columns; `of` says which rows they are of, and which have any.

    token, logprob: [rows, tokens] or None. exit_probability, leaves: [rows] or None.
    """

    of: Rows
    token: np.ndarray | None = None
    logprob: np.ndarray | None = None
    exit_probability: np.ndarray | None = None
    leaves: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, i: int) -> RowResult:
        row = self.of[i]
        sampled = row.exit_depth and self.token is not None
        read = row.reads_gate
        return RowResult(
            row.generation,
            row.position,
            row.depth,
            tokens=tuple(self.token[i].tolist()) if sampled else (),
            logprobs=tuple(self.logprob[i].tolist()) if sampled else (),
            exit_probability=(
                self.exit_probability[i] if read and self.exit_probability is not None else None
            ),
            leaves=bool(self.leaves[i]) if read and self.leaves is not None else None,
        )


@dataclasses.dataclass(frozen=True)
class RunnerOutput:
    """Evidence that batch `sequence` is complete, and its results, one per row. content: what a
    SAVE batch copied to the host."""

    sequence: int
    stage: Stage
    rows: RowResults
    content: Any = None


class BatchError(RuntimeError):
    """A batch failed before it reached the device: only its requests are affected."""


class DeviceLostError(RuntimeError):
    """A batch failed on the device: its state, and with it every running request, is lost."""
