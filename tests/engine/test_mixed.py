"""Which batches are made where prompts go through the loops one at a time."""

import pytest

from rlt_jax.engine.slots import RequestStage
from rlt_jax.engine.staging import Part, Staging
from rlt_jax.engine.types import Stage
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

any_mode = pytest.mark.parametrize("mode", ["refill", "mixed"])


def chunks(batch):
    """(generation, first position, size, loop) of the prompt rows."""
    return [(row.generation, row.position, row.size, row.depth) for row in batch.rows if row.size]


def decoding(batch):
    """(generation, position, loop) of the decode rows."""
    return [(row.generation, row.position, row.depth) for row in batch.rows if not row.size]


def windows(batch):
    return {(row.generation, row.position): row.window for row in batch.rows if row.size}


def engine_at_decode(request=None, **options):
    """Request 0 has its first token; adaptive, it has run a loop of the next one."""
    core, device = fake_engine(**{"max_in_flight": 1, **options})
    core.add_request("decoding", [1], request or params(max_tokens=40))
    while len(device.batches) < 2:
        core.step()
    device.batches.clear()
    return core, device


def order_of_ends(core):
    ended = []
    while core.has_unfinished_requests():
        ended += [output.request_id for output in core.step() if output.finished]
    return ended


# -- mixed: prompt and decode rows ---------------------------------------------------------------


def test_a_prompt_runs_its_loops_beside_the_decode_rows():
    core, device = engine_at_decode(mode="mixed")
    core.add_request("prompt", [5] * 6, params(max_tokens=1))
    run(core)
    assert device.stages() == "MMMM" + "C" + "T" * 38  # the coda samples for both
    first = device.batches[:4]
    assert [decoding(batch) for batch in first] == [[(0, 1, d)] for d in (1, 2, 3, 4)]
    assert [chunks(batch) for batch in first] == [[(1, 0, 6, d)] for d in (1, 2, 3, 4)]
    assert [len(batch.rows.tokens[1]) for batch in first] == [6, 0, 0, 0]
    assert {batch.num_loops for batch in first} == {1}
    assert {row.generation: row.exit_depth for row in device.batches[4].rows} == {0: 4, 1: 4}


def test_rows_that_exit_sample_alone_while_prompts_are_computed():
    """A boundary batch would run a loop without the prompt."""
    core, device = engine_at_decode(adaptive(max_tokens=20), mode="mixed")
    core.add_request("prompt", [5] * 6, adaptive(max_tokens=1))
    run(core)
    assert device.stages().startswith("M" + "C" + "MM" + "C" + "M" + "B")


@any_in_flight
def test_without_decode_rows_a_prompt_runs_all_loops_in_one_submission(max_in_flight):
    core, device = fake_engine(mode="mixed", prefill_chunk_size=4, max_in_flight=max_in_flight)
    core.add_request("a", [1] * 10, params(max_tokens=2))
    assert run(core)["a"].token_ids == (TOKEN,) * 2
    assert device.stages() == "PPP" + "C" + "T"
    assert core.scheduler.stats()["staged"] == 0


def test_a_prompt_that_decode_rows_have_left_runs_the_rest_of_its_loops_at_once():
    core, device = engine_at_decode(params(max_tokens=2, max_loops=2, min_loops=2), mode="mixed")
    core.add_request("prompt", [5] * 6, params(max_tokens=1))
    run(core)
    assert device.stages() == "M" + "C" + "M" + "C"
    loops = [(chunks(batch), batch.num_loops) for batch in device.of(Stage.MIXED)]
    assert loops == [([(1, 0, 6, 1)], 1), ([(1, 0, 6, 2)], 3)]


def test_the_loops_of_a_submission_end_where_the_first_chunk_ends():
    core, device = engine_at_decode(
        params(max_tokens=2, max_loops=3, min_loops=3), mode="mixed", prefill_chunk_size=8
    )
    core.add_request("a", [5] * 6, params(max_tokens=1))
    core.step()
    core.add_request("b", [5] * 3, params(max_tokens=1))
    run(core)
    assert device.stages() == "MM" + "C" + "M" + "C" + "M" + "C"
    loops = [(chunks(batch), batch.num_loops) for batch in device.of(Stage.MIXED)]
    assert loops == [
        ([(1, 0, 6, 1)], 1),
        ([(1, 0, 6, 2), (2, 0, 3, 1)], 1),
        ([(1, 0, 6, 3), (2, 0, 3, 2)], 2),
        ([(2, 0, 3, 4)], 1),
    ]


def test_decode_rows_have_their_place_first_and_prompts_the_rest_of_the_budget():
    core, device = fake_engine(mode="mixed", max_num_batched_tokens=12, prefill_chunk_size=6)
    for i in range(2):
        core.add_request(str(i), [1], params(max_tokens=40))
    while "C" not in device.stages():
        core.step()
    core.add_request("a", [5] * 20, params(max_tokens=1))
    core.add_request("b", [5] * 20, params(max_tokens=1))
    run(core)
    assert chunks(device.of(Stage.MIXED)[0]) == [(2, 0, 6, 1), (3, 0, 4, 1)]
    for batch in device.of(Stage.MIXED):
        assert not batch.rows.size[:2].any() and len(decoding(batch)) == 2
        assert 2 + batch.rows.size.sum() <= 12


def test_short_prompts_join_the_decode_rows_together():
    core, device = engine_at_decode(mode="mixed", max_num_batched_tokens=12)
    for i in range(3):
        core.add_request(str(i), [5] * 4, params(max_tokens=1))
    core.step()
    assert chunks(device.batches[0]) == [(1, 0, 4, 1), (2, 0, 4, 1), (3, 0, 3, 1)]


def test_chunks_that_have_begun_go_before_new_ones():
    core, device = engine_at_decode(mode="mixed", max_num_batched_tokens=9)
    core.add_request("a", [5] * 6, params(max_tokens=1))
    core.step()
    core.add_request("b", [5] * 6, params(max_tokens=1))
    core.step()
    assert chunks(device.batches[1]) == [(1, 0, 6, 2), (2, 0, 2, 1)]


def test_chunks_leave_room_for_decode_rows_that_wait_for_others_to_sample():
    """Else they would not fit beside the chunks' next loops."""
    core, device = fake_engine(mode="mixed", max_num_batched_tokens=12, min_coda_batch_size=2)
    core.add_request("leaves", [1], params(max_tokens=9, min_loops=1, max_loops=1))
    core.add_request("stays", [1], params(max_tokens=9))
    while core.scheduler.stats()["recurrent"] != 1 or core.scheduler.stats()["coda"] != 1:
        core.step()
    start = len(device.batches)
    core.add_request("a", [5] * 20, params(max_tokens=9))
    core.add_request("b", [5] * 20, params(max_tokens=9))
    run(core)
    assert chunks(device.of(Stage.MIXED)[0]) == [(2, 0, 10, 1)]
    assert "P" not in device.stages()[start:]
    for batch in device.of(Stage.MIXED)[:8]:
        assert decoding(batch) and chunks(batch)


def test_a_chunk_holds_no_more_than_its_ceiling():
    core, device = engine_at_decode(mode="mixed", prefill_chunk_size=3)
    core.add_request("a", [5] * 8, params(max_tokens=1))
    run(core)
    sizes = [size for batch in device.of(Stage.MIXED) for _, _, size, _ in chunks(batch)]
    assert sizes == [3] * 4 + [3] * 4 + [2] * 4


def test_a_short_prompt_passes_a_long_one_beside_decode_rows():
    core, _ = engine_at_decode(mode="mixed", prefill_chunk_size=4, max_num_batched_tokens=8)
    core.add_request("long", [5] * 40, params(max_tokens=1))
    core.step()
    core.add_request("short", [5] * 6, params(max_tokens=1))
    assert order_of_ends(core)[:2] == ["short", "long"]


@any_in_flight
@pytest.mark.parametrize("kind", [params, adaptive])
def test_with_no_budget_beside_decode_rows_prompts_take_turns_with_them(kind, max_in_flight):
    core, device = fake_engine(
        mode="mixed", max_num_seqs=3, max_num_batched_tokens=2, max_in_flight=max_in_flight
    )
    for i in range(2):
        core.add_request(str(i), [1], kind(max_tokens=40))
    while not set("TR") & set(device.stages()):
        core.step()
    start = len(device.batches)
    core.add_request("prompt", [5] * 6, kind(max_tokens=1))
    while core.scheduler.find("prompt"):
        core.step()
    stages = device.stages()[start:].replace("C", "")
    assert "PP" not in stages and stages.count("P") == 3
    run(core)
    assert_empty(core)


def test_with_no_budget_beside_decode_rows_a_wave_has_all_of_it_in_its_turn():
    core, device = fake_engine(
        mode="mixed",
        max_num_batched_tokens=4,
        max_num_seqs=5,
        prefill_chunk_size=2,
        wavefront_chunked_prefill=True,
    )
    for i in range(4):
        core.add_request(str(i), [1], params(max_tokens=40))
    while "T" not in device.stages():
        core.step()
    core.add_request("prompt", [5] * 8, params(max_tokens=1))
    run(core)
    waves = [[size for _, _, size, _ in chunks(batch)] for batch in device.of(Stage.MIXED)]
    assert set(map(tuple, waves)) == {(2,), (2, 2)}


def test_a_row_waits_for_no_others_to_sample_where_whole_tokens_bring_none():
    core, device = fake_engine(
        mode="mixed", max_num_batched_tokens=2, min_coda_batch_size=3, max_in_flight=1
    )
    for i in range(2):
        core.add_request(str(i), [1], params(max_tokens=60))
    while "T" not in device.stages():
        core.step()
    core.add_request("short", [5] * 2, params(max_tokens=1))
    core.add_request("long", [5] * 30, params(max_tokens=1))
    while core.scheduler.find("short"):
        core.step()
    assert core.scheduler.stage_of("long") is RequestStage.PREFILL
    run(core)


def test_prompts_wait_for_held_rows_and_go_with_them():
    """A batch of the prompt alone would stream the weights for a part of the rows."""
    core, device = fake_engine(mode="mixed", max_in_flight=3)
    scheduler = core.scheduler
    core.add_request("adaptive", [1], adaptive(max_tokens=30))
    prefill, boundary = scheduler.schedule(), scheduler.schedule()
    assert [row.reads_gate for row in boundary.rows] == [True]
    core.add_request("new", [1, 2, 3], params(max_tokens=30))
    assert scheduler.schedule() is None
    scheduler.update(prefill, device.submit(prefill))
    assert scheduler.schedule() is None
    scheduler.update(boundary, device.submit(boundary))
    batch = scheduler.schedule()
    assert batch.stage is Stage.MIXED
    assert (decoding(batch), chunks(batch)) == ([(0, 1, 2)], [(1, 0, 3, 1)])


def test_prompts_do_not_wait_where_loops_run_ahead_of_their_signals():
    device = FakeDevice(leaves=lambda *_: False, ahead=1)
    core, device = fake_engine(device, mode="mixed", run_ahead=True)
    core.add_request("adaptive", [1], adaptive(max_tokens=30))
    while device.stages() != "PBR":
        core.step()
    core.add_request("new", [1] * 9, params(max_tokens=3))
    run(core)
    assert device.most_in_flight == 2
    assert "MM" in device.stages()


# -- the wavefront -------------------------------------------------------------------------------


@any_in_flight
@any_mode
def test_each_chunk_runs_a_loop_behind_the_one_before_it(mode, max_in_flight):
    core, device = fake_engine(
        mode=mode,
        prefill_chunk_size=2,
        max_num_batched_tokens=16,
        wavefront_chunked_prefill=True,
        max_in_flight=max_in_flight,
    )
    core.add_request("a", [5] * 10, params(max_tokens=1))
    run(core)
    assert device.stages() == "M" * 8 + "C"
    loops = [
        [(position // 2, depth) for _, position, _, depth in chunks(batch)]
        for batch in device.of(Stage.MIXED)
    ]
    assert loops == [
        [(0, 1)],
        [(0, 2), (1, 1)],
        [(0, 3), (1, 2), (2, 1)],
        [(0, 4), (1, 3), (2, 2), (3, 1)],
        [(1, 4), (2, 3), (3, 2), (4, 1)],
        [(2, 4), (3, 3), (4, 2)],
        [(3, 4), (4, 3)],
        [(4, 4)],
    ]


def test_chunks_go_around_their_ring():
    core, device = fake_engine(
        prefill_chunk_size=2, max_num_batched_tokens=16, wavefront_chunked_prefill=True
    )
    core.add_request("a", [5] * 16, params(max_tokens=1))
    run(core)
    places = {}
    for batch in device.of(Stage.MIXED):
        places |= windows(batch)
    assert places == {(0, 2 * k): k % FULL_DEPTH * 2 for k in range(8)}


def test_prompts_have_places_of_their_own_and_give_them_back():
    core, device = fake_engine(
        prefill_chunk_size=4, max_num_batched_tokens=16, wavefront_chunked_prefill=True
    )
    for i in range(2):
        core.add_request(str(i), [5] * 17, params(max_tokens=1))
    run(core)
    for batch in device.of(Stage.MIXED):
        rows = [place + i for row in batch.rows for place in [row.window] for i in range(row.size)]
        assert len(set(rows)) == len(rows) and max(rows) < FULL_DEPTH * 16
    core.add_request("next", [5] * 9, params(max_tokens=1))
    start = len(device.batches)
    run(core)
    assert windows(device.batches[start]) == {(2, 0): 0}
    assert_empty(core)


def test_where_a_chunk_of_each_prompt_fills_the_budget_none_runs_two():
    core, device = engine_at_decode(
        mode="mixed",
        prefill_chunk_size=4,
        max_num_batched_tokens=8,
        wavefront_chunked_prefill=True,
    )
    for i in range(3):
        core.add_request(str(i), [5] * 12, params(max_tokens=1))
    run(core)
    crowded = [chunks(batch) for batch in device.of(Stage.MIXED)[:20]]
    for rows in crowded:
        assert len({generation for generation, *_ in rows}) == len(rows)
    assert {generation for rows in crowded for generation, *_ in rows} == {1, 2, 3}
    assert_empty(core)


def test_a_chunk_has_the_first_rows_that_are_free():
    staging = Staging(num_rows=8, full_depth=2)
    assert [staging.start(slot, Part(0, 3, False)) for slot in (0, 1)] == [0, 3]
    assert staging.start(2, Part(0, 3, False)) is None
    assert len(staging) == 2 and not staging.chunks_of(2)
    assert staging.start(2, Part(0, 2, False)) == 6
    staging.advance(0, position=0, num_loops=2)
    assert staging.start(1, Part(3, 2, False)) == 0
    staging.drop(1)
    assert staging.start(3, Part(0, 6, False)) == 0


def test_the_wavefront_takes_turns_with_decode_batches_in_refill():
    core, device = engine_at_decode(
        adaptive(max_tokens=40), prefill_chunk_size=2, wavefront_chunked_prefill=True
    )
    core.add_request("prompt", [5] * 8, params(max_tokens=1))
    while core.scheduler.find("prompt"):
        core.step()
    stages = device.stages().replace("C", "")
    assert stages.count("M") == 7 and "MM" not in stages
    for batch in device.of(Stage.MIXED):
        assert not decoding(batch) and batch.num_loops == 1


def test_the_wavefront_and_decode_rows_share_batches_in_mixed():
    core, device = engine_at_decode(
        mode="mixed", prefill_chunk_size=2, wavefront_chunked_prefill=True
    )
    core.add_request("prompt", [5] * 8, params(max_tokens=1))
    run(core)
    together = device.of(Stage.MIXED)
    assert [len(decoding(batch)) for batch in together] == [1] * 7
    assert [len(chunks(batch)) for batch in together] == [1, 2, 3, 4, 3, 2, 1]


def test_prompts_of_one_chunk_need_no_wavefront():
    core, device = fake_engine(prefill_chunk_size=8, wavefront_chunked_prefill=True)
    core.add_request("a", [5] * 8, params(max_tokens=1))
    core.add_request("b", [5] * 3, params(max_tokens=1))
    run(core)
    assert device.stages() == "PC"


def test_without_more_chunks_to_join_the_wave_runs_several_loops_at_once():
    core, device = fake_engine(prefill_chunk_size=4, wavefront_chunked_prefill=True)
    core.add_request("a", [5] * 8, params(max_tokens=1))
    run(core)
    loops = [(chunks(batch), batch.num_loops) for batch in device.of(Stage.MIXED)]
    assert loops == [
        ([(0, 0, 4, 1)], 1),
        ([(0, 0, 4, 2), (0, 4, 4, 1)], 3),
        ([(0, 4, 4, 4)], 1),
    ]


def test_a_short_prompt_passes_a_long_one_in_the_wavefront():
    core, _ = fake_engine(
        prefill_chunk_size=4, max_num_batched_tokens=8, wavefront_chunked_prefill=True
    )
    core.add_request("long", [5] * 60, params(max_tokens=1))
    core.step()
    core.add_request("short", [5] * 6, params(max_tokens=1))
    assert order_of_ends(core) == ["short", "long"]


# -- requests that end in between ----------------------------------------------------------------


@any_in_flight
@any_mode
@pytest.mark.parametrize("batches", range(1, 8))
def test_an_abort_in_the_middle_of_a_wave_gives_everything_back(batches, mode, max_in_flight):
    core, device = fake_engine(
        mode=mode,
        prefill_chunk_size=4,
        max_num_batched_tokens=16,
        wavefront_chunked_prefill=True,
        max_in_flight=max_in_flight,
    )
    core.add_request("a", [5] * 20, params(max_tokens=1))
    core.add_request("b", [5] * 20, params(max_tokens=1))
    while len(device.batches) < batches:
        core.step()
    assert core.scheduler.stats()["staged"] == 2
    core.abort_request("a")
    assert core.scheduler.stats()["staged"] == 1  # at once: programs run in their order
    outputs = run(core)
    assert outputs["a"].finish_reason == "abort"
    assert outputs["b"].token_ids == (TOKEN,)
    assert_empty(core)
    core.add_request("c", [5] * 20, params(max_tokens=1))
    core.add_request("d", [5] * 20, params(max_tokens=1))
    assert {name: output.token_ids for name, output in run(core).items()} == {
        "c": (TOKEN,),
        "d": (TOKEN,),
    }
    assert_empty(core)
