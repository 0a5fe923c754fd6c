"""What the simulated device is built for, and whether a batch keeps within it."""

import dataclasses
from collections import Counter

import numpy as np

from rlt_jax.engine.types import SHARED_PREFILL_TOKENS, SchedulerOutput, Stage
from tests.engine.simulated_model import FULL_DEPTH

TRANSFERS = (Stage.SAVE, Stage.RESTORE)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a device is built for. max_rows: of a decode batch. chunk: prompt tokens of a row.

    run_ahead: a loop may be submitted before the signal of the one before it is read. lag: loops
    that a token still runs after the one whose signal makes it leave. incremental: block tables
    may grow. caches_prefixes: they may begin with pages that other requests have written.
    preempts: a request may leave its slot, pages_per_transfer of its pages in a batch.
    """

    num_pages: int
    planes: int
    block_size: int
    num_slots: int
    max_rows: int
    max_prompt_tokens: int
    chunk: int
    max_in_flight: int
    tokens_per_dispatch: int
    run_ahead: bool
    lag: int
    incremental: bool
    caches_prefixes: bool
    preempts: bool
    pages_per_transfer: int


def check_size(batch: SchedulerOutput, limits: Limits, events: Counter) -> None:
    """What can be checked of a batch without knowing the state of the device."""
    rows = batch.rows
    assert len(rows), "an empty batch"
    if batch.stage is Stage.MIXED:
        _check_mixed_size(batch, limits, events)
    else:
        assert len(set(rows.slot.tolist())) == len(rows), "two rows of one slot"
        assert len(set(rows.generation.tolist())) == len(rows), "two rows of one request"
        assert batch.num_loops == 1
    assert (batch.transfer is not None) == (batch.stage in TRANSFERS)
    assert rows.slot.min() >= 0 and rows.slot.max() < limits.num_slots
    assert batch.has_coda == (batch.stage in (Stage.CODA, Stage.BOUNDARY, Stage.TOKENS))
    if batch.stage is Stage.PREFILL:
        chunk = limits.chunk
        if limits.planes == 1:
            chunk = min(chunk, SHARED_PREFILL_TOKENS)
        assert all(0 < len(tokens) <= chunk for tokens in rows.tokens)
        assert sum(map(len, rows.tokens)) <= limits.max_prompt_tokens
    elif batch.stage in TRANSFERS:
        assert len(rows) == 1 and not (rows.size.any() or rows.depth.any()), "pages alone"
    elif batch.stage is not Stage.MIXED:
        assert len(rows) <= limits.max_rows
    if batch.num_tokens != 1:
        assert batch.num_tokens == limits.tokens_per_dispatch
        assert batch.stage is Stage.TOKENS and not batch.samples
        events["several tokens in a dispatch"] += 1


def _check_mixed_size(batch: SchedulerOutput, limits: Limits, events: Counter) -> None:
    rows = batch.rows
    decoding = int(np.count_nonzero(rows.size == 0))
    assert not rows.size[:decoding].any(), "decode rows come first"
    assert decoding <= limits.max_rows and decoding < len(rows)
    assert decoding + rows.size.sum() <= limits.max_prompt_tokens, "beyond the token budget"
    assert rows.size.max() <= limits.chunk
    assert not decoding or batch.num_loops == 1, "decode rows decide after every loop"
    prompts = set(rows.slot[decoding:].tolist())
    assert len({*rows.slot[:decoding].tolist(), *prompts}) == decoding + len(prompts)
    window = [row.window + i for row in rows for i in range(row.size)]
    assert len(set(window)) == len(window), "two chunks in one place"
    assert min(window) >= 0 and max(window) < FULL_DEPTH * limits.max_prompt_tokens
    events["prompts beside decode rows"] += decoding > 0
    events["several loops in a dispatch"] += batch.num_loops > 1
    events["chunks side by side"] += len(prompts) < len(rows) - decoding
