"""Blocks that requests get one page at a time, as their tokens come to them."""

import pytest

from rlt_jax.engine.types import SchedulerOutput, Stage
from tests.engine.fake_device import (
    FakeDevice,
    adaptive,
    assert_empty,
    fake_engine,
    params,
    run,
)


def pages_in_time(device: FakeDevice, block_size: int) -> list[int]:
    """Checks that every position has its page before a batch writes there, and no page comes
    earlier; how many pages the tables grew by, each time that they did."""
    tables: dict[int, tuple[int, ...]] = {}  # by generation
    grown = []
    for batch in device.batches:
        generations = {row.slot: row.generation for row in batch.rows}
        updates = {generations[update.slot]: update.block_table for update in batch.slot_updates}
        assert len(updates) == len(batch.slot_updates)
        for row in batch.rows:
            before = tables.get(row.generation, ())
            tables[row.generation] = table = updates.get(row.generation, before)
            assert table[: len(before)] == before
            if before and table != before:
                grown.append(len(table) - len(before))
                assert len(table) == last_position(batch, row) // block_size + 1
            assert last_position(batch, row) < len(table) * block_size
    return grown


def last_position(batch: SchedulerOutput, row) -> int:
    """The last one whose K/V a row writes."""
    if batch.stage is Stage.TOKENS:
        return row.position + batch.num_tokens - 1
    if batch.stage is Stage.BOUNDARY and row.exit_depth and row.depth:
        return row.position + 1
    return row.position + max(row.size, 1) - 1


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "refill", "max_in_flight": 1},
        {"mode": "refill", "max_in_flight": 3},
        {"mode": "no_refill"},
        {"mode": "mixed", "prefill_chunk_size": 3},
        {"mode": "refill", "wavefront_chunked_prefill": True, "prefill_chunk_size": 2},
        {"mode": "refill", "tokens_per_dispatch": 4},
        {"mode": "refill", "planes": 1},
        {"mode": "refill", "caches_prefixes": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_page_comes_with_the_batch_whose_tokens_reach_it(options, block_size):
    core, device = fake_engine(incremental=True, block_size=block_size, **options)
    for i in range(6):
        kind = adaptive if i % 2 and "tokens_per_dispatch" not in options else params
        core.add_request(str(i), [1] * (1 + 5 * i), kind(max_tokens=14 - i))
    run(core)
    grown = pages_in_time(device, block_size)
    new_positions = options.get("tokens_per_dispatch", 1)  # in a batch
    assert len(grown) > 5 and max(grown) == -(-new_positions // block_size)
    found = core.scheduler.totals()["cached_prompt_tokens"]
    assert (found > 0) == ("caches_prefixes" in options)
    assert_empty(core, cached_blocks=26 // block_size * 4 if found else 0)


def test_without_incremental_allocation_a_table_comes_once_and_whole():
    core, device = fake_engine()
    core.add_request("a", [1], params(max_tokens=16))
    run(core)
    updates = [update for batch in device.batches for update in batch.slot_updates]
    assert [len(update.block_table) for update in updates] == [4]


def test_blocks_are_in_use_only_from_when_they_are_needed():
    core, _ = fake_engine(incremental=True, max_in_flight=1)
    core.add_request("a", [1] * 4, params(max_tokens=9))  # 12 positions: 3 pages of 4 blocks
    in_use = []
    while core.has_unfinished_requests():
        core.step()
        stats = core.scheduler.stats()
        in_use.append((stats["total_blocks"] - stats["free_blocks"], stats["reserved_blocks"]))
    assert list(dict.fromkeys(in_use)) == [(4, 8), (8, 4), (12, 0), (0, 0)]


def test_what_running_requests_may_still_need_is_given_to_nobody_else():
    """A prompt of one page fits beside them; its growth does not."""
    core, _ = fake_engine(incremental=True, num_pages=5)
    core.add_request("a", [1], params(max_tokens=12))  # 3 pages in the end, 1 now
    core.add_request("b", [1], params(max_tokens=12))
    core.step()
    stats = core.scheduler.stats()
    assert (stats["running"], stats["waiting"]) == (1, 1)
    assert (stats["free_blocks"], stats["reserved_blocks"]) == (16, 8)
    outputs = run(core)
    assert [outputs[name].finish_reason for name in "ab"] == ["length"] * 2
    assert_empty(core)


def test_the_reservation_of_a_request_that_ends_early_comes_back_with_its_blocks():
    core, _ = fake_engine(incremental=True, num_pages=5, eos_token_ids=(7,))
    core.add_request("stops", [1], params(max_tokens=12))
    core.add_request("aborted", [1], params(max_tokens=8))
    core.step()
    core.abort_request("aborted")
    run(core)
    assert_empty(core)


def test_a_request_joins_others_only_above_the_watermark():
    """The numbers of docs/scheduler.md: 40 blocks, 10 of which stay free beside others."""
    core, device = fake_engine(incremental=True, num_pages=10, watermark_ratio=0.25)
    core.add_request("a", [1], params(max_tokens=16))  # 16 blocks
    core.add_request("b", [1], params(max_tokens=16))  # 16 + 10 > 40 - 16
    core.add_request("c", [1], params(max_tokens=12))  # 12 + 10 <= 24
    core.step()
    stats = core.scheduler.stats()
    assert (stats["running"], stats["waiting"]) == (2, 1)
    run(core)
    order = dict.fromkeys(row.generation for batch in device.batches for row in batch.rows)
    assert list(order) == [0, 2, 1]


def test_a_request_that_needs_the_whole_pool_runs_alone_whatever_the_watermark():
    core, _ = fake_engine(incremental=True, num_pages=10, watermark_ratio=0.9)
    core.add_request("a", [1] * 20, params(max_tokens=21))
    assert run(core)["a"].finish_reason == "length"
