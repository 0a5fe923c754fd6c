"""Faults with prefix caching, mixed batches and preemption, on the real runner: a clear error for
those that are hit, the right tokens for the others, blocks back, and the next request works."""

import dataclasses
import functools
import gc
import itertools
import threading

import jax
import jax.numpy as jnp
import pytest

from rlt_jax import LLM, CacheConfig, SamplingParams, SchedulerConfig, assembly
from rlt_jax.engine.slots import RequestStage
from rlt_jax.engine.types import SchedulerOutput, Stage
from rlt_jax.llm_engine import LLMEngine
from rlt_jax.runtime import transfers
from tests.support import EngineShape, Work, build_engine, drive, small_model
from tests.tiny import OPTIONS

# Programs do not hang on the pages of a transfer: no other test may have this shape.
SHAPE = EngineShape("last_exited", 4, 4 * 27, 4, 24, min_row_bucket=4, min_prefill_bucket=32)
PAGES_AT_ONCE = 2

PREEMPTS = {"policy": "priority", "enable_preemption": True, "incremental_allocation": True}
AHEAD = {"async_scheduling": True, "exit_decision": "device", "max_in_flight": 3}
FEATURES = {
    "prefix caching": {"enable_prefix_caching": True},
    "mixed": {"enable_prefix_caching": True, "mode": "mixed", "prefill_chunk_size": 6},
    "preemption": {**PREEMPTS, "prefill_chunk_size": 6},
    "all": {**PREEMPTS, **AHEAD, "enable_prefix_caching": True, "mode": "mixed"},
}
every_feature = pytest.mark.parametrize("features", FEATURES)


@pytest.fixture(autouse=True)
def few_pages_at_once(monkeypatch):
    """A slot takes several transfers."""
    page_bytes = 4 * SHAPE.block_size * small_model()[0].kv_bytes_per_position(4)
    monkeypatch.setattr(transfers, "MAX_TRANSFER_BYTES", PAGES_AT_ONCE * page_bytes)


def requests() -> list[Work]:
    """Four that take long, then more urgent ones; prompts that begin alike; some sample."""
    work = []
    for i in range(10):
        urgent = i >= 4
        prompt = tuple((7 * j + 3 * (i % 2)) % 97 for j in range(13)) + tuple(range(i, 2 * i))
        params = SamplingParams(
            max_tokens=5 + i % 4 if urgent else 22 + i,
            exit_threshold=(0.3, 0.5, 0.7)[i % 3],
            temperature=0.8 * (i % 3 == 1),
            seed=i,
            priority=-(i % 2) if urgent else 1,
        )
        work.append(Work(prompt, params, arrival=6 * (i - 2) if urgent else 0))
    return work


@functools.cache
def undisturbed() -> dict:
    outputs = drive(build_engine(SHAPE), requests())
    assert {d for output in outputs.values() for d in output.exit_depths} >= {2, 3, 4}
    return outputs


def assert_right(outputs, names) -> None:
    """These ended as they do when nothing comes in between."""
    for name in names:
        output, expected = outputs[name], undisturbed()[name]
        assert (output.finish_reason, output.error) == (expected.finish_reason, None)
        assert output.token_ids == expected.token_ids
        assert output.exit_depths == expected.exit_depths


def assert_nothing_left(core) -> None:
    """Nothing runs, and the next request works."""
    stats = core.scheduler.stats()
    free, cached, total = (stats.pop(f"{name}_blocks") for name in ("free", "cached", "total"))
    assert free + cached == total
    assert not any(stats.values()), stats
    assert core.scheduler.block_tables() == {}
    one = requests()[5]
    core.add_request("5", one.prompt, one.params)
    assert_right(finish(core), "5")


def finish(core) -> dict:
    outputs = {}
    while core.has_unfinished_requests():
        outputs |= {output.request_id: output for output in core.step()}
    return outputs


def answer(core, after_step=lambda: None) -> tuple[dict, list]:
    """All requests: the last output of each, and in which order and how they ended."""
    work, outputs, ends = requests(), {}, []
    for step in range(1000):
        for i, one in enumerate(work):
            if one.arrival == step:
                core.add_request(str(i), one.prompt, one.params)
        for output in core.step():
            outputs[output.request_id] = output
            if output.finished:
                ends.append((output.request_id, output.finish_reason))
        after_step()
        if step >= work[-1].arrival and not core.has_unfinished_requests():
            return outputs, ends
    raise AssertionError(f"not done: {core.scheduler.stats()}")


def unfinished(core) -> dict:
    """Requests by name."""
    found = {name: core.scheduler.find(name) for name in undisturbed()}
    return {name: request for name, request in found.items() if request is not None}


def of_batch(core, batch) -> set[str]:
    generations = set(batch.rows.generation.tolist())
    return {name for name, one in unfinished(core).items() if one.generation in generations}


def running(core) -> set[str]:
    waiting = RequestStage.WAITING
    return {name for name in unfinished(core) if core.scheduler.stage_of(name) is not waiting}


# -- a fault in a batch ----------------------------------------------------------------------------


def out_of_memory(*_):
    return jnp.zeros(2**50).block_until_ready()


def no_program(patch, engine):
    patch.setattr(engine.programs, "get", out_of_memory)


def no_room_to_place(patch, _):
    patch.setattr(jax, "device_put", out_of_memory)


def dies_at_dispatch(patch, engine):
    """The real program runs, so that the donated state is gone."""
    real = engine.programs.get

    def get(kind, bucket):
        def call(state, *arguments):
            jax.block_until_ready(real(kind, bucket)(state, *arguments))
            assert state.kv.pool.is_deleted()
            out_of_memory()

        return call

    patch.setattr(engine.programs, "get", get)


def dies_on_its_way(patch, _):
    patch.setattr(jax, "block_until_ready", out_of_memory)


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong, in which call of the runner, and whether the device state goes with it."""

    plant: object
    call: str
    loses_state: bool


BEFORE = Fault(no_program, "submit", loses_state=False)
AT = Fault(dies_at_dispatch, "submit", loses_state=True)
AFTER = Fault(dies_on_its_way, "collect", loses_state=True)
FAULTS = {"before dispatch": BEFORE, "at dispatch": AT, "after dispatch": AFTER}


@dataclasses.dataclass
class Disturbed:
    """outputs: the last of each request. batch: in which the fault was. hit: the requests that it
    must end, by name. at_reset: the scheduler's stats when the device state was built anew. stages:
    of all batches."""

    outputs: dict = dataclasses.field(default_factory=dict)
    batch: SchedulerOutput | None = None
    hit: set[str] = frozenset()
    at_reset: dict | None = None
    stages: set[Stage] = dataclasses.field(default_factory=set)


def disturb(engine, monkeypatch, fault: Fault, when) -> Disturbed:
    """Answers all requests, with a fault in the first batch for which when(batch) is true."""
    core, runner, seen = engine.core, engine.runner, Disturbed()
    submit, collect, reset = runner.submit, runner.collect, runner.reset

    def call(real, argument, batch):
        if fault.call != real.__name__ or batch is not seen.batch:
            return real(argument)
        seen.hit = running(core) if fault.loses_state else of_batch(core, batch)
        with monkeypatch.context() as patch:
            fault.plant(patch, engine)
            return real(argument)

    def watched_submit(batch):
        seen.stages.add(batch.stage)
        if seen.batch is None and when(batch):
            seen.batch = batch
        return call(submit, batch, batch)

    def watched_reset():
        seen.at_reset = core.scheduler.stats()
        reset()

    with monkeypatch.context() as patch:
        patch.setattr(runner, "submit", watched_submit)
        patch.setattr(runner, "collect", lambda ticket: call(collect, ticket, ticket.batch))
        patch.setattr(runner, "reset", watched_reset)
        seen.outputs, _ = answer(core)
    return seen


def the(number: int):
    """A condition that is true of the batch of this number."""
    counter = itertools.count()
    return lambda _: next(counter) == number


def assert_only_those_hit_failed(seen: Disturbed, fault: Fault) -> None:
    """With an error that names the batch and the cause; what they had got until then is right."""
    failed = {name for name, output in seen.outputs.items() if output.finish_reason == "error"}
    assert failed == seen.hit
    did = "failed" if fault.loses_state else "was not dispatched"
    for name in failed:
        output, expected = seen.outputs[name], undisturbed()[name]
        assert output.error.startswith(f"{seen.batch.stage.value} batch {did}: ")
        assert "allocat" in output.error.lower()
        assert output.token_ids == expected.token_ids[: len(output.token_ids)]
    assert_right(seen.outputs, undisturbed().keys() - failed)
    assert (seen.at_reset is not None) == fault.loses_state
    if fault.loses_state:
        blocks = {name: seen.at_reset[f"{name}_blocks"] for name in ("free", "cached", "total")}
        assert blocks["cached"] == 0 and blocks["free"] == blocks["total"]


@every_feature
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_any_batch_ends_those_hit_and_the_others_get_what_they_would(
    fault, features, monkeypatch
):
    engine, options = build_engine(SHAPE, **FEATURES[features]), FEATURES[features]
    stages, survived = set(), 0
    for number in range(3, 76, 8):
        seen = disturb(engine, monkeypatch, FAULTS[fault], the(number))
        assert_only_those_hit_failed(seen, FAULTS[fault])
        assert_nothing_left(engine.core)
        stages |= seen.stages
        survived += (seen.at_reset or {}).get("preempted", 0)
    # It all happened.
    totals = engine.core.scheduler.totals()
    assert bool(totals["cached_prompt_tokens"]) == ("enable_prefix_caching" in options)
    assert (Stage.MIXED in stages) == ("mode" in options)
    assert ({Stage.SAVE, Stage.RESTORE} <= stages) == ("enable_preemption" in options)
    if FAULTS[fault].loses_state and "enable_preemption" in options:
        assert survived  # saved requests that were waiting when the state was lost


@pytest.mark.parametrize("piece", ["first", "later"])
@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        (Stage.SAVE, BEFORE),
        (Stage.SAVE, AT),
        (Stage.SAVE, AFTER),
        (Stage.SAVE, Fault(no_room_to_place, "submit", loses_state=True)),
        (Stage.RESTORE, BEFORE),
        (Stage.RESTORE, AT),
        (Stage.RESTORE, AFTER),
        (Stage.RESTORE, Fault(no_room_to_place, "submit", loses_state=False)),
    ],
    ids=lambda value: value.plant.__name__ if isinstance(value, Fault) else value.value,
)
def test_a_fault_in_a_transfer_ends_the_victim_or_the_running_and_no_saved_one(
    stage, fault, piece, monkeypatch
):
    engine = build_engine(SHAPE, **FEATURES["preemption"])

    def when(batch):
        return batch.stage is stage and (batch.transfer.first > 0) == (piece == "later")

    seen = disturb(engine, monkeypatch, fault, when)
    assert seen.batch.stage is stage
    assert_only_those_hit_failed(seen, fault)
    if not fault.loses_state:
        assert len(seen.hit) == 1
    assert_nothing_left(engine.core)


# -- cancels ---------------------------------------------------------------------------------------


@every_feature
def test_a_cancel_between_submit_and_collect_shows_in_no_other_request(features):
    engine = build_engine(SHAPE, **FEATURES[features])
    core, submit = engine.core, engine.runner.submit
    stages = set()
    for number in range(2, 70, 4):
        batches, cancelled = [], []
        engine.runner.submit = lambda batch, batches=batches: batches.append(batch) or submit(batch)

        def cancel(number=number, batches=batches, cancelled=cancelled):
            """Somebody whose batch is in flight."""
            if len(batches) > number and core.in_flight and not cancelled:
                for name in sorted(of_batch(core, batches[-1]))[:1]:
                    assert core.abort_request(name)
                    cancelled.append(name)
                    stages.add(batches[-1].stage)

        outputs, ends = answer(core, cancel)
        assert len(cancelled) == 1
        assert (cancelled[0], "abort") in ends
        tokens = outputs[cancelled[0]].token_ids
        assert tokens == undisturbed()[cancelled[0]].token_ids[: len(tokens)]
        assert_right(outputs, undisturbed().keys() - {*cancelled})
        assert_nothing_left(core)
    assert len(stages) >= 2


@pytest.mark.parametrize("stage", ["saving", "saved", "restoring"])
@pytest.mark.parametrize("features", ["preemption", "all"])
def test_a_request_cancelled_on_its_way_to_the_host_or_back_leaves_nothing_there(stage, features):
    """And its name is free at once."""
    core, cancelled = build_engine(SHAPE, **FEATURES[features]).core, []

    def is_there(name):
        now = core.scheduler.stage_of(name)
        if stage != "saved":
            return now is RequestStage[stage.upper()]
        is_back = now is RequestStage.WAITING and unfinished(core)[name].preemptions
        return is_back and core.scheduler.stats()["preempted"] == 1

    def cancel():
        there = [] if cancelled else list(filter(is_there, unfinished(core)))
        for name in there[:1]:
            one = requests()[int(name)]
            assert core.abort_request(name)
            core.add_request(name, one.prompt, one.params)
            cancelled.append(name)

    outputs, ends = answer(core, cancel)
    assert sorted(ends) == sorted([(*cancelled, "abort"), *((str(i), "length") for i in range(10))])
    assert_right(outputs, undisturbed())
    assert_nothing_left(core)


# -- no host memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("host_pages", [0, 3])
def test_where_nobody_can_be_saved_the_least_urgent_fail_and_say_what_is_needed(
    host_pages, monkeypatch
):
    """Of the least urgent four, which together need more pages than there are."""
    monkeypatch.setattr(assembly, "host_pages", lambda *_: host_pages)
    engine = build_engine(SHAPE, **FEATURES["preemption"])
    outputs = drive(engine, requests())
    failed = {name for name, output in outputs.items() if output.finish_reason == "error"}
    assert failed and failed < set("123")
    for name in failed:
        assert "no host memory left to save it in" in outputs[name].error
        assert "CacheConfig.host_memory_bytes" in outputs[name].error
        tokens = outputs[name].token_ids
        assert tokens == undisturbed()[name].token_ids[: len(tokens)]
    assert_right(outputs, undisturbed().keys() - failed)
    assert_nothing_left(engine.core)


# -- the end of an engine, and callers that stop reading -------------------------------------------

LLM_OPTIONS = {
    **OPTIONS,
    "cache_config": CacheConfig(
        num_blocks=4 * 12,
        block_size=8,
        enable_prefix_caching=True,
        incremental_allocation=True,
    ),
    "scheduler_config": SchedulerConfig(max_num_seqs=4, policy="priority", enable_preemption=True),
}
PROMPTS = [[*range(40, 60), i] for i in range(8)]
PARAMS = [
    SamplingParams(max_tokens=20, exit_threshold=0.5, priority=-(i // 4), ignore_eos=True)
    for i in range(8)
]


@pytest.fixture(scope="module")
def answers(checkpoint) -> list[tuple[int, ...]]:
    with LLM(checkpoint, **OPTIONS) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


def start(engine, first: int = 0) -> None:
    """Adds requests and runs them until batches are in flight, and some are saved on the host."""
    for i in range(4):
        engine.add_request(str(first + i), PROMPTS[i], PARAMS[i])
    for _ in range(4):
        engine.step()
    for i in range(4, 8):
        engine.add_request(str(first + i), PROMPTS[i], PARAMS[i])
    while not (engine.stats()["in_flight"] and engine.stats()["preempted"]):
        engine.step()


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_shutdown_with_batches_in_flight_and_saved_requests_frees_all_and_the_next_engine_works(
    checkpoint, answers
):
    before = live_bytes()
    engine = LLMEngine(checkpoint, **LLM_OPTIONS)
    start(engine)
    assert live_bytes() > before
    engine.shutdown()
    assert live_bytes() == before
    assert not engine.has_unfinished_requests()
    with pytest.raises(RuntimeError, match="LLMEngine: it has been shut down"):
        engine.step()
    with LLM(checkpoint, **LLM_OPTIONS) as llm:
        assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == answers


def test_a_shutdown_by_another_thread_ends_the_steps_with_a_clear_error(checkpoint):
    engine = LLMEngine(checkpoint, **LLM_OPTIONS)
    start(engine)
    stepped, errors = threading.Event(), []

    def step_on():
        try:
            while True:
                engine.step()
                stepped.set()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=step_on)
    thread.start()
    stepped.wait()
    engine.shutdown()
    thread.join(timeout=60)
    assert errors == ["LLMEngine: it has been shut down; make a new one"]


def assert_all_back(stats) -> None:
    assert stats["free_blocks"] + stats["cached_blocks"] == stats["total_blocks"]
    names = ("running", "waiting", "preempted", "host_blocks", "reserved_blocks", "in_flight")
    assert [stats[name] for name in names] == [0] * len(names)


def test_what_one_caller_left_unread_comes_with_the_outputs_of_the_next(checkpoint, answers):
    engine = LLMEngine(checkpoint, **LLM_OPTIONS)
    start(engine)  # and reads on no more
    for i in range(8):
        engine.add_request(str(8 + i), PROMPTS[i], PARAMS[i])
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert [outputs[str(i)].token_ids for i in range(16)] == answers * 2
    assert sum(outputs[str(i)].metrics.preemptions for i in range(16)) > 0
    assert_all_back(engine.stats())
    engine.shutdown()


@pytest.mark.parametrize("closes", [True, False], ids=["closes it", "drops it"])
def test_a_stream_left_while_requests_are_saved_leaves_nothing_and_the_next_call_is_right(
    checkpoint, answers, closes
):
    with LLM(checkpoint, **LLM_OPTIONS) as llm:
        long = [dataclasses.replace(params, priority=0, max_tokens=30) for params in PARAMS]
        stream = llm.stream(PROMPTS, long)  # of equal urgency: they need each other's pages
        while not llm.stats()["preempted"]:
            next(stream)
        if closes:
            stream.close()
        del stream
        gc.collect()
        assert_all_back(llm.stats())
        assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == answers
        assert_all_back(llm.stats())


def test_results_that_are_never_read_hold_nothing_up(checkpoint, answers):
    """A caller that only steps, and asks when all is over."""
    engine = LLMEngine(checkpoint, **LLM_OPTIONS)
    start(engine)
    while engine.has_unfinished_requests():
        engine.step(only_finished=True)
    assert_all_back(engine.stats())
    engine.add_request("next", PROMPTS[0], PARAMS[0])
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].token_ids == answers[0]
    engine.shutdown()
