"""Who holds which KV pages."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
    with pytest.raises(ValueError, match="needs 12 blocks, 8 are free"):
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


class Accounting(RuleBasedStateMachine):
    """No page has two owners; none is lost."""

    def __init__(self):
        super().__init__()
        self.kv = KVAccounting(KVGeometry(num_pages=12, planes=3, block_size=4))
        self.tables = {}
        self.owners = 0

    @rule(positions=st.integers(1, 60))
    def allocate(self, positions):
        if self.kv.can_allocate(positions):
            self.owners += 1
            self.tables[self.owners] = self.kv.allocate(self.owners, positions)
            assert len(self.tables[self.owners]) == -(-positions // 4)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        owner = data.draw(st.sampled_from(sorted(self.tables)))
        self.kv.release(owner)
        del self.tables[owner]

    @invariant()
    def every_page_has_one_place(self):
        held = [page for table in self.tables.values() for page in table]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(12))
        assert self.kv.free_blocks == 3 * (12 - len(held))


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=30, deadline=None, derandomize=True)
