"""Interrupts, failing recovery: the engine on a fake device, at every point of the scheduler."""

import itertools
import sys

import pytest

from rlt_jax.engine.types import DeviceLostError
from rlt_jax.sampling_params import SamplingParams
from tests.engine.fake_device import fake_engine, run


def leaves_nothing(core):
    stats = core.scheduler.stats()
    assert stats["free_blocks"] == stats["total_blocks"]
    assert stats["running"] == stats["waiting"] == 0
    assert core.scheduler.block_tables() == {}


INTERRUPTED_FUNCTIONS = (
    "schedule",
    "_choose_refill",
    "_choose_no_refill",
    "_admit",
    "_take",
    "_row",
    "_slot_update",
    "_enqueue",
    "update",
    "_advance",
    "_emit",
    "_land",
    "_withdraw",
    "_finish",
    "_release",
    "allocate",
    "release",
)


@pytest.mark.parametrize("mode", ["refill", "no_refill"])
def test_an_interrupt_at_any_line_of_the_scheduler_leaves_a_working_engine(mode):
    """Raises KeyboardInterrupt at every line that the scheduler runs, one line a run."""
    prompts = [[1], [2, 3], [4, 5, 6], [7]]
    for interrupted_at in itertools.count():
        core, device = fake_engine(mode=mode, max_num_seqs=2, num_pages=4)
        for i, prompt in enumerate(prompts):
            core.add_request(str(i), prompt, SamplingParams(max_tokens=2, exit_threshold=0.6))
        lines = iter(range(interrupted_at + 1))

        def trace(frame, event, argument, lines=lines):
            if frame.f_code.co_name not in INTERRUPTED_FUNCTIONS:
                return None
            if event == "line" and next(lines, None) is None:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        outputs, interrupts = {}, 0
        while core.has_unfinished_requests():
            sys.settrace(trace if not interrupts else None)
            try:
                outputs |= {output.request_id: output for output in core.step()}
            except KeyboardInterrupt:
                interrupts += 1
            finally:
                sys.settrace(None)
        assert set(outputs) == {"0", "1", "2", "3"}, interrupted_at
        assert all(output.finished for output in outputs.values())
        reasons = {output.finish_reason for output in outputs.values()}
        assert reasons <= ({"length", "error"} if interrupts else {"length"})
        leaves_nothing(core)
        assert device.resets == interrupts
        if not interrupts:
            assert interrupted_at > 100
            return


def test_a_reset_that_fails_is_tried_again_and_no_output_is_lost():
    core, device = fake_engine(max_num_seqs=2)
    for name in "abc":
        core.add_request(name, [1], SamplingParams(max_tokens=2))
    core.step()
    core.abort_request("b")
    device.collect = lambda batch: (_ for _ in ()).throw(DeviceLostError("gone"))
    device.reset = lambda: (_ for _ in ()).throw(MemoryError("no room"))
    for _ in range(2):
        with pytest.raises(MemoryError):
            core.step()
    del device.collect, device.reset
    outputs = run(core)
    assert {name: output.finish_reason for name, output in outputs.items()} == {
        "a": "error",
        "b": "abort",
        "c": "length",
    }
    leaves_nothing(core)


def test_unfinished_requests_that_cannot_run_are_an_error_not_a_silent_loop():
    core, _ = fake_engine()
    core.add_request("a", [1], SamplingParams())
    core.scheduler.schedule = lambda: None
    with pytest.raises(RuntimeError, match="no request can run"):
        core.step()
