"""Which batches are made, in which order."""

import pytest

from rlt_jax.config import ExitConfig
from rlt_jax.engine.types import PREFILL_TILE, Stage
from rlt_jax.sampling_params import SamplingParams
from tests.engine.fake_device import TOKEN, fake_engine, run


def params(max_tokens=2, **fields):
    return SamplingParams(max_tokens=max_tokens, **fields)


def test_one_request_runs_stage_by_stage():
    core, device = fake_engine()
    core.add_request("a", [1, 2, 3], params(max_tokens=3))
    output = run(core)["a"]
    assert device.stages() == "PC" + "LRRRRC" * 2
    assert (output.token_ids, output.exit_depths) == ((TOKEN,) * 3, (4, 4, 4))
    assert output.finish_reason == "length"


def test_positions_are_prompt_plus_max_tokens_minus_one():
    core, device = fake_engine()
    core.add_request("a", [1, 2, 3], params(max_tokens=3))
    run(core)
    coda = [batch.rows[0] for batch in device.batches if batch.stage is Stage.CODA]
    assert [row.position for row in coda] == [2, 3, 4]
    assert [row.output_index for row in coda] == [0, 1, 2]
    last = max(row.position for batch in device.batches for row in batch.rows)
    assert last + 1 == 3 + 3 - 1


def test_adaptive_exit_frees_the_row_early():
    core, device = fake_engine()  # hazards 0.5: 0.5, 0.75, 0.875
    core.add_request("a", [1], params(exit_threshold=0.7, min_loops=1))
    assert run(core)["a"].exit_depths == (4, 2)
    assert device.stages() == "PCLRRC"


def test_loop_bounds_do_not_shorten_the_prompt():
    core, device = fake_engine()
    core.add_request("a", [1], params(max_loops=1))
    assert run(core)["a"].exit_depths == (4, 1)
    assert device.batches[0].rows[0].depth == 4


def test_refill_mixes_depths_in_one_recurrent_batch():
    core, device = fake_engine()
    core.add_request("a", [1], params(max_tokens=9))
    for _ in range(5):
        core.step()
    core.add_request("b", [1], params(max_tokens=9))
    run(core)
    depths = [{row.depth for row in b.rows} for b in device.batches if b.stage is Stage.RECURRENT]
    assert any(len(d) > 1 for d in depths)


def test_no_refill_never_mixes_depths_and_empties_before_it_fills():
    core, device = fake_engine(mode="no_refill", max_num_seqs=2)
    for name in "abc":
        core.add_request(name, [1], params(max_tokens=3))
    run(core)
    for batch in device.batches:
        if batch.stage is Stage.RECURRENT:
            assert len({row.depth for row in batch.rows}) == 1
    # a and b run to their end before c gets the slot; C samples both at once.
    assert device.stages() == "PC" + "LRRRRC" * 2 + "PC" + "LRRRRC" * 2
    assert [len(b.rows) for b in device.batches if b.stage is Stage.CODA] == [2, 2, 2, 1, 1, 1]


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


def test_decode_runs_after_the_allowed_prefill_batches():
    core, device = fake_engine(max_prefill_batches_before_decode=2, prefill_chunk_size=4)
    core.add_request("a", [1], params(max_tokens=20))
    for _ in range(3):
        core.step()  # prefill, coda, prelude: a is recurrent now
    core.add_request("b", list(range(40)), params(max_tokens=1))
    start = len(device.batches)
    for _ in range(30):
        core.step()
    stages = device.stages()[start:]
    assert "PPP" not in stages.replace("C", "").replace("L", "")
    assert "PP" in stages


def test_coda_waits_for_enough_rows_while_others_can_run():
    core, device = fake_engine(min_coda_batch_size=2, exit_config=None)
    core.add_request("a", [1], params(max_tokens=4, exit_threshold=0.0, min_loops=1))
    core.add_request("b", [1], params(max_tokens=4))
    run(core)
    waiting = [len(batch.rows) for batch in device.batches if batch.stage is Stage.CODA]
    # alone only at the very end, when nothing else can run
    assert waiting[:4] == [2, 2, 2, 2]


def test_prompts_are_chunked_within_the_budget_and_the_chunk_size():
    core, device = fake_engine(max_num_batched_tokens=10, prefill_chunk_size=7)
    core.add_request("a", list(range(20)), params())
    core.add_request("b", list(range(5)), params())
    run(core)
    prefills = [batch.rows for batch in device.batches if batch.stage is Stage.PREFILL]
    assert all(sum(len(row.tokens) for row in rows) <= 10 for rows in prefills)
    assert all(len(row.tokens) <= 7 for rows in prefills for row in rows)
    tokens = {}
    for row in (row for rows in prefills for row in rows):
        assert row.position == len(tokens.setdefault(row.generation, []))
        tokens[row.generation] += row.tokens
        assert row.ends_prompt == (len(tokens[row.generation]) == (20, 5)[row.generation])
    assert tokens == {0: list(range(20)), 1: list(range(5))}


def test_shared_prompts_advance_at_most_a_tile_per_batch():
    core, device = fake_engine(planes=1, max_num_batched_tokens=64)
    core.add_request("a", list(range(40)), params())
    run(core)
    sizes = [len(b.rows[0].tokens) for b in device.batches if b.stage is Stage.PREFILL]
    assert sizes == [PREFILL_TILE, PREFILL_TILE, 40 - 2 * PREFILL_TILE]


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


def test_only_batches_with_an_adaptive_row_read_the_gate():
    core, device = fake_engine()
    core.add_request("fixed", [1], params(max_tokens=3))
    run(core)
    assert not any(batch.reads_gate for batch in device.batches)
    core.add_request("adaptive", [1], params(max_tokens=3, exit_threshold=0.9))
    run(core)
    assert any(batch.reads_gate for batch in device.batches)


def test_trace_mode_replays_depths_without_the_gate():
    recorded = {"a": [4, 2, 3, 1], "b": [4, 1, 1]}
    core, device = fake_engine(exit_config=ExitConfig(mode="trace", depths_by_request=recorded))
    core.add_request("a", [1], params(max_tokens=4, min_loops=1))
    core.add_request("b", [1], params(max_tokens=3, min_loops=1, exit_threshold=0.1))
    outputs = run(core)
    assert outputs["a"].exit_depths == (4, 2, 3, 1)
    assert outputs["b"].exit_depths == (4, 1, 1)
    assert not any(batch.reads_gate for batch in device.batches)


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
def test_what_ends_a_request(fields, eos, count, reason):
    core, _ = fake_engine(eos_token_ids=eos)
    core.add_request("a", [1], params(max_tokens=5, **fields))
    output = run(core)["a"]
    assert (len(output.token_ids), output.finish_reason) == (count, reason)


def test_slot_updates_come_once_per_request_with_its_table():
    core, device = fake_engine(max_num_seqs=1)
    core.add_request("a", [1], params(temperature=0.5, seed=2**63 - 1))
    core.add_request("b", [1], params())
    run(core)
    updates = [update for batch in device.batches for update in batch.slot_updates]
    assert [update.temperature for update in updates] == [0.5, 0.0]
    assert updates[0].seed == 2**63 - 1
    assert [batch.samples for batch in device.batches if batch.stage is Stage.CODA] == [
        True,
        True,
        False,
        False,
    ]


def test_late_results_never_touch_a_request_that_reuses_an_id():
    core, device = fake_engine()
    scheduler = core.scheduler
    core.add_request("a", [1], params(max_tokens=1))
    core.step()
    batch = scheduler.schedule()  # coda in flight
    result = device.collect(batch)
    core.abort_request("a")
    assert scheduler.stats()["free_blocks"] < scheduler.stats()["total_blocks"]
    core.add_request("a", [2], params(max_tokens=1))
    assert scheduler.update(batch, result) == []
    assert scheduler.stats()["free_blocks"] == scheduler.stats()["total_blocks"]
    outputs = [output for output in core.step() if output.request_id == "a"]
    assert [output.finish_reason for output in outputs] == ["abort"]
    assert run(core)["a"].token_ids == (TOKEN,)


def test_metrics_are_filled_in_as_they_become_known():
    core, _ = fake_engine()
    core.add_request("a", [1], params(max_tokens=3))
    outputs = [output for _ in range(20) for output in core.step()]
    first, last = outputs[0].metrics, outputs[-1].metrics
    assert 0 <= first.queue_time <= first.time_to_first_token
    assert first.time_per_output_token is None
    assert last.time_per_output_token > 0
