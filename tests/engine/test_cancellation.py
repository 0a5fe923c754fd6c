"""Cancelling, in every stage and with batches in flight, and stop ids, on the real runner."""

import dataclasses

import pytest

from rlt_jax.engine.slots import RequestStage
from rlt_jax.engine.types import Stage
from rlt_jax.sampling_params import SamplingParams
from tests.support import Work, build_engine, drive, watch

STAGES = [
    RequestStage.WAITING,
    RequestStage.PREFILL,
    RequestStage.RECURRENT,
    RequestStage.CODA,
]
VICTIM = Work(
    tuple(range(20)), SamplingParams(max_tokens=8, exit_threshold=0.5, temperature=1.0, seed=3)
)
OTHER = Work((5, 6), SamplingParams(max_tokens=40, exit_threshold=0.5))
FULL_DEPTH = Work((7, 8, 9), SamplingParams(max_tokens=30))


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("shape", ["roomy", "shared"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name.lower())
def test_cancel_in_every_stage_gives_everything_back_and_the_id_can_be_reused(
    shape, stage, max_in_flight
):
    engine = build_engine(shape, prefill_chunk_size=8, max_in_flight=max_in_flight)
    expected = drive(engine, [OTHER, VICTIM])
    core = engine.core
    core.add_request("0", OTHER.prompt, OTHER.params)
    core.step()
    core.add_request("1", VICTIM.prompt, VICTIM.params)
    for _ in range(500):
        if core.scheduler.stage_of("1") is stage:
            break
        core.step()
    assert core.scheduler.stage_of("1") is stage
    assert core.abort_request("1")
    assert not core.abort_request("1")
    core.add_request("1", VICTIM.prompt, VICTIM.params)  # the id is free at once

    outputs, reasons = {}, []
    while core.has_unfinished_requests():
        for output in core.step():
            outputs[output.request_id] = output
            if output.finished:
                reasons.append((output.request_id, output.finish_reason))
    assert sorted(reasons) == [("0", "length"), ("1", "abort"), ("1", "length")]
    for request_id in ("0", "1"):
        assert outputs[request_id].token_ids == expected[request_id].token_ids
        assert outputs[request_id].exit_depths == expected[request_id].exit_depths
    stats = core.scheduler.stats()
    assert stats["free_blocks"] == stats["total_blocks"]


@pytest.mark.parametrize("shape", ["roomy", "shared"])
def test_results_of_a_request_cancelled_with_two_batches_in_flight_change_nothing(shape):
    engine = build_engine(shape, max_in_flight=3)
    expected = drive(engine, [FULL_DEPTH, OTHER])
    core, watched = engine.core, watch(engine)
    core.add_request("0", FULL_DEPTH.prompt, FULL_DEPTH.params)
    told = []
    while len(told) < 4:
        told += core.step()
    assert watched.in_flight == 2
    assert [batch.stage for batch in watched.batches[-2:]] == [Stage.TOKENS] * 2
    assert core.abort_request("0")
    core.add_request("0", FULL_DEPTH.prompt, FULL_DEPTH.params)  # beside its own last batches
    core.add_request("1", OTHER.prompt, OTHER.params)
    aborted, *_ = core.step()
    assert (aborted.finish_reason, aborted.token_ids) == ("abort", told[-1].token_ids)
    assert watched.batches[-1].stage is Stage.PREFILL
    old = {row.generation for row in watched.batches[-2].rows}
    assert old.isdisjoint(row.generation for row in watched.batches[-1].rows)
    outputs = {}
    while core.has_unfinished_requests():
        outputs |= {output.request_id: output for output in core.step()}
    for name, output in outputs.items():
        assert output.token_ids == expected[name].token_ids
        assert output.exit_depths == expected[name].exit_depths
    late = [row for result in watched.results for row in result.rows if row.generation in old]
    assert sum(len(row.tokens) for row in late) == 4 + 2
    stats = core.scheduler.stats()
    assert stats["free_blocks"] == stats["total_blocks"]


@pytest.mark.parametrize("tokens_per_dispatch", [1, 4])
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_a_stop_id_whose_successors_are_in_flight_ends_the_request_exactly_there(
    max_in_flight, tokens_per_dispatch
):
    engine = build_engine(
        "roomy", max_in_flight=max_in_flight, tokens_per_dispatch=tokens_per_dispatch
    )
    core, watched = engine.core, watch(engine)
    whole = drive(engine, [FULL_DEPTH])["0"].token_ids
    at = next(i for i in range(6, 30) if whole[i] not in whole[:i])
    params = dataclasses.replace(FULL_DEPTH.params, stop_token_ids=(whole[at],))
    watched.batches.clear()
    watched.results.clear()
    told = []
    core.add_request("a", FULL_DEPTH.prompt, params)
    while not told or not told[-1].finished:
        told += core.step()
    assert (told[-1].token_ids, told[-1].finish_reason) == (whole[: at + 1], "stop")
    core.add_request("a", FULL_DEPTH.prompt, params)  # beside its own last batches
    first = watched.batches[0].rows[0].generation
    again = []
    while core.has_unfinished_requests():
        again += core.step()
    assert again[-1].token_ids == whole[: at + 1]
    assert [output.finished for output in again].count(True) == 1
    rows = [row for result in watched.results for row in result.rows if row.generation == first]
    surplus = sum(len(row.tokens) for row in rows) - (at + 1)
    assert surplus // tokens_per_dispatch == max_in_flight - 1
    stats = core.scheduler.stats()
    assert stats["free_blocks"] == stats["total_blocks"]


def test_cancelling_everything_leaves_an_empty_engine_that_still_works():
    engine = build_engine("tight")
    for i in range(10):
        engine.core.add_request(str(i), VICTIM.prompt, VICTIM.params)
    for _ in range(7):
        engine.core.step()
    for i in range(10):
        assert engine.core.abort_request(str(i))
    aborted = {output.request_id: output.finish_reason for output in engine.core.step()}
    assert aborted == {str(i): "abort" for i in range(10)}
    assert not engine.core.has_unfinished_requests()
    again, fresh = drive(engine, [OTHER])["0"], drive(build_engine("tight"), [OTHER])["0"]
    assert again.token_ids == fresh.token_ids
