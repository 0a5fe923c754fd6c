"""The scheduler and the engine core under random workloads; and that the simulator sees faults.

RLT_SIMULATOR_SEED=n runs only the workload of seed n: the one that a failure names.
"""

import dataclasses
import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlt_jax.engine.admission import WaitingRequests
from rlt_jax.engine.batching import Batcher
from rlt_jax.engine.core import EngineCore
from rlt_jax.engine.kv_accounting import KVAccounting
from rlt_jax.engine.scheduler import Scheduler
from rlt_jax.engine.staging import Staging
from rlt_jax.engine.types import Stage
from rlt_jax.sampling_params import SamplingParams
from tests.engine.simulated_device import FAILURES, SimulatedDevice
from tests.engine.simulated_model import FULL_DEPTH
from tests.engine.simulator import simulate
from tests.engine.workloads import EXIT_MODES, Ask, Choices, Workload, make_workload

SOAK_BATCHES = 100_000
SEED = os.environ.get("RLT_SIMULATOR_SEED")
STAGES = [stage.value for stage in Stage]

# What the soak must have met, at least this often.
EVENTS = {
    **dict.fromkeys(STAGES, 1000),
    **{f"{count} in flight": 1000 for count in (1, 2, 3)},
    **{f"exit at {depth}": 1000 for depth in range(1, FULL_DEPTH + 1)},
    **{f"ended: {reason}": 100 for reason in ("stop", "length", "abort", "error")},
    **{f"abort: {stage}": 5 for stage in ("waiting", "prefill", "recurrent", "coda", "unknown")},
    **{f"abort: {stage} in flight": 5 for stage in ("prefill", "recurrent", "coda", "held")},
    **dict.fromkeys(FAILURES, 10),
    "several tokens in a dispatch": 100,
    "prompts beside decode rows": 1000,
    "several loops in a dispatch": 100,
    "chunks side by side": 1000,
    "a loop ahead of a signal": 100,
    "loops in vain": 100,
    "waiting for a slot or blocks": 1000,
    "overtaken": 100,
    "overtaken as often as allowed": 100,
    "a table grew": 1000,
    "name in use": 10,
    "name used again": 10,
    "too large": 10,
}


class HypothesisChoices(Choices):
    def __init__(self, draw):
        self._draw = draw

    def integer(self, low, high):
        return self._draw(st.integers(low, high))


@st.composite
def workloads(draw) -> Workload:
    return make_workload(HypothesisChoices(draw))


def run_seed(seed: int) -> Counter:
    try:
        return simulate(make_workload(Choices(seed)))
    except BaseException as error:
        error.add_note(f"to run this workload alone: RLT_SIMULATOR_SEED={seed}")
        raise


@pytest.mark.skipif(SEED is None, reason="RLT_SIMULATOR_SEED is not set")
def test_the_workload_of_the_given_seed():
    run_seed(int(SEED))


@pytest.mark.skipif(SEED is not None, reason="RLT_SIMULATOR_SEED is set")
def test_a_hundred_thousand_batches_lose_no_token_no_block_and_no_request():
    events: Counter[str] = Counter()
    seed = 0
    while sum(events[stage] for stage in STAGES) < SOAK_BATCHES:
        events += run_seed(seed)
        seed += 1
    assert not {name: events[name] for name, least in EVENTS.items() if events[name] < least}


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads())
def test_any_workload_gives_every_request_its_tokens_once(workload):
    simulate(workload)


# -- the expected exits ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "signals", "fields", "depth"),
    [
        ("ouro", (0.3, 0.3), {"exit_threshold": 0.5, "min_loops": 2}, 2),
        ("ouro_delayed", (0.3, 0.3), {"exit_threshold": 0.5, "min_loops": 2}, 3),
        ("ouro_delayed", (0.3, 0.3), {"exit_threshold": 0.5, "max_loops": 2}, 2),
        ("ouro", (1, 1), {"exit_threshold": 1}, 4),
        ("ouro", (1, 0), {"exit_threshold": 0.9, "min_loops": 3}, 3),
        ("random_lookahead", (0.6,), {"exit_threshold": 0.5, "min_loops": 1}, 2),
        ("random_lookahead", (0.6, 0.1, 0.6), {"exit_threshold": 0.5, "min_loops": 3}, 4),
        ("random_lookahead", (0.1, 0.6), {"exit_threshold": 0.5, "min_loops": 3}, 3),
        ("trace", (1, 1), {}, 3),
    ],
)
def test_the_expected_exit_follows_the_definition(mode, signals, fields, depth):
    ask = Ask("a", (1,), SamplingParams(seed=0, **fields), depths=(FULL_DEPTH, 3), arrives=0)
    signals = [np.float32(signal) for signal in (*signals, 0, 0, 0, 0)]
    left = (n for n in range(1, FULL_DEPTH + 1) if EXIT_MODES[mode].leaves(ask, 1, signals[:n]))
    assert next(left) == depth


# -- what the simulator sees -----------------------------------------------------------------------


def altered_batch(alter):
    """The scheduler makes other batches: alter(batch) is what the device gets."""

    def install(patch):
        submit = SimulatedDevice.submit
        patch.setattr(SimulatedDevice, "submit", lambda self, batch: submit(self, alter(batch)))

    return install


def altered_rows(stage, **columns):
    """In batches of a stage, columns as these functions make them."""

    def alter(batch):
        if batch.stage is not stage:
            return batch
        changed = {name: make(getattr(batch.rows, name)) for name, make in columns.items()}
        return dataclasses.replace(batch, rows=dataclasses.replace(batch.rows, **changed))

    return altered_batch(alter)


def altered_outputs(alter):
    """The engine tells its outputs otherwise."""

    def install(patch):
        step = EngineCore.step
        patch.setattr(EngineCore, "step", lambda self, only: alter(step(self, only)))

    return install


def replaced(owner, name, function):
    return lambda patch: patch.setattr(owner, name, function)


def releases_blocks_in_flight(patch):
    abort, release, early = Scheduler.abort, KVAccounting.release, set()

    def abort_and_release(self, request_id):
        request = abort(self, request_id)
        if request is not None and request.slot is not None:
            early.add((id(self.kv), request.generation))
            release(self.kv, request.generation)
        return request

    def release_once(self, owner):
        if (id(self), owner) not in early:
            release(self, owner)

    patch.setattr(Scheduler, "abort", abort_and_release)
    patch.setattr(KVAccounting, "release", release_once)


def without_first_token(output):
    return dataclasses.replace(output, token_ids=output.token_ids[1:])


def moved_by_depth(batch):
    rows = batch.rows
    if batch.stage is not Stage.MIXED:
        return batch
    return dataclasses.replace(
        batch, rows=dataclasses.replace(rows, window=rows.window + rows.depth)
    )


def own_ring(self, slot, part, start=Staging.start):
    """As if no other prompt had a place in the window."""
    alone = Staging(self._num_rows, FULL_DEPTH)
    alone._chunks = {slot: list(self.chunks_of(slot))}
    place = start(alone, slot, part)
    self._chunks[slot] = alone._chunks[slot]
    return place


def full_budget(self, budget, others, chunks=Batcher._chunks):
    return chunks(self, self._config.max_num_batched_tokens, others)


def last_chunk_alone(self, budget, others, chunks=Batcher._chunks):
    return chunks(self, budget, others)[-1:]


def grows_untold(self, slot_n, last_position, extend=Scheduler._extend_tables):
    """The device keeps the table that it knows."""
    on_device = self._slots.on_device.copy()
    extend(self, slot_n, last_position)
    self._slots.on_device[:] = on_device


def grows_too_late(self, slot_n, last_position, extend=Scheduler._extend_tables):
    extend(self, slot_n, last_position - 1)


def shrinks(self, owner, positions, extend=KVAccounting.extend):
    """An owner's written pages are exchanged for others."""
    table = extend(self, owner, positions)
    self._tables[owner] = table[::-1]
    return self._tables[owner]


def forgets_overtakings(self, room, admissible=WaitingRequests.admissible):
    for one in self._queue:
        one.bypasses_left = self._max_bypasses
    return admissible(self, room)


FAULTS = {
    "the device is not told that a table grew": replaced(Scheduler, "_extend_tables", grows_untold),
    "tables do not grow": replaced(Scheduler, "_extend_tables", lambda *_: None),
    "tables grow too late": replaced(Scheduler, "_extend_tables", grows_too_late),
    "tables grow at the wrong end": replaced(KVAccounting, "extend", shrinks),
    "growth is not reserved": replaced(KVAccounting, "reserved_blocks", property(lambda _: 0)),
    "overtakings are forgotten": replaced(WaitingRequests, "admissible", forgets_overtakings),
    "the last request goes first": replaced(
        WaitingRequests, "_order", lambda self, request: (0, -request.generation)
    ),
    "who ends while it waits stays in the queue": replaced(
        WaitingRequests, "remove", lambda *_: None
    ),
    "two requests have the same pages": replaced(
        KVAccounting, "table", lambda self, owner: tuple(range(self.geometry.num_pages))
    ),
    "blocks do not come back": replaced(KVAccounting, "release", lambda self, owner: None),
    "blocks come back while in flight": releases_blocks_in_flight,
    "a failed batch leaves its requests there": replaced(Scheduler, "fail", lambda *_: []),
    "a lost device ends nobody": replaced(Scheduler, "fail_running", lambda *_: []),
    "slots are not set": altered_batch(lambda batch: dataclasses.replace(batch, slot_updates=())),
    "sampling rows are greedy": altered_batch(
        lambda batch: dataclasses.replace(batch, samples=False)
    ),
    "a prompt chunk comes a token late": altered_rows(
        Stage.PREFILL, position=lambda position: position + 1
    ),
    "prompts do not end": altered_rows(Stage.PREFILL, ends_prompt=np.zeros_like),
    "a loop is left out": altered_rows(Stage.RECURRENT, depth=lambda depth: depth + 1),
    "a coda comes a loop early": altered_rows(Stage.CODA, exit_depth=lambda depth: depth - 1),
    "another slot": altered_rows(Stage.BOUNDARY, slot=np.flip),
    "a wrong output index": altered_rows(Stage.TOKENS, output_index=lambda index: index + 1),
    "all chunks lie in one place of the window": altered_rows(Stage.MIXED, window=np.zeros_like),
    "chunks lie a row further each loop": altered_batch(moved_by_depth),
    "a chunk leaves out a loop": altered_rows(
        Stage.MIXED, depth=lambda depth: np.minimum(depth + 1, FULL_DEPTH)
    ),
    "a chunk runs on past the full depth": altered_batch(
        lambda batch: (
            dataclasses.replace(batch, num_loops=1 + batch.num_loops % FULL_DEPTH)
            if batch.stage is Stage.MIXED
            else batch
        )
    ),
    "staged prompts do not end": altered_rows(Stage.MIXED, ends_prompt=np.zeros_like),
    "two prompts have the same place in the window": replaced(Staging, "start", own_ring),
    "chunks of a request that has ended stay": replaced(Staging, "drop", lambda *_: None),
    "prompts ignore the decode rows beside them": replaced(Batcher, "_chunks", full_budget),
    "a chunk catches up with the one before it": replaced(Batcher, "_chunks", last_chunk_alone),
    "outputs are told twice": altered_outputs(lambda outputs: [*outputs, *outputs]),
    "ends are not told": altered_outputs(lambda outputs: [o for o in outputs if not o.finished]),
    "a token is lost": altered_outputs(lambda outputs: list(map(without_first_token, outputs))),
    "nothing runs": replaced(Scheduler, "schedule", lambda self: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_sees(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    with pytest.raises((AssertionError, LookupError, RuntimeError, ValueError)):
        for seed in range(100):
            run_seed(seed)
