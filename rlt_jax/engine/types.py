"""Plain data passed between the scheduler and the runner. Depths count from 1."""

import dataclasses
import enum

# Prompt positions computed by one tile. In the SHARED layout a request advances at most one
# tile per batch, position by position.
PREFILL_TILE = 16


class Stage(enum.Enum):
    """What a batch does with its rows; a batch holds one stage only."""

    PREFILL = "prefill"  # prompt tokens through every loop
    PRELUDE = "prelude"  # the last sampled token to a hidden state
    RECURRENT = "recurrent"  # one loop; rows may be at different depths
    CODA = "coda"  # finalize the K/V of the exit depth, logits, sample


@dataclasses.dataclass(frozen=True)
class Row:
    """One request's part of a batch.

    generation: names the request in this engine, never reused (request ids and slots are).
    position: the token position; the first one in a prefill row.
    depth: the loop to run (recurrent), the exit depth (coda), the full depth (prefill).
    tokens, ends_prompt: prefill only. output_index: coda only, which output token is sampled.
    """

    generation: int
    slot: int
    position: int
    depth: int
    tokens: tuple[int, ...] = ()
    ends_prompt: bool = False
    output_index: int = 0


@dataclasses.dataclass(frozen=True)
class SlotUpdate:
    """What the device must know of a slot: its block table and how it samples."""

    slot: int
    block_table: tuple[int, ...]
    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclasses.dataclass(frozen=True)
class SchedulerOutput:
    """One batch. `slot_updates` take effect before it, and belong to its rows."""

    sequence: int
    stage: Stage
    rows: tuple[Row, ...]
    slot_updates: tuple[SlotUpdate, ...] = ()
    reads_gate: bool = False
    samples: bool = False


@dataclasses.dataclass(frozen=True)
class RowResult:
    """What came back for one row, tagged so that it can only touch the request it belongs to.

    exit_probability: the gate's hazard (recurrent batches that read the gate).
    token, logprob: the sampled token (coda).
    """

    generation: int
    position: int
    depth: int
    exit_probability: float | None = None
    token: int | None = None
    logprob: float | None = None


@dataclasses.dataclass(frozen=True)
class RunnerOutput:
    """Evidence that batch `sequence` is complete, and its results, one per row."""

    sequence: int
    stage: Stage
    rows: tuple[RowResult, ...]


class BatchError(RuntimeError):
    """A batch failed before it reached the device: only its requests are affected."""


class DeviceLostError(RuntimeError):
    """A batch failed on the device: its state, and with it every running request, is lost."""
