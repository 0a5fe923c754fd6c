"""Who holds which KV pages."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from rlt_jax.engine.kv_accounting import KVAccounting, KVGeometry


@pytest.mark.parametrize(
    ("planes", "positions", "blocks"),
    [
        (4, 1, 4),
        (4, 16, 4),
        (4, 17, 8),
        (4, 128 + 64 - 1, 48),  # a prompt of 128 and 64 output tokens
        (4, 33 + 1024 - 1, 264),
        (1, 17, 2),
        (1, 191, 12),
    ],
)
def test_blocks_are_planes_times_pages(planes, positions, blocks):
    kv = KVAccounting(KVGeometry(num_pages=1000, planes=planes, block_size=16))
    assert kv.cost(positions) == blocks
    kv.allocate(1, positions)
    assert kv.total_blocks - kv.free_blocks == blocks


def test_allocation_that_does_not_fit_is_refused_and_changes_nothing():
    kv = KVAccounting(KVGeometry(num_pages=2, planes=4, block_size=4))
    with pytest.raises(ValueError, match="needs 12 blocks, 8 are available"):
        kv.allocate(1, 9)
    assert kv.free_blocks == kv.total_blocks == 8


def test_an_owner_allocates_once_and_releases_once():
    kv = KVAccounting(KVGeometry(num_pages=4, planes=1, block_size=4))
    kv.allocate(1, 4)
    with pytest.raises(ValueError, match="already holds"):
        kv.allocate(1, 4)
    kv.release(1)
    with pytest.raises(KeyError):
        kv.release(1)


def test_incremental_allocation_gives_pages_as_they_are_asked_for_and_reserves_the_rest():
    kv = KVAccounting(KVGeometry(num_pages=6, planes=4, block_size=4), incremental=True)
    table = kv.allocate(1, positions=5, max_positions=14)
    assert len(table) == 2 and kv.capacity(1) == 8
    assert (kv.free_blocks, kv.reserved_blocks, kv.available_blocks) == (16, 8, 8)
    assert kv.room() == 8
    with pytest.raises(ValueError, match="needs 12 blocks, 8 are available"):
        kv.allocate(2, positions=1, max_positions=9)
    kv.allocate(2, positions=1, max_positions=8)
    assert kv.extend(1, 8) == table  # it holds them already
    assert kv.extend(1, 9)[:2] == table and len(kv.table(1)) == 3
    assert kv.extend(1, 14) == kv.table(1) and len(kv.table(1)) == 4
    with pytest.raises(ValueError, match="positions = 17: owner 1 was given 16 at most"):
        kv.extend(1, 17)
    kv.release(1)
    assert (kv.free_blocks, kv.reserved_blocks) == (20, 4)
    kv.release(2)
    assert (kv.free_blocks, kv.reserved_blocks) == (24, 0)


def test_without_incremental_allocation_an_owner_has_all_pages_at_once():
    kv = KVAccounting(KVGeometry(num_pages=6, planes=4, block_size=4), watermark_ratio=0.5)
    assert len(kv.allocate(1, positions=5, max_positions=14)) == 4
    assert (kv.reserved_blocks, kv.available_blocks) == (0, 8)  # and no watermark


def test_the_watermark_stays_free_beside_others_only():
    kv = KVAccounting(KVGeometry(10, planes=4, block_size=4), True, watermark_ratio=0.25)
    assert kv.room() == 40  # nobody is there
    kv.allocate(1, positions=1, max_positions=8)
    assert kv.available_blocks == 40 - 8 - 10
    assert kv.room() == 20  # 22 blocks are 5 pages
    with pytest.raises(ValueError, match="needs 24 blocks, 22 are available"):
        kv.allocate(2, positions=1, max_positions=21)
    kv.release(1)
    assert kv.room() == 40


class Accounting(RuleBasedStateMachine):
    """No page has two owners; none is lost; what was promised is there."""

    @initialize(incremental=st.booleans(), watermark=st.sampled_from([0.0, 0.3]))
    def start(self, incremental, watermark):
        self.kv = KVAccounting(KVGeometry(12, planes=3, block_size=4), incremental, watermark)
        self.tables, self.promised = {}, {}
        self.owners = 0

    @rule(positions=st.integers(1, 60), more=st.integers(0, 30))
    def allocate(self, positions, more):
        fits = self.kv.cost(positions + more) <= self.kv.available_blocks
        assert fits == (positions + more <= self.kv.room())
        if fits:
            self.owners += 1
            self.tables[self.owners] = self.kv.allocate(self.owners, positions, positions + more)
            self.promised[self.owners] = positions + more

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def extend(self, data):
        owner = data.draw(st.sampled_from(sorted(self.tables)))
        positions = data.draw(st.integers(1, self.promised[owner]))
        before, self.tables[owner] = self.tables[owner], self.kv.extend(owner, positions)
        assert self.tables[owner][: len(before)] == before
        assert self.kv.capacity(owner) == 4 * len(self.tables[owner]) >= positions

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        owner = data.draw(st.sampled_from(sorted(self.tables)))
        self.kv.release(owner)
        del self.tables[owner], self.promised[owner]

    @invariant()
    def every_page_has_one_place(self):
        held = [page for table in self.tables.values() for page in table]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(12))
        assert self.kv.free_blocks == 3 * (12 - len(held))
        promised = sum(-(-positions // 4) for positions in self.promised.values())
        assert self.kv.reserved_blocks == 3 * (promised - len(held))
        assert 0 <= self.kv.reserved_blocks <= self.kv.free_blocks


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=30, deadline=None, derandomize=True)
