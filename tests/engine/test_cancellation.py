"""Cancelling, in every stage, on the real runner."""

import dataclasses

import pytest

from rlt_jax.engine.request import RequestStage
from rlt_jax.sampling_params import SamplingParams
from tests.support import Work, build_engine, drive

STAGES = [stage for stage in RequestStage if stage is not RequestStage.FINISHED]
VICTIM = Work(
    tuple(range(20)), SamplingParams(max_tokens=8, exit_threshold=0.5, temperature=1.0, seed=3)
)
OTHER = Work((5, 6), SamplingParams(max_tokens=40, exit_threshold=0.5))


@pytest.mark.parametrize("shape", ["roomy", "shared"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.value)
def test_cancel_in_every_stage_gives_everything_back_and_the_id_can_be_reused(shape, stage):
    engine = build_engine(shape, prefill_chunk_size=8)
    expected = drive(build_engine(shape), [OTHER, VICTIM])
    core = engine.core
    core.add_request("0", OTHER.prompt, OTHER.params)
    core.step()
    core.add_request("1", VICTIM.prompt, VICTIM.params)
    for _ in range(500):
        if core.scheduler.find("1").stage is stage:
            break
        core.step()
    assert core.scheduler.find("1").stage is stage
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
    alone = dataclasses.replace(OTHER, arrival=0)
    again, fresh = drive(engine, [alone])["0"], drive(build_engine("tight"), [alone])["0"]
    assert again.token_ids == fresh.token_ids
