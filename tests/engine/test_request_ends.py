"""How requests end, and that any schedule makes the same of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_jax.engine.types import BatchError, Stage
from rlt_jax.sampling_params import SamplingParams
from tests.engine.fake_device import (
    FULL_DEPTH,
    TOKEN,
    FakeDevice,
    adaptive,
    any_in_flight,
    assert_empty,
    fake_engine,
    params,
    run,
)


@any_in_flight
@pytest.mark.parametrize(
    ("fields", "eos", "count", "reason"),
    [
        ({}, (TOKEN,), 1, "stop"),
        ({"ignore_eos": True}, (TOKEN,), 5, "length"),
        ({"stop_token_ids": (TOKEN,)}, (), 1, "stop"),
        ({"stop_token_ids": (TOKEN,), "ignore_eos": True}, (TOKEN,), 1, "stop"),
        ({}, (3,), 5, "length"),
    ],
)
def test_what_ends_a_request(fields, eos, count, reason, max_in_flight):
    core, _ = fake_engine(eos_token_ids=eos, max_in_flight=max_in_flight)
    core.add_request("a", [1], params(max_tokens=5, **fields))
    output = run(core)["a"]
    assert (len(output.token_ids), output.finish_reason) == (count, reason)
    assert_empty(core)


@any_in_flight
@pytest.mark.parametrize("kind", [params, adaptive])
def test_a_token_whose_successor_is_in_flight_ends_the_request_exactly_there(kind, max_in_flight):
    device = FakeDevice(token=lambda _, index: 11 if index == 3 else index)
    core, device = fake_engine(device, eos_token_ids=(11,), max_in_flight=max_in_flight)
    core.add_request("a", [1], kind(max_tokens=30))
    told = []
    while core.has_unfinished_requests():
        told += core.step()
    assert told[-1].token_ids == (0, 1, 2, 11)
    assert [output.finished for output in told] == [False] * 3 + [True]
    sampled = sum(row.exit_depth > 0 for batch in device.batches for row in batch.rows)
    assert sampled == (4 if kind is adaptive else 3 + max_in_flight)
    assert_empty(core)


def test_the_engine_has_work_until_the_last_batch_is_back():
    core, device = fake_engine(eos_token_ids=(TOKEN,), max_in_flight=3, max_num_seqs=1)
    core.add_request("a", [1], params(max_tokens=9))
    core.add_request("b", [1], params(max_tokens=1))
    outputs = []
    while not outputs:
        outputs = core.step()
    assert outputs[0].finish_reason == "stop"
    assert device.stages() == "PCTT" and len(device.in_flight) == 2
    assert core.scheduler.find("a") is None
    stats = core.scheduler.stats()
    assert (stats["running"], stats["waiting"]) == (1, 1)  # a still holds the slot
    assert core.step() == [] == core.step()
    assert run(core)["b"].finish_reason == "stop"
    assert_empty(core)


def test_results_of_a_cancelled_request_change_nothing_and_its_id_is_free_at_once():
    core, device = fake_engine(max_in_flight=3)
    device.collect, kept = lambda output: kept.append(output) or collect(output), []
    collect = FakeDevice.collect.__get__(device)
    core.add_request("a", [1], params(max_tokens=20))
    core.step()
    assert [batch.stage for batch in device.in_flight] == [Stage.CODA, Stage.TOKENS]
    assert core.abort_request("a") and not core.abort_request("a")
    stats = core.scheduler.stats()
    assert stats["free_blocks"] < stats["total_blocks"]
    core.add_request("a", [2], params(max_tokens=3))
    told = []
    while core.has_unfinished_requests():
        told += core.step()
    assert {row.generation for output in kept for row in output.rows if row.tokens} == {0, 1}
    aborted, *again = told
    assert (aborted.finish_reason, aborted.token_ids) == ("abort", ())
    assert [output.token_ids for output in again] == [(TOKEN,), (TOKEN,) * 2, (TOKEN,) * 3]
    assert_empty(core)


def test_a_cancelled_request_whose_gate_is_awaited_holds_nobody_up():
    core, device = fake_engine()
    core.add_request("a", [1], adaptive(max_tokens=20))
    core.add_request("b", [1], adaptive(max_tokens=3))
    core.step()
    assert device.stages() == "PB" and device.in_flight[0].reads_gate
    core.abort_request("a")
    outputs = run(core)
    assert outputs["a"].finish_reason == "abort"
    assert outputs["b"].exit_depths == (4, 2, 2)
    assert_empty(core)


def test_a_batch_that_was_not_dispatched_ends_its_requests_whatever_else_is_in_flight():
    core, device = fake_engine(max_in_flight=3)
    core.add_request("a", [1], params(max_tokens=20))
    core.step()
    submit = device.submit

    def refuse(batch):
        device.submit = submit
        raise BatchError("no room")

    device.submit = refuse
    core.add_request("b", [1], params(max_tokens=2))
    outputs = {output.request_id: output for output in core.step()}
    assert device.in_flight
    outputs |= run(core)
    assert {name: output.finish_reason for name, output in outputs.items()} in (
        {"a": "error", "b": "length"},
        {"a": "length", "b": "error"},
    )
    assert [o.error for o in outputs.values() if o.error] == ["no room"]
    assert_empty(core)


def test_slot_updates_come_once_per_request_with_its_table():
    core, device = fake_engine(max_num_seqs=1)
    core.add_request("a", [1], params(temperature=0.5, seed=2**63 - 1))
    core.add_request("b", [1], params())
    run(core)
    updates = [update for batch in device.batches for update in batch.slot_updates]
    assert [update.temperature for update in updates] == [0.5, 0.0]
    assert updates[0].seed == 2**63 - 1
    assert all(len(update.block_table) == 1 for update in updates)
    assert [batch.samples for batch in device.batches] == [False, True, True, False, False, False]


def test_metrics_are_filled_in_as_they_become_known():
    core, _ = fake_engine()
    core.add_request("a", [1], params(max_tokens=3))
    outputs = [output for _ in range(20) for output in core.step()]
    first, last = outputs[0].metrics, outputs[-1].metrics
    assert 0 <= first.queue_time <= first.time_to_first_token
    assert first.time_per_output_token is None
    assert last.time_per_output_token > 0


# -- any schedule ------------------------------------------------------------------------------


def scripted_token(generation, index):
    return (31 * generation + 17 * index * index + 5 * index) % 97


def scripted_hazard(generation, position, depth):
    return ((7 * generation + 13 * position + 29 * depth) % 10) / 10


def expected_output(generation, prompt, p, eos):
    """What the script and the exit rule make of a request."""
    tokens, depths = [], []
    while True:
        depth, remaining = 0 if tokens else FULL_DEPTH, np.float32(1)
        fixed = p.exit_threshold == 1 or p.min_loops == p.max_loops
        while depth < (p.max_loops if tokens else FULL_DEPTH):
            depth += 1
            hazard = scripted_hazard(generation, len(prompt) - 1 + len(tokens), depth)
            remaining *= np.float32(1) - np.float32(hazard)
            if not fixed and depth >= p.min_loops and 1 - remaining >= np.float32(p.exit_threshold):
                break
        tokens.append(scripted_token(generation, len(tokens)))
        depths.append(depth)
        if tokens[-1] in eos:
            return tuple(tokens), tuple(depths), "stop"
        if len(tokens) == p.max_tokens:
            return tuple(tokens), tuple(depths), "length"


@st.composite
def scripted_work(draw):
    """(prompt, params, arrival, when it is cancelled or None) of each request."""
    work = []
    for _ in range(draw(st.integers(1, 8))):
        max_loops = draw(st.sampled_from([1, 3, 4, 4, 4]))
        p = SamplingParams(
            max_tokens=draw(st.integers(1, 15)),
            max_loops=max_loops,
            min_loops=draw(st.integers(1, max_loops)),
            exit_threshold=draw(st.sampled_from([0.3, 0.8, 1.0, 1.0])),
            temperature=draw(st.sampled_from([0.0, 0.0, 0.0, 1.0])),
        )
        prompt = [1] * draw(st.integers(1, 30))
        arrival = draw(st.integers(0, 30))
        cancelled = draw(st.one_of(st.none(), st.none(), st.integers(0, 30)))
        work.append((prompt, p, arrival, cancelled and arrival + cancelled))
    return sorted(work, key=lambda one: one[2])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    work=scripted_work(),
    options=st.fixed_dictionaries(
        {
            "mode": st.sampled_from(["refill", "no_refill", "mixed"]),
            "wavefront_chunked_prefill": st.booleans(),
            "max_in_flight": st.integers(1, 4),
            "tokens_per_dispatch": st.sampled_from([1, 2, 4]),
            "max_num_seqs": st.integers(1, 5),
            "max_num_batched_tokens": st.sampled_from([2, 5, 32]),
            "prefill_chunk_size": st.sampled_from([1, 7, 32]),
            "max_prefill_batches_before_decode": st.integers(1, 3),
            "min_coda_batch_size": st.integers(1, 4),
            "planes": st.sampled_from([1, 4]),
            "num_pages": st.sampled_from([12, 1000]),
        }
    ),
)
def test_any_schedule_makes_the_same_of_every_request(work, options):
    options["planes"] = 4 if options["mode"] == "mixed" else options["planes"]
    options["wavefront_chunked_prefill"] &= options["planes"] > 1 and options["mode"] != "no_refill"
    eos = tuple(range(3, 97, 9))
    device = FakeDevice(scripted_token, scripted_hazard, alone=True)  # its row may have ended
    core, device = fake_engine(device, eos_token_ids=eos, **options)
    outputs, step = {}, 0
    while core.has_unfinished_requests() or step <= 60:
        for i, (prompt, p, arrival, cancelled) in enumerate(work):
            if step == arrival:
                core.add_request(str(i), prompt, p)
            if cancelled == step:
                core.abort_request(str(i))
        outputs |= {output.request_id: output for output in core.step()}
        step += 1
        assert len(device.in_flight) < options["max_in_flight"]
        assert step < 5000
    for i, (prompt, p, _, _) in enumerate(work):
        tokens, depths, reason = expected_output(i, prompt, p, eos)
        got = outputs[str(i)]
        if got.finish_reason == "abort":
            count = len(got.token_ids)
            assert (got.token_ids, got.exit_depths) == (tokens[:count], depths[:count])
        else:
            assert (got.token_ids, got.exit_depths, got.finish_reason) == (tokens, depths, reason)
    assert_empty(core)
