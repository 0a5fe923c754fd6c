"""Plain data passed between the scheduler and the runner. Depths count from 1."""

import dataclasses
import enum

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


@dataclasses.dataclass(frozen=True)
class Row:
    """One request's part of a batch.

    generation: names the request in this engine, never reused (request ids and slots are).
    position: the token position at the start of the batch; the first one in a prefill row.
    exit_depth: the depth at which the token at `position` exits and the coda samples (0: no coda).
    depth: the loop to run, after the coda that of the next position (0: none); in a prefill the
    full depth.
    output_index: which output token the coda samples. tokens, ends_prompt: prefill only.
    reads_gate: the scheduler waits for the hazard of the loop.
    """

    generation: int
    slot: int
    position: int
    depth: int = 0
    exit_depth: int = 0
    output_index: int = 0
    tokens: tuple[int, ...] = ()
    ends_prompt: bool = False
    reads_gate: bool = False


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
    """One batch. `slot_updates` take effect before it, and belong to its rows.

    num_tokens: tokens that every row of a TOKENS batch runs.
    """

    sequence: int
    stage: Stage
    rows: tuple[Row, ...]
    slot_updates: tuple[SlotUpdate, ...] = ()
    samples: bool = False
    num_tokens: int = 1

    @property
    def reads_gate(self) -> bool:
        return any(row.reads_gate for row in self.rows)


@dataclasses.dataclass(frozen=True)
class RowResult:
    """What came back for one row, tagged so that it can only touch the request it belongs to.

    tokens, logprobs: what its coda sampled. exit_probability: the gate's hazard after its loop.
    """

    generation: int
    position: int
    depth: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    exit_probability: float | None = None


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
