"""Both failure classes on the real runner: before dispatch, and at or after it."""

import itertools

import jax
import pytest

from rlt_jax.engine.types import Stage
from rlt_jax.runtime.programs import Kind
from rlt_jax.sampling_params import SamplingParams
from tests.support import Work, build_engine, drive, watch

ADAPTIVE = SamplingParams(max_tokens=12, exit_threshold=0.5)
FULL_DEPTH = SamplingParams(max_tokens=12)


def outputs_of(core):
    outputs = {}
    while core.has_unfinished_requests():
        outputs |= {output.request_id: output for output in core.step()}
    return outputs


def healthy(prompt, params):
    return drive(build_engine("roomy"), [Work(tuple(prompt), params)])["0"].token_ids


def assert_empty(core):
    stats = core.scheduler.stats()
    assert stats["free_blocks"] == stats["total_blocks"]
    assert core.scheduler.block_tables() == {}


def fail_once(monkeypatch, programs, kind, failure, which=1):
    """The next program of this kind, or the one `which` calls ahead, is what failure(executable)
    gives."""
    real, calls = programs.get, itertools.count(1)

    def get(wanted, bucket):
        executable = real(wanted, bucket)
        if wanted is kind and next(calls) == which:
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


# A program, and requests and options that reach it.
WAVES = {"mode": "mixed", "wavefront_chunked_prefill": True, "prefill_chunk_size": 1}
REACHED = [
    (Kind.PREFILL, ADAPTIVE, {}),
    (Kind.BOUNDARY_GREEDY, ADAPTIVE, {}),
    (Kind.RECURRENT, ADAPTIVE, {}),
    (Kind.CODA_GREEDY, FULL_DEPTH, {}),
    (Kind.TOKEN_GREEDY, FULL_DEPTH, {}),
    (Kind.MIXED, ADAPTIVE, WAVES),
]


@pytest.mark.parametrize(
    ("kind", "params", "options"), [*REACHED, (Kind.SET_SLOTS, ADAPTIVE, {})], ids=str
)
def test_a_failure_before_dispatch_ends_only_that_batch(kind, params, options, monkeypatch):
    engine = build_engine("roomy", **options)
    core = engine.core
    core.add_request("bystander", [9, 8, 7], params)
    for _ in range(2):
        core.step()  # prefilled and sampled once, or in the middle of a wave
    core.add_request("victim", [1, 2], params)
    pointer = engine.runner.state.kv.pool.unsafe_buffer_pointer()
    fail_once(monkeypatch, engine.programs, kind, before_dispatch)
    outputs = outputs_of(core)
    failed = [name for name, output in outputs.items() if output.finish_reason == "error"]
    assert failed
    for name in failed:
        assert "was not dispatched: no room to compile" in outputs[name].error
    for name, prompt in (("bystander", [9, 8, 7]), ("victim", [1, 2])):
        tokens = healthy(prompt, params)
        assert outputs[name].token_ids == (
            tokens[: len(outputs[name].token_ids)] if name in failed else tokens
        )
    assert engine.runner.state.kv.pool.unsafe_buffer_pointer() == pointer
    assert_empty(core)
    core.add_request("again", [1, 2], params)
    assert outputs_of(core)["again"].token_ids == healthy([1, 2], params)


@pytest.mark.parametrize(("kind", "params", "options"), REACHED, ids=str)
def test_a_failure_at_dispatch_fails_the_running_and_keeps_the_waiting(
    kind, params, options, monkeypatch
):
    engine = build_engine("roomy", **options)
    core, watched = engine.core, watch(engine)
    prompts = {str(i): [i + 1, 2, 3] for i in range(7)}  # four run, three wait
    for name, prompt in prompts.items():
        core.add_request(name, prompt, params)
    fail_once(monkeypatch, engine.programs, kind, at_dispatch)
    outputs = outputs_of(core)
    failed = {name for name, output in outputs.items() if output.finish_reason == "error"}
    assert failed == {"0", "1", "2", "3"}
    for name, prompt in prompts.items():
        if name in failed:
            assert "the device fell over" in outputs[name].error
        else:
            assert outputs[name].token_ids == healthy(prompt, params)
    assert watched.most_in_flight == 2
    assert_empty(core)


@pytest.mark.parametrize("failure", [before_dispatch, at_dispatch])
@pytest.mark.parametrize("batch", range(1, 8))
def test_a_failure_in_any_batch_of_a_wave_leaves_nothing_between_its_loops(
    batch, failure, monkeypatch
):
    """Four chunks, in seven batches; the name is used again at once."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    engine = build_engine("roomy", wavefront_chunked_prefill=True, prefill_chunk_size=2)
    core, watched = engine.core, watch(engine)
    core.add_request("a", prompt, ADAPTIVE)
    fail_once(monkeypatch, engine.programs, Kind.MIXED, failure, batch)
    assert outputs_of(core)["a"].finish_reason == "error"
    assert [batch.stage for batch in watched.batches] == [Stage.MIXED] * batch
    assert core.scheduler.stats()["staged"] == 0
    assert_empty(core)
    core.add_request("a", prompt, ADAPTIVE)
    assert outputs_of(core)["a"].token_ids == healthy(prompt, ADAPTIVE)
    assert_empty(core)


def test_a_failure_before_dispatch_leaves_the_batch_in_flight_alone(monkeypatch):
    """The batch before it belongs to the same request: its results change nothing any more."""
    engine = build_engine("roomy", max_in_flight=3)
    core, watched = engine.core, watch(engine)
    core.add_request("a", [1, 2], FULL_DEPTH)
    core.step()  # the coda and a whole token are in flight
    fail_once(monkeypatch, engine.programs, Kind.TOKEN_GREEDY, before_dispatch)
    (failed,) = core.step()
    assert (failed.finish_reason, failed.token_ids) == ("error", ())
    stats = core.scheduler.stats()
    assert stats["free_blocks"] < stats["total_blocks"]
    assert core.step() == []
    assert sum(len(row.tokens) for result in watched.results for row in result.rows) == 2
    assert_empty(core)
    core.add_request("a", [1, 2], FULL_DEPTH)
    assert outputs_of(core)["a"].token_ids == healthy([1, 2], FULL_DEPTH)


def test_a_failure_that_shows_while_another_batch_is_in_flight_loses_both(monkeypatch):
    engine = build_engine("roomy", max_in_flight=2)
    core, watched = engine.core, watch(engine)
    for i in range(5):
        core.add_request(str(i), [i + 1, 2, 3], FULL_DEPTH)
    while Stage.TOKENS not in [batch.stage for batch in watched.batches[:-1]]:
        core.step()
    assert watched.in_flight == 1
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_get", lambda tree: 1 / 0)
        lost = {output.request_id: output for output in core.step()}
    assert lost.keys() == set("0123")
    assert all("tokens batch failed: division by zero" in o.error for o in lost.values())
    for i in range(4):
        tokens = healthy([i + 1, 2, 3], FULL_DEPTH)
        assert lost[str(i)].token_ids == tokens[: len(lost[str(i)].token_ids)]
    assert outputs_of(core)["4"].token_ids == healthy([5, 2, 3], FULL_DEPTH)
    assert_empty(core)


def test_a_failure_while_reading_results_counts_as_lost_state(monkeypatch):
    engine = build_engine("roomy")
    core = engine.core
    core.add_request("a", [1, 2, 3], ADAPTIVE)
    monkeypatch.setattr(jax, "device_get", lambda array: 1 / 0)
    outputs = outputs_of(core)
    assert outputs["a"].finish_reason == "error"
    assert "boundary batch failed: division by zero" in outputs["a"].error
    monkeypatch.undo()
    core.add_request("a", [1, 2, 3], ADAPTIVE)
    assert outputs_of(core)["a"].token_ids == healthy([1, 2, 3], ADAPTIVE)


def test_an_interrupt_loses_nothing_but_the_running_requests(monkeypatch):
    engine = build_engine("roomy")
    core = engine.core
    for i in range(5):
        core.add_request(str(i), [i + 1, 2, 3], ADAPTIVE)
    real = engine.runner.submit

    def interrupted(batch):
        if batch.stage is Stage.BOUNDARY:
            raise KeyboardInterrupt
        return real(batch)

    monkeypatch.setattr(engine.runner, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        core.step()  # the prefill is in flight
    monkeypatch.setattr(engine.runner, "submit", real)
    outputs = outputs_of(core)
    assert {name: o.finish_reason for name, o in outputs.items()} == {
        **dict.fromkeys("0123", "error"),
        "4": "length",
    }
    assert outputs["4"].token_ids == healthy([5, 2, 3], ADAPTIVE)
    assert_empty(core)
