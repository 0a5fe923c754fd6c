"""Which batches are made, in which order."""

import pytest

from rlt_jax.config import ExitConfig
from rlt_jax.engine.types import SHARED_PREFILL_TOKENS, Stage
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


def test_admission_reserves_everything_and_keeps_the_order_where_nobody_may_overtake():
    core, _ = fake_engine(num_pages=6, max_admission_bypasses=0)
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


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_model_of_many_loops_waits_for_every_signal(run_ahead, monkeypatch):
    monkeypatch.setattr("tests.engine.fake_device.FULL_DEPTH", 70)
    device = FakeDevice(
        hazard=lambda generation, position, depth: float(depth >= 65),
        leaves=(lambda generation, position, depth: depth >= 65) if run_ahead else None,
        ahead=int(run_ahead),
    )
    core, _ = fake_engine(device, planes=70, run_ahead=run_ahead)
    core.add_request("a", [1], adaptive(max_tokens=3))
    assert run(core)["a"].exit_depths == (70, 65, 65)
    assert_empty(core)
