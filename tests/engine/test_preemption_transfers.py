"""What is kept of a preempted request, how it comes back, and how it ends meanwhile: on the fake
device, which refuses what does not follow from what was saved."""

import random
from collections import Counter

import pytest

from rlt_jax.bench.synthetic import OURO_1_4B
from rlt_jax.engine.slots import RequestStage
from rlt_jax.engine.types import BatchError, DeviceLostError, Stage
from rlt_jax.models.ouro import DTypePolicy
from rlt_jax.runtime.device_state import StateShape, abstract_state
from rlt_jax.runtime.transfers import pages_at_once
from tests.engine.fake_device import (
    FakeDevice,
    adaptive,
    any_in_flight,
    assert_empty,
    params,
    run,
)
from tests.engine.test_preemption import (
    SIZE,
    assert_complete,
    decoding,
    is_at,
    preempted,
    preempting,
    saves,
    step_until,
    token,
    transfers,
)

CHUNKED = {
    "refill": {"mode": "refill"},
    "mixed": {"mode": "mixed"},
    "wavefront": {"mode": "refill", "wavefront_chunked_prefill": True},
    "mixed, wavefront": {"mode": "mixed", "wavefront_chunked_prefill": True},
    "shared": {"mode": "refill", "planes": 1},
}


def tables(device: FakeDevice, generation: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """(batch, slot, table) of a request, each that the device was told of."""
    return [
        (batch.sequence, update.slot, update.block_table)
        for batch in device.batches
        for update in batch.slot_updates
        if any(row.slot == update.slot and row.generation == generation for row in batch.rows)
    ]


# -- what is kept, and how it comes back -----------------------------------------------------------


def saved_progress(device: FakeDevice, generation: int):
    return next(
        batch.transfer.content.progress
        for batch in device.of(Stage.RESTORE)
        if batch.rows[0].generation == generation
    )


@any_in_flight
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_token_between_its_loops_goes_on_with_the_next(depth, max_in_flight):
    core, device = preempting(max_in_flight=max_in_flight)
    for name in "ab":
        core.add_request(name, [1] * 6, adaptive(6, priority=1, exit_threshold=0.9))

    def at_depth():
        rows = [row for b in device.batches for row in b.rows if row.generation == 1]
        begins = rows and rows[-1].exit_depth > 0
        return rows and (rows[-1].position + begins, rows[-1].depth) == (8, depth)

    step_until(core, at_depth)
    core.add_request("c", [2], params(4, priority=0))
    outputs = run(core)
    kept = saved_progress(device, 1)
    assert (kept.position, kept.depth) == (8, depth)
    assert_complete(outputs)
    assert preempted(outputs) == {"b": 1}
    assert outputs["b"].exit_depths == outputs["a"].exit_depths == (4,) * 6
    rows = [row for b in device.batches for row in b.rows if row.generation == 1 and not row.size]
    loops = [(row.position + (row.exit_depth > 0), row.depth) for row in rows if row.depth]
    assert loops == [(position, loop) for position in range(6, 11) for loop in (1, 2, 3, 4)]


@any_in_flight
@pytest.mark.parametrize("chunked", CHUNKED)
def test_a_prompt_is_cut_back_to_its_last_chunk_that_has_run_all_loops(chunked, max_in_flight):
    core, device = preempting(
        max_in_flight=max_in_flight, prefill_chunk_size=3, pages_per_transfer=1, **CHUNKED[chunked]
    )
    core.add_request("a", [9], adaptive(40, priority=1))
    step_until(core, decoding(core, "a"))
    core.add_request("b", [1] * 20, adaptive(4, priority=1))

    def has_begun_its_fourth_chunk():
        rows = (row for batch in device.batches for row in batch.rows)
        return any(row.generation == 1 and row.position >= 9 for row in rows)

    step_until(core, has_begun_its_fourth_chunk)
    core.add_request("c", [2], adaptive(3, priority=0))
    outputs = run(core)
    assert preempted(outputs) == {"b": 1}
    kept = saved_progress(device, 1)
    assert 0 < kept.position < 20 and kept.position % 3 == 0 and not kept.chunks
    pages = -(-kept.position // SIZE)
    assert transfers(device, Stage.SAVE) == [(1, page, 1) for page in range(pages)]
    assert_complete(outputs)
    assert_empty(core)


def test_pages_come_back_in_another_order_and_into_another_slot():
    core, device = preempting(max_num_seqs=3, num_pages=20, incremental=True)
    for name, tokens, priority in (("a", 60, 1), ("b", 12, 2), ("c", 9, 1)):
        core.add_request(name, [1] * 6, adaptive(tokens, priority=priority))
    step_until(core, decoding(core, *"abc"))
    core.add_request("d", [2] * 6, adaptive(20, priority=0))
    outputs = run(core)
    assert preempted(outputs) == {"b": 1}
    assert_complete(outputs)
    (_, slot, first), *_ = of_b = tables(device, 1)
    assert [one for _, other, one in of_b if other == slot] != of_b
    saved = next(table for _, other, table in reversed(of_b) if other == slot)
    restored = next(table for _, other, table in of_b if other != slot)
    assert saved[: len(first)] == first and restored[: len(saved)] != saved


def test_a_request_of_which_nothing_was_computed_begins_again():
    """Though it has found a prefix."""
    core, device = preempting(caches_prefixes=True, max_num_batched_tokens=4)
    prefix = [5] * 8
    core.add_request("before", prefix, params(1))
    run(core)
    core.add_request("a", [1] * 8, adaptive(20, priority=1))
    core.add_request("b", [*prefix, 6], adaptive(4, priority=1))
    core.step()  # both have a slot; a alone has run
    core.add_request("c", [2], adaptive(3, priority=0))
    core.step()
    assert core.scheduler.find("b").preemptions == 1
    assert core.scheduler.stats()["host_blocks"] == 0
    outputs = run(core)
    assert preempted(outputs) == {"b": 1} and not saves(device)
    assert outputs["b"].num_cached_tokens == 8
    totals = core.scheduler.totals()
    assert (totals["prompt_tokens"], totals["cached_prompt_tokens"]) == (8 + 8 + 9 + 1, 8)


def test_a_prefix_that_was_found_comes_back_in_pages_of_its_own():
    core, device = preempting(caches_prefixes=True, max_num_seqs=3)
    prompt = [5] * 8
    core.add_request("a", [*prompt, 6], adaptive(30, priority=1))
    step_until(core, decoding(core, "a"))
    core.add_request("b", [*prompt, 7], adaptive(9, priority=2))
    step_until(core, decoding(core, "b"))
    for name in "cd":
        core.add_request(name, [9], params(4, priority=0))
    outputs = run(core)
    assert preempted(outputs) == {"b": 1} and outputs["b"].num_cached_tokens == 8
    (_, _, shared), *_, (_, _, own) = tables(device, 1)
    assert shared[:2] == tables(device, 0)[0][2][:2] and not set(own) & set(shared[:2])
    assert_complete(outputs)
    assert_empty(core, core.scheduler.stats()["cached_blocks"])


@pytest.mark.parametrize(
    ("planes", "page_mib", "at_once", "num_transfers"), [(4, 12, 5, 7), (1, 3, 21, 2)]
)
def test_a_request_of_500_positions_takes_what_docs_say(planes, page_mib, at_once, num_transfers):
    """The numbers of docs/scheduler.md, for Ouro-1.4B."""
    shape = StateShape(128, 1000, planes, block_size=16, table_width=4096)
    state = abstract_state(OURO_1_4B, DTypePolicy("bfloat16"), shape)
    position_bytes = state.kv.pool.size * state.kv.pool.dtype.itemsize // (1000 * planes * 16)
    assert position_bytes == 196_608
    assert 16 * planes * position_bytes == page_mib * 2**20
    assert pages_at_once(state) == at_once
    core, device = preempting(
        planes=planes,
        block_size=16,
        pages_per_transfer=at_once,
        max_num_batched_tokens=512,
        prefill_chunk_size=500,
    )
    for name in "ab":
        core.add_request(name, [1] * 500, adaptive(9, priority=1))
    step_until(core, is_at(core, "b", RequestStage.CODA))
    core.add_request("c", [2], adaptive(2, priority=0))
    core.step()
    host_pages = core.scheduler.stats()["host_blocks"] // planes
    assert host_pages == num_transfers * at_once  # 35 pages of 12 MiB: 420 MiB
    assert preempted(run(core)) == {"b": 1}
    assert [count for _, _, count in saves(device)] == [at_once] * (num_transfers - 1) + [
        32 - (num_transfers - 1) * at_once
    ]


# -- ends ------------------------------------------------------------------------------------------

ENDS = {
    "draining": RequestStage.RECURRENT,
    "saving": RequestStage.SAVING,
    "saved": RequestStage.WAITING,
    "restoring": RequestStage.RESTORING,
}


def about_to_end(end: str, max_in_flight: int):
    """b was told to leave, and stands there."""
    core, device = preempting(max_in_flight=max_in_flight, pages_per_transfer=1)
    for name, tokens in (("a", 200), ("b", 12)):
        core.add_request(name, [1] * 20, params(tokens, priority=1))
    step_until(core, decoding(core, *"ab"))
    core.add_request("c", [2], params(6, priority=0))
    core.step()
    step_until(core, is_at(core, "b", ENDS[end]))
    if end in ("saving", "restoring"):
        core.step()  # some of its pages are on their way, or there
    return core, device


@pytest.mark.parametrize(
    ("end", "max_in_flight"),
    [(end, count) for end in ENDS for count in (1, 2, 3) if count > 1 or end != "draining"],
)
def test_a_request_may_be_cancelled_wherever_it_is(end, max_in_flight):
    core, _ = about_to_end(end, max_in_flight)
    assert core.scheduler.stage_of("b") is ENDS[end]
    assert core.abort_request("b")
    assert core.scheduler.stats()["host_blocks"] == 0
    core.add_request("d", [3] * 9, params(5, priority=1))  # it is well, whatever is in flight
    outputs = run(core)
    assert_complete(outputs, aborted="b")
    assert_empty(core)


@any_in_flight
@pytest.mark.parametrize("end", ["saving", "saved", "restoring"])
def test_what_waits_on_the_host_outlives_the_device_state_and_what_is_on_its_way_does_not(
    end, max_in_flight
):
    core, device = about_to_end(end, max_in_flight)
    device.collect = lambda _: (_ for _ in ()).throw(DeviceLostError("gone"))
    lost = {output.request_id: output for output in core.step()}
    del device.collect
    assert device.resets == 1
    assert core.scheduler.stats()["preempted"] == (end == "saved")
    assert (core.scheduler.stats()["host_blocks"] > 0) == (end == "saved")
    outputs = lost | run(core)
    assert outputs["a"].finish_reason == "error"
    assert outputs["b"].finish_reason == ("length" if end == "saved" else "error")
    if end == "saved":
        assert outputs["b"].token_ids == tuple(token(1, i) for i in range(12))
    assert_empty(core)


@pytest.mark.parametrize("stage", [Stage.SAVE, Stage.RESTORE])
@any_in_flight
def test_a_transfer_that_is_not_dispatched_ends_its_own_request_only(stage, max_in_flight):
    core, device = about_to_end("draining" if max_in_flight > 1 else "saving", max_in_flight)
    submit = device.submit

    def failing(batch):
        if batch.stage is stage:
            device.submit = submit
            raise BatchError("no")
        return submit(batch)

    device.submit = failing
    outputs = run(core)
    assert outputs["b"].finish_reason == "error" and outputs["b"].error == "no"
    assert_complete({"a": outputs["a"]})
    assert outputs["c"].finish_reason == "length"
    assert_empty(core)


def test_stats_say_who_is_on_the_way_and_what_is_on_the_host():
    core, _ = preempting(pages_per_transfer=1)
    for name in "ab":
        core.add_request(name, [1] * 9, adaptive(9, priority=1))
    step_until(core, decoding(core, *"ab"))
    core.add_request("c", [2], adaptive(6, priority=0))
    seen = []
    while core.has_unfinished_requests():
        core.step()
        stats = core.scheduler.stats()
        names = ("saving", "preempted", "restoring", "host_blocks")
        seen.append(tuple(stats[name] for name in names))
    blocks = 3 * 4
    assert list(dict.fromkeys(seen)) == [
        (1, 0, 0, blocks),
        (0, 1, 0, blocks),
        (0, 0, 1, blocks),
        (0, 0, 0, 0),
    ]
    assert core.scheduler.totals()["preemptions"] == 1
    assert_empty(core)


# -- whatever comes --------------------------------------------------------------------------------

SEEN = Counter()  # over all runs of the property below


def random_options(rng: random.Random) -> dict:
    shared = rng.random() < 0.2
    mode = rng.choice(["refill", "no_refill"] + ["mixed"] * (not shared))
    return {
        "max_num_seqs": rng.choice([2, 3, 4, 6]),
        "num_pages": rng.choice([6, 8, 12]),
        "planes": 1 if shared else 4,
        "incremental": rng.random() < 0.8,
        "policy": rng.choice(["fcfs", "priority"]),
        "mode": mode,
        "wavefront_chunked_prefill": not shared and mode != "no_refill" and rng.random() < 0.4,
        "caches_prefixes": not shared and rng.random() < 0.5,
        "max_in_flight": rng.choice([1, 2, 3]),
        "tokens_per_dispatch": rng.choice([1, 2, 4]),
        "host_pages": rng.choice([0, 4, 1000]),
        "pages_per_transfer": rng.choice([1, 2, 5]),
        "prefill_chunk_size": rng.choice([3, 7, None]),
        "max_num_batched_tokens": rng.choice([5, 12, 32]),
        "watermark_ratio": rng.choice([0, 0.2]),
    }


@pytest.mark.parametrize("seed", range(150))
def test_in_any_workload_every_request_gets_what_it_asks_for_and_everything_comes_back(seed):
    """Or it ends with the error for want of host memory, where there is little."""
    rng = random.Random(seed)
    options = random_options(rng)
    core, device = preempting(**options)
    outputs = {}
    for name in "abcdefghi"[: rng.randint(2, 9)]:
        prompt = [rng.randint(0, 1)] * rng.randint(1, 9) + [3] * rng.randint(0, 5)
        kind, max_tokens = rng.choice([adaptive, params]), rng.randint(1, 25 - len(prompt))
        core.add_request(name, prompt, kind(min(max_tokens, 14), priority=rng.randint(0, 2)))
        for _ in range(rng.randint(0, 4)):
            outputs |= {output.request_id: output for output in core.step()}
        if rng.random() < 0.1:
            core.abort_request(rng.choice("abc"))
    outputs |= run(core)
    assert_empty(core, core.scheduler.stats()["cached_blocks"])
    failed = {name for name, output in outputs.items() if output.finish_reason == "error"}
    assert all("host_memory_bytes" in outputs[name].error for name in failed)
    assert not failed or options["host_pages"] < 1000
    aborted = {name for name, output in outputs.items() if output.finish_reason == "abort"}
    assert_complete({n: o for n, o in outputs.items() if n not in failed}, aborted=aborted)
    restored = [batch.transfer.content.progress for batch in device.of(Stage.RESTORE)]
    SEEN["failed"] += len(failed)
    SEEN["aborted"] += len(aborted)
    SEEN["preemptions"] += core.scheduler.totals()["preemptions"]
    SEEN["begun again"] += core.scheduler.totals()["preemptions"] - len(
        {(row.generation, row.position) for b in device.of(Stage.SAVE) for row in b.rows}
    )
    SEEN["restored in the middle of a token"] += sum(0 < at.depth < 4 for at in restored)
    SEEN["restored in the prompt"] += sum(not (at.sampled or at.depth) for at in restored)
    SEEN["several transfers"] += sum(batch.transfer.first > 0 for batch in device.of(Stage.SAVE))
    cached = core.scheduler.totals()["cached_prompt_tokens"]
    SEEN["prefixes found beside preemptions"] += bool(cached and restored)


def test_the_property_above_met_every_case():
    assert len(SEEN) == 8
    assert all(count > 10 for count in SEEN.values()), SEEN
