"""Both failure classes on the real runner: before dispatch, and at or after it."""

import jax
import pytest

from rlt_jax.engine.types import Stage
from rlt_jax.runtime.programs import Kind
from rlt_jax.sampling_params import SamplingParams
from tests.support import build_engine

PARAMS = SamplingParams(max_tokens=12, exit_threshold=0.5)


def outputs_of(core):
    outputs = {}
    while core.has_unfinished_requests():
        outputs |= {output.request_id: output for output in core.step()}
    return outputs


def healthy(prompt):
    engine = build_engine("roomy")
    engine.core.add_request("x", prompt, PARAMS)
    return outputs_of(engine.core)["x"].token_ids


def fail_once(monkeypatch, programs, kind, failure):
    """The next program of this kind is handed to failure(executable, args)."""
    real, left = programs.get, [1]

    def get(wanted, bucket):
        executable = real(wanted, bucket)
        if wanted is kind and left:
            left.pop()
            return failure(executable)
        return executable

    monkeypatch.setattr(programs, "get", get)


def before_dispatch(_executable):
    raise MemoryError("no room to compile")


def at_dispatch(executable):
    """Runs the real program, so that the donated state is gone, then raises."""

    def call(state, params, packed):
        jax.block_until_ready(executable(state, params, packed))
        assert state.kv.pool.is_deleted()
        raise RuntimeError("the device fell over")

    return call


@pytest.mark.parametrize("kind", [Kind.PREFILL, Kind.PRELUDE, Kind.RECURRENT_GATED, Kind.SET_SLOTS])
def test_a_failure_before_dispatch_ends_only_that_batch(kind, monkeypatch):
    engine = build_engine("roomy")
    core = engine.core
    core.add_request("bystander", [9, 8, 7], PARAMS)
    for _ in range(2):
        core.step()  # prefilled and sampled once
    core.add_request("victim", [1, 2], PARAMS)
    pointer = engine.runner.state.kv.pool.unsafe_buffer_pointer()
    fail_once(monkeypatch, engine.programs, kind, before_dispatch)
    outputs = outputs_of(core)
    failed = [name for name, output in outputs.items() if output.finish_reason == "error"]
    assert failed
    for name in failed:
        assert "was not dispatched: no room to compile" in outputs[name].error
    for name, prompt in (("bystander", [9, 8, 7]), ("victim", [1, 2])):
        if name not in failed:
            assert outputs[name].token_ids == healthy(prompt)
    assert engine.runner.state.kv.pool.unsafe_buffer_pointer() == pointer
    stats = core.scheduler.stats()
    assert stats["free_blocks"] == stats["total_blocks"]
    core.add_request("again", [1, 2], PARAMS)
    assert outputs_of(core)["again"].token_ids == healthy([1, 2])


@pytest.mark.parametrize(
    "kind", [Kind.PREFILL, Kind.PRELUDE, Kind.RECURRENT_GATED, Kind.CODA_GREEDY]
)
def test_a_failure_at_dispatch_fails_the_running_and_keeps_the_waiting(kind, monkeypatch):
    engine = build_engine("roomy")
    core = engine.core
    prompts = {str(i): [i + 1, 2, 3] for i in range(7)}  # four run, three wait
    for name, prompt in prompts.items():
        core.add_request(name, prompt, PARAMS)
    fail_once(monkeypatch, engine.programs, kind, at_dispatch)
    outputs = outputs_of(core)
    failed = {name for name, output in outputs.items() if output.finish_reason == "error"}
    assert failed == {"0", "1", "2", "3"}
    for name, prompt in prompts.items():
        if name in failed:
            assert "the device fell over" in outputs[name].error
        else:
            assert outputs[name].token_ids == healthy(prompt)
    stats = core.scheduler.stats()
    assert stats["free_blocks"] == stats["total_blocks"]
    assert core.scheduler.block_tables() == {}


def test_a_failure_while_reading_results_counts_as_lost_state(monkeypatch):
    engine = build_engine("roomy")
    core = engine.core
    core.add_request("a", [1, 2, 3], PARAMS)
    real = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: real(tree) if not tree else 1 / 0)
    outputs = outputs_of(core)
    assert outputs["a"].finish_reason == "error"
    assert "coda batch failed: division by zero" in outputs["a"].error
    monkeypatch.undo()
    core.add_request("a", [1, 2, 3], PARAMS)
    assert outputs_of(core)["a"].token_ids == healthy([1, 2, 3])


def test_an_interrupt_loses_nothing_but_the_running_requests(monkeypatch):
    engine = build_engine("roomy")
    core = engine.core
    for i in range(5):
        core.add_request(str(i), [i + 1, 2, 3], PARAMS)
    core.step()
    real = engine.runner.submit

    def interrupted(batch):
        assert batch.stage is Stage.CODA
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.runner, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        core.step()
    monkeypatch.setattr(engine.runner, "submit", real)
    outputs = outputs_of(core)
    assert {name: o.finish_reason for name, o in outputs.items()} == {
        **dict.fromkeys("0123", "error"),
        "4": "length",
    }
    assert outputs["4"].token_ids == healthy([5, 2, 3])
    stats = core.scheduler.stats()
    assert stats["free_blocks"] == stats["total_blocks"]
