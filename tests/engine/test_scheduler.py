"""Which batches are made, in which order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_jax.config import ExitConfig
from rlt_jax.engine.types import SHARED_PREFILL_TOKENS, BatchError, Stage
from rlt_jax.sampling_params import SamplingParams
from tests.engine.fake_device import FULL_DEPTH, TOKEN, FakeDevice, assert_empty, fake_engine, run

any_in_flight = pytest.mark.parametrize("max_in_flight", [1, 2, 3])


def params(max_tokens=2, **fields):
    return SamplingParams(max_tokens=max_tokens, **fields)


def adaptive(max_tokens=2, **fields):
    """Hazards of 0.5 give 0.5, 0.75, 0.875: exit at depth 2."""
    return params(max_tokens, **{"exit_threshold": 0.7, "min_loops": 1, **fields})


def names(device):
    """The generations in each batch."""
    return [[row.generation for row in batch.rows] for batch in device.batches]


# -- one request -------------------------------------------------------------------------------


@any_in_flight
def test_a_full_depth_request_runs_whole_tokens(max_in_flight):
    core, device = fake_engine(max_in_flight=max_in_flight)
    core.add_request("a", [1, 2, 3], params(max_tokens=4))
    output = run(core)["a"]
    assert device.stages() == "PC" + "T" * 3
    assert (output.token_ids, output.exit_depths) == ((TOKEN,) * 4, (4,) * 4)
    assert output.finish_reason == "length"
    assert device.most_in_flight == max_in_flight


@any_in_flight
def test_an_adaptive_request_ends_each_token_in_a_boundary_batch(max_in_flight):
    core, device = fake_engine(max_in_flight=max_in_flight)
    core.add_request("a", [1], adaptive(max_tokens=4))
    assert run(core)["a"].exit_depths == (4, 2, 2, 2)
    assert device.stages() == "P" + "BR" * 3 + "C"  # the last token is not fed back


@any_in_flight
@pytest.mark.parametrize(
    ("loops", "stages"), [(1, "PBBBC"), (2, "PBRBRBRC"), (3, "PBRRBRRBRRC"), (4, "PCTTT")]
)
def test_a_fixed_depth_request_never_waits_for_a_gate(loops, stages, max_in_flight):
    core, device = fake_engine(max_in_flight=max_in_flight)
    core.add_request("a", [1], params(max_tokens=4, min_loops=1, max_loops=loops))
    assert run(core)["a"].exit_depths == (4, loops, loops, loops)
    assert device.stages() == stages
    assert device.most_in_flight == max_in_flight
    assert not any(batch.reads_gate for batch in device.batches)


@pytest.mark.parametrize("fields", [{}, {"exit_threshold": 0.7, "min_loops": 1}], ids=str)
def test_positions_are_prompt_plus_max_tokens_minus_one(fields):
    core, device = fake_engine()
    core.add_request("a", [1, 2, 3], params(max_tokens=3, **fields))
    run(core)
    codas = [row for batch in device.batches for row in batch.rows if row.exit_depth]
    assert [row.position for row in codas] == [2, 3, 4]
    assert [row.output_index for row in codas] == [0, 1, 2]
    last = max(row.position for batch in device.batches for row in batch.rows)
    assert last + 1 == 3 + 3 - 1


def test_loop_bounds_do_not_shorten_the_prompt():
    core, device = fake_engine()
    core.add_request("a", [1], params(max_loops=1))
    assert run(core)["a"].exit_depths == (4, 1)
    assert device.batches[0].rows[0].depth == FULL_DEPTH


def test_a_request_of_one_token_runs_no_loop_of_its_own():
    core, device = fake_engine()
    core.add_request("a", [1], adaptive(max_tokens=1))
    run(core)
    assert device.stages() == "PC"


# -- several requests --------------------------------------------------------------------------


@any_in_flight
def test_refill_mixes_depths_in_one_batch(max_in_flight):
    core, device = fake_engine(max_in_flight=max_in_flight)
    core.add_request("a", [1], adaptive(max_tokens=9, exit_threshold=0.8))  # 3 loops a token
    core.add_request("b", [1], adaptive(max_tokens=9))
    run(core)
    exits = {"coda": 0, "loop": 0}
    for batch in device.of(Stage.BOUNDARY):
        exits["coda"] += any(row.exit_depth for row in batch.rows)
        exits["loop"] += any(row.depth > 1 for row in batch.rows)
    assert exits["coda"] == len(device.of(Stage.BOUNDARY)) and exits["loop"] > 5


@any_in_flight
def test_adaptive_and_full_depth_requests_share_loops_until_the_adaptive_one_ends(max_in_flight):
    core, device = fake_engine(max_in_flight=max_in_flight)
    core.add_request("adaptive", [1], adaptive(max_tokens=4))
    core.add_request("fixed", [1], params(max_tokens=6))
    outputs = run(core)
    assert outputs["adaptive"].exit_depths == (4, 2, 2, 2)
    assert outputs["fixed"].exit_depths == (4,) * 6
    # The fixed one then ends its token, and whole tokens begin.
    assert device.stages() == "P" + "BR" * 3 + "C" + "RRC" + "TTT"
    loops = [{row.generation: row.depth for row in batch.rows} for batch in device.batches]
    assert loops[1:7] == [{0: a, 1: b} for a, b in ((1, 1), (2, 2), (1, 3), (2, 4), (1, 1), (2, 2))]
    assert loops[7:] == [{0: 0}, {1: 3}, {1: 4}, {1: 0}, {1: 4}, {1: 4}, {1: 4}]
    gates = {row.generation for batch in device.batches for row in batch.rows if row.reads_gate}
    assert gates == {0}


@any_in_flight
def test_full_depth_requests_out_of_step_meet_again_at_the_start_of_a_token(max_in_flight):
    core, device = fake_engine(max_in_flight=max_in_flight)
    core.add_request("adaptive", [1], adaptive(max_tokens=3, exit_threshold=0.4))  # 1 loop
    core.add_request("a", [1], params(max_tokens=9))
    while device.stages() != "PBB":
        core.step()  # a has run two loops
    core.add_request("b", [1], params(max_tokens=9))
    outputs = run(core)
    assert all(output.finish_reason == "length" for output in outputs.values())
    # adaptive ends; b is prefilled and waits at its first token's start for a's last two loops.
    assert device.stages() == "PBB" + "CPC" + "RRC" + "T" * 8
    assert names(device)[3:10] == [[0], [2], [2], [1], [1], [1], [2, 1]]


@pytest.mark.parametrize("mode", ["refill", "no_refill"])
def test_more_full_depth_rows_than_fit_beside_one_in_the_middle_make_no_empty_batch(mode):
    """max_num_batched_tokens below max_num_seqs: the queue is longer than a batch."""
    core, device = fake_engine(mode=mode, max_num_seqs=6, max_num_batched_tokens=3)
    core.add_request("adaptive", [1], adaptive(max_tokens=7))
    for i in range(6):
        core.add_request(str(i), [1], params(max_tokens=5 + i % 2))
    outputs = run(core)  # the fake device refuses empty batches
    assert all(output.finish_reason == "length" for output in outputs.values())
    assert max(len(batch.rows) for batch in device.batches) == 3
    assert device.of(Stage.TOKENS)


@any_in_flight
def test_no_refill_never_mixes_depths_and_empties_before_it_fills(max_in_flight):
    core, device = fake_engine(mode="no_refill", max_num_seqs=2, max_in_flight=max_in_flight)
    for name in "abc":
        core.add_request(name, [1], adaptive(max_tokens=3))
    run(core)
    for batch in device.batches:
        assert len({row.depth for row in batch.rows}) == 1
    # a and b run to their end before c gets the slot; C samples both at once.
    assert device.stages() == "PC" + "RRC" * 2 + "PC" + "RRC" * 2
    assert [len(batch.rows) for batch in device.of(Stage.CODA)] == [2, 2, 2, 1, 1, 1]


@any_in_flight
def test_no_refill_runs_whole_tokens_when_all_rows_do(max_in_flight):
    core, device = fake_engine(mode="no_refill", max_num_seqs=2, max_in_flight=max_in_flight)
    for name in "abc":
        core.add_request(name, [1], params(max_tokens=3))
    run(core)
    assert device.stages() == "PCTT" * 2
    core.add_request("a", [1], params(max_tokens=9))
    while not device.stages()[8:].endswith("T"):
        core.step()
    core.add_request("b", [1], params(max_tokens=3))
    run(core)
    alone, together = device.stages()[8:].split("PTC")  # between two tokens, not after the last
    assert alone.startswith("PC") and set(alone[2:]) | set(together) == {"T"}
    assert len(alone[2:]) + 1 + len(together) == 8 and len(together) >= 2
    core, device = fake_engine(mode="no_refill", max_num_seqs=2, max_in_flight=max_in_flight)
    core.add_request("a", [1], adaptive(max_tokens=2))
    core.add_request("b", [1], params(max_tokens=3))
    run(core)
    # The adaptive row waits in the coda phase until the other one has run all its loops.
    assert device.stages() == "PC" + "RRRRC" + "T"
    assert [len(batch.rows) for batch in device.of(Stage.CODA)] == [2, 2]


def test_refill_replaces_a_finished_request_at_once():
    core, _ = fake_engine(max_num_seqs=2)
    core.add_request("short", [1], params(max_tokens=1))
    core.add_request("long", [1], params(max_tokens=9))
    core.add_request("next", [1], params(max_tokens=1))
    done = {}
    for step in range(200):
        for output in core.step():
            if output.finished:
                done[output.request_id] = step
    assert done["next"] < done["long"]


# -- prefill and decode ------------------------------------------------------------------------


@any_in_flight
@pytest.mark.parametrize("kind", [params, adaptive])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_decode_runs_after_the_allowed_prefill_batches(kind, limit, max_in_flight):
    core, device = fake_engine(
        max_prefill_batches_before_decode=limit, prefill_chunk_size=4, max_in_flight=max_in_flight
    )
    core.add_request("a", [1], kind(max_tokens=20))
    while len(device.batches) < 4:
        core.step()
    core.add_request("b", list(range(40)), params(max_tokens=1))
    start = len(device.batches)
    run(core)
    stages = device.stages()[start:].replace("C", "")
    assert "P" * limit in stages
    assert "P" * (limit + 1) not in stages


def test_rows_that_exit_sample_alone_before_a_prefill():
    """A boundary batch would make the new prompt wait for a loop."""
    core, device = fake_engine(max_in_flight=1)
    core.add_request("a", [1], adaptive(max_tokens=4))
    while device.stages() != "PBR":
        core.step()  # it exits
    core.add_request("b", [1], adaptive(max_tokens=1))
    run(core)
    assert device.stages() == "PBR" + "CP" + "BRBRC"
    assert names(device)[3:6] == [[0], [1], [0, 1]]


@pytest.mark.parametrize(("max_in_flight", "beside"), [(1, 0), (2, 1), (3, 2), (4, 2)])
def test_held_rows_make_decode_wait_and_let_a_prefill_in_between(max_in_flight, beside):
    """A decode batch would run the weights for the other rows only: the fake device refuses it."""
    core, device = fake_engine(
        max_in_flight=max_in_flight, max_prefill_batches_before_decode=2, prefill_chunk_size=2
    )
    core.add_request("adaptive", [1], adaptive(max_tokens=30))
    core.add_request("fixed", [1], params(max_tokens=30))
    core.add_request("long", list(range(40)), params(max_tokens=1))
    in_between = []
    submit = device.submit

    def watched(batch):
        gates = [other.reads_gate for other in device.in_flight]
        if any(gates):
            in_between.append(gates[::-1].index(True) + 1)
        return submit(batch)

    device.submit = watched
    run(core)
    assert max(in_between, default=0) == beside


def test_nothing_but_a_prefill_runs_while_a_gate_is_awaited():
    core, device = fake_engine(max_in_flight=3)
    scheduler = core.scheduler
    core.add_request("adaptive", [1], adaptive(max_tokens=30))
    core.add_request("fixed", [1], params(max_tokens=30))
    prefill, boundary = scheduler.schedule(), scheduler.schedule()
    assert (prefill.stage, boundary.stage) == (Stage.PREFILL, Stage.BOUNDARY)
    assert [row.reads_gate for row in boundary.rows] == [True, False]
    assert scheduler.schedule() is None  # the fixed row could run, but alone
    core.add_request("new", [1, 2, 3], params(max_tokens=30))
    assert scheduler.schedule().stage is Stage.PREFILL
    core.add_request("newer", [1, 2, 3], params(max_tokens=30))
    assert scheduler.schedule() is None  # one prefill before decode by default
    scheduler.update(prefill, device.submit(prefill))
    assert scheduler.schedule() is None
    scheduler.update(boundary, device.submit(boundary))
    assert len(scheduler.schedule().rows) == 3


def test_coda_waits_for_enough_rows_while_others_can_run():
    core, device = fake_engine(min_coda_batch_size=2)
    core.add_request("a", [1], params(max_tokens=4, exit_threshold=0.0, min_loops=1))
    core.add_request("b", [1], adaptive(max_tokens=4, exit_threshold=0.95))
    run(core)
    together = [sum(row.exit_depth > 0 for row in batch.rows) for batch in device.batches]
    assert [count for count in together if count] == [2, 2, 2, 2]
    assert device.stages() == "PBRRR" + "BRRR" * 2 + "C"


@any_in_flight
@pytest.mark.parametrize("loops", [1, 4])
def test_where_not_all_rows_fit_none_is_passed_over(loops, max_in_flight):
    """A crowd whose every loop ends a token comes back to the coda again and again."""
    core, device = fake_engine(
        max_num_seqs=6, max_num_batched_tokens=2, max_in_flight=max_in_flight
    )
    core.add_request("deep", [1], adaptive(max_tokens=99, min_loops=loops, max_loops=loops))
    for i in range(5):
        core.add_request(str(i), [1], params(max_tokens=99, min_loops=1, max_loops=1))
    for _ in range(200):
        core.step()
    last_seen = dict.fromkeys(range(6), 0)
    for n, batch in enumerate(device.batches[60:]):
        for row in batch.rows:
            assert n - last_seen[row.generation] <= 4, f"{row.generation} waits"
            last_seen[row.generation] = n
    assert min(last_seen.values()) > n - 5
    for batch in device.of(Stage.BOUNDARY):
        assert any(row.exit_depth for row in batch.rows)


@any_in_flight
def test_a_first_token_does_not_wait_for_the_end_of_requests_that_run_whole_tokens(max_in_flight):
    """Those never come to the coda, however many rows it would like to gather."""
    core, device = fake_engine(min_coda_batch_size=3, max_in_flight=max_in_flight)
    core.add_request("a", [1], params(max_tokens=60))
    while not device.stages().endswith("TT"):
        core.step()
    start = len(device.batches)
    core.add_request("b", [1], adaptive(max_tokens=3))
    core.add_request("c", [1], params(max_tokens=9))
    run(core)
    assert device.stages()[start:].lstrip("T").startswith("PB")
    assert len(device.of(Stage.TOKENS)) < 60


def test_prompts_are_chunked_within_the_budget_and_the_chunk_size():
    core, device = fake_engine(max_num_batched_tokens=10, prefill_chunk_size=7)
    core.add_request("a", list(range(20)), params())
    core.add_request("b", list(range(5)), params())
    run(core)
    prefills = [batch.rows for batch in device.of(Stage.PREFILL)]
    assert all(sum(len(row.tokens) for row in rows) <= 10 for rows in prefills)
    assert all(len(row.tokens) <= 7 for rows in prefills for row in rows)
    tokens = {}
    for row in (row for rows in prefills for row in rows):
        assert row.position == len(tokens.setdefault(row.generation, []))
        tokens[row.generation] += row.tokens
        assert row.ends_prompt == (len(tokens[row.generation]) == (20, 5)[row.generation])
    assert tokens == {0: list(range(20)), 1: list(range(5))}


@any_in_flight
def test_chunks_of_a_prompt_are_in_flight_at_once(max_in_flight):
    core, device = fake_engine(prefill_chunk_size=4, max_in_flight=max_in_flight)
    core.add_request("a", list(range(40)), params(max_tokens=1))
    core.step()
    assert device.stages() == "P" * max_in_flight
    assert run(core)["a"].token_ids == (TOKEN,)


def test_shared_prompts_advance_at_most_a_tile_per_batch():
    core, device = fake_engine(planes=1, max_num_batched_tokens=64)
    core.add_request("a", list(range(40)), params())
    run(core)
    sizes = [len(batch.rows[0].tokens) for batch in device.of(Stage.PREFILL)]
    assert sizes == [SHARED_PREFILL_TOKENS, SHARED_PREFILL_TOKENS, 40 - 2 * SHARED_PREFILL_TOKENS]


def test_batches_hold_at_most_max_num_seqs_and_the_budget_rows():
    core, device = fake_engine(max_num_seqs=4, max_num_batched_tokens=3)
    for i in range(7):
        core.add_request(str(i), [1, 2], params(max_tokens=5))
    outputs = run(core)
    assert max(len(batch.rows) for batch in device.batches) == 3
    assert all(len(output.token_ids) == 5 for output in outputs.values())


def test_admission_reserves_everything_and_keeps_the_order():
    core, _ = fake_engine(num_pages=6)
    core.add_request("a", [1] * 9, params(max_tokens=8))  # 16 positions: 4 pages
    core.add_request("b", [1] * 9, params(max_tokens=8))
    core.add_request("c", [1], params(max_tokens=1))  # would fit, but came later
    core.step()
    stats = core.scheduler.stats()
    assert (stats["running"], stats["waiting"], stats["free_blocks"]) == (1, 2, 2 * 4)
    run(core)
    assert core.scheduler.stats()["free_blocks"] == 6 * 4


# -- several tokens a dispatch -----------------------------------------------------------------


@any_in_flight
@pytest.mark.parametrize(
    ("max_tokens", "at_once", "sizes"),
    [
        (10, 4, [4, 4, 1]),  # the first output comes from the prompt
        (9, 4, [4, 4]),
        (8, 4, [4, 1, 1, 1]),
        (4, 4, [1, 1, 1]),
        (8, 2, [2, 2, 2, 1]),
        (3, 1, [1, 1]),
    ],
)
def test_several_tokens_run_in_one_dispatch_while_every_row_has_them_left(
    max_tokens, at_once, sizes, max_in_flight
):
    core, device = fake_engine(tokens_per_dispatch=at_once, max_in_flight=max_in_flight)
    core.add_request("a", [1, 2], params(max_tokens=max_tokens))
    output = run(core)["a"]
    assert (output.token_ids, output.finish_reason) == ((TOKEN,) * max_tokens, "length")
    assert output.exit_depths == (FULL_DEPTH,) * max_tokens
    assert [batch.num_tokens for batch in device.of(Stage.TOKENS)] == sizes


def test_the_row_with_the_fewest_tokens_left_decides_for_all():
    core, device = fake_engine(tokens_per_dispatch=4)
    core.add_request("short", [1], params(max_tokens=3))
    core.add_request("long", [1], params(max_tokens=12))
    run(core)
    tokens = device.of(Stage.TOKENS)
    assert [(len(batch.rows), batch.num_tokens) for batch in tokens] == [
        (2, 1),
        (2, 1),
        (1, 4),
        (1, 4),
        (1, 1),
    ]


def test_sampling_rows_run_token_by_token():
    core, device = fake_engine(tokens_per_dispatch=4)
    core.add_request("sampling", [1], params(max_tokens=6, temperature=0.5))
    core.add_request("greedy", [1], params(max_tokens=11))
    run(core)
    batches = [(batch.samples, batch.num_tokens) for batch in device.of(Stage.TOKENS)]
    assert batches == [(True, 1)] * 5 + [(False, 4), (False, 1)]


def test_adaptive_rows_run_token_by_token():
    core, device = fake_engine(tokens_per_dispatch=4)
    core.add_request("a", [1], adaptive(max_tokens=9))
    core.add_request("b", [1], params(max_tokens=3))
    run(core)
    assert {batch.num_tokens for batch in device.batches} == {1}
    assert not device.of(Stage.TOKENS)


@any_in_flight
@pytest.mark.parametrize("stop", range(1, 9))
def test_a_stop_id_inside_a_batch_of_tokens_ends_the_request_there(stop, max_in_flight):
    device = FakeDevice(token=lambda _, index: 11 if index == stop else TOKEN)
    core, device = fake_engine(device, tokens_per_dispatch=4, max_in_flight=max_in_flight)
    core.add_request("a", [1], params(max_tokens=30, stop_token_ids=(11,)))
    output = run(core)["a"]
    assert output.token_ids == (TOKEN,) * stop + (11,)
    assert len(output.exit_depths) == stop + 1
    assert output.finish_reason == "stop"
    assert {batch.num_tokens for batch in device.of(Stage.TOKENS)} == {4}
    assert_empty(core)


# -- gates and traces --------------------------------------------------------------------------


def test_only_rows_that_need_the_gate_read_it():
    core, device = fake_engine()
    core.add_request("fixed", [1], params(max_tokens=3))
    run(core)
    assert not any(batch.reads_gate for batch in device.batches)
    core.add_request("adaptive", [1], params(max_tokens=3, exit_threshold=0.9))
    core.add_request("fixed", [1], params(max_tokens=3))
    run(core)
    rows = [row for batch in device.batches for row in batch.rows]
    assert {row.generation for row in rows if row.reads_gate} == {1}
    # At max_loops it exits whatever the gate says.
    assert {row.depth for row in rows if row.generation == 1 and not row.reads_gate} == {0, 4}


@any_in_flight
def test_trace_mode_replays_depths_without_the_gate(max_in_flight):
    recorded = {"a": [4, 2, 3, 1], "b": [4, 1, 1], "c": [4, 4, 4, 4]}
    core, device = fake_engine(
        exit_config=ExitConfig(mode="trace", depths_by_request=recorded),
        max_in_flight=max_in_flight,
    )
    core.add_request("a", [1], params(max_tokens=4, min_loops=1))
    core.add_request("b", [1], params(max_tokens=3, min_loops=1, exit_threshold=0.1))
    outputs = run(core)
    assert outputs["a"].exit_depths == (4, 2, 3, 1)
    assert outputs["b"].exit_depths == (4, 1, 1)
    assert not any(batch.reads_gate for batch in device.batches)
    assert device.most_in_flight == max_in_flight
    before = len(device.batches)
    core.add_request("c", [1], params(max_tokens=4, exit_threshold=0.1))
    assert run(core)["c"].exit_depths == (4, 4, 4, 4)
    assert device.stages()[before:] == "PCTTT"  # known to be at full depth


# -- how requests end --------------------------------------------------------------------------


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
            "mode": st.sampled_from(["refill", "no_refill"]),
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
