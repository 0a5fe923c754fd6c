"""Invariant 1 for admission: who was admitted when, and when its blocks came, does not show in what
a request gets."""

import dataclasses
import functools

import pytest

from rlt_jax.engine.types import Stage
from rlt_jax.outputs import RequestOutput
from rlt_jax.sampling_params import SamplingParams
from tests.engine.test_equality import essence
from tests.support import SHAPES, Watched, Work, build_engine, drive, watch

# Pools in which some of the requests below find room, and two of the largest hardly do.
TINY = {
    "last_exited": SHAPES["tight"],
    "shared": dataclasses.replace(SHAPES["shared"], num_blocks=14),
}
MODES = [
    ("last_exited", {"mode": "refill"}),
    ("last_exited", {"mode": "refill", "max_in_flight": 3, "prefill_chunk_size": 5}),
    ("last_exited", {"mode": "no_refill"}),
    ("last_exited", {"mode": "mixed", "prefill_chunk_size": 5}),
    (
        "last_exited",
        {"mode": "mixed", "prefill_chunk_size": 3, "wavefront_chunked_prefill": True},
    ),
    ("last_exited", {"mode": "refill", "tokens_per_dispatch": 4}),
    ("last_exited", {"async_scheduling": True, "exit_decision": "device"}),
    ("shared", {"mode": "refill"}),
    ("shared", {"mode": "no_refill", "prefill_chunk_size": 7}),
]
ADMISSIONS = [
    {"policy": "fcfs"},
    {"policy": "priority"},
    {"policy": "fcfs", "incremental_allocation": True},
    {"policy": "priority", "incremental_allocation": True, "watermark_ratio": 0.1},
]


def work(full_depth: bool) -> list[Work]:
    """Every third request needs most of a tiny pool, the others little of it."""
    requests = []
    for i in range(12):
        size, tokens = (25, 22) if i % 3 == 1 else (1 + i, 13)
        params = SamplingParams(
            max_tokens=tokens,
            exit_threshold=1.0 if full_depth else (0.3, 0.6, 0.8)[i % 3],
            min_loops=4 if full_depth else 1,
            temperature=0.0 if full_depth else 0.8 * (i % 4 == 3),
            seed=i,
            priority=i % 2,
        )
        prompt = tuple((7 * i + j * j) % 97 for j in range(size))
        requests.append(Work(prompt, params, arrival=2 * i))
    return requests


@functools.cache
def one_by_one(layout: str, full_depth: bool) -> dict[str, RequestOutput]:
    engine = build_engine(TINY[layout], max_in_flight=1)
    return {
        str(i): drive(engine, [dataclasses.replace(one, arrival=0)])["0"]
        for i, one in enumerate(work(full_depth))
    }


def admissions(watched: Watched) -> list[int]:
    """Request numbers in the order in which the device came to know them."""
    return list(dict.fromkeys(row.generation for batch in watched.batches for row in batch.rows))


def tables_grown(watched: Watched) -> int:
    """How often a table came that was longer than the one before, to a row that decodes."""
    known, grown = set(), 0
    for batch in watched.batches:
        rows = {row.slot: row for row in batch.rows}
        for row in (rows[update.slot] for update in batch.slot_updates):
            grown += row.generation in known and not row.size
            known.add(row.generation)
    return grown


@pytest.mark.parametrize("admission", ADMISSIONS, ids=str)
@pytest.mark.parametrize(("layout", "options"), MODES, ids=str)
def test_admission_does_not_show_in_what_a_request_gets(layout, options, admission):
    full_depth = "tokens_per_dispatch" in options
    expected = one_by_one(layout, full_depth)
    engine = build_engine(TINY[layout], **options, **admission)
    watched = watch(engine)
    assert essence(drive(engine, work(full_depth))) == essence(expected)
    order = admissions(watched)
    assert order != sorted(order), "each was admitted in its turn"
    assert bool(tables_grown(watched)) == ("incremental_allocation" in admission)
    depths = {depth for output in expected.values() for depth in output.exit_depths}
    assert len(depths) >= 3 or full_depth
    at_once = {batch.num_tokens for batch in watched.batches if batch.stage is Stage.TOKENS}
    assert (4 in at_once) == full_depth
