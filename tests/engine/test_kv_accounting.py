"""Who holds which KV pages."""

import dataclasses
import itertools

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

HASHES = [bytes([i]) for i in range(8)]  # of the pages of a prefix


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


# -- prefixes --------------------------------------------------------------------------------------


def accounting(num_pages: int = 10, **options) -> KVAccounting:
    """Pages of 4 tokens in 4 planes."""
    return KVAccounting(KVGeometry(num_pages, planes=4, block_size=4), **options)


def test_owners_share_the_pages_of_a_prefix_once_it_is_published():
    kv = accounting()
    first = kv.allocate(1, 12)
    assert kv.find_prefix(HASHES) == ()
    kv.publish(1, HASHES[:2], first=0)
    assert kv.find_prefix(HASHES) == first[:2]
    second = kv.allocate(2, 16, prefix=first[:2])
    assert second[:2] == first[:2] and not set(second[2:]) & set(first)
    assert kv.free_blocks == 4 * (10 - 3 - 2)
    kv.release(1)
    assert kv.table(2) == second
    assert (kv.free_blocks, kv.cached_blocks) == (4 * 6, 0)  # the two are held by the other
    kv.release(2)
    assert (kv.free_blocks, kv.cached_blocks) == (4 * 8, 4 * 2)


def test_pages_are_published_behind_those_published_before():
    kv = accounting()
    table = kv.allocate(1, 12)
    kv.publish(1, HASHES[:1], first=0)
    kv.publish(1, HASHES[1:3], first=1)
    assert kv.find_prefix(HASHES) == table


def test_of_the_same_prefix_in_two_tables_one_copy_is_known_and_the_other_becomes_free():
    kv = accounting()
    first, second = kv.allocate(1, 8), kv.allocate(2, 8)
    kv.publish(2, HASHES[:2], first=0)
    kv.publish(1, HASHES[:2], first=0)
    assert kv.find_prefix(HASHES) == second
    assert not set(first) & set(second)
    kv.release(1)
    assert kv.cached_blocks == 0
    kv.release(2)
    assert (kv.free_blocks, kv.cached_blocks) == (4 * 8, 4 * 2)


def test_pages_are_given_up_when_no_free_one_is_left_the_leaf_of_a_prefix_first():
    kv = accounting(num_pages=4)
    first = kv.allocate(1, 12)
    kv.publish(1, HASHES[:3], first=0)
    kv.release(1)
    assert kv.available_blocks == kv.total_blocks
    assert not set(kv.allocate(2, 4)) & set(first)  # a free one is there
    for pages in (2, 1, 0):
        kv.allocate(10 + pages, 4)
        assert kv.find_prefix(HASHES) == first[:pages]
    assert (kv.free_blocks, kv.cached_blocks) == (0, 0)


def test_the_prefix_used_longest_ago_is_given_up_first():
    kv = accounting(num_pages=4)
    others = [b"x", b"y"]
    for owner, hashes in ((1, HASHES[:2]), (2, others)):
        kv.allocate(owner, 8)
        kv.publish(owner, hashes, first=0)
        kv.release(owner)
    kv.allocate(3, 8, prefix=kv.find_prefix(HASHES))
    kv.release(3)
    kv.allocate(4, 8)
    assert len(kv.find_prefix(HASHES)) == 2 and kv.find_prefix(others) == ()


def test_a_prefix_that_others_hold_needs_no_room_and_an_idle_one_does():
    """The numbers of docs/scheduler.md."""
    kv = accounting()
    prefix = kv.allocate(1, 24)[:5]
    kv.publish(1, HASHES[:5], first=0)
    assert kv.shared_positions(HASHES[:5]) == 20
    assert kv.available_blocks == 16
    assert kv.cost(36) - 20 == 16  # as much as there is
    kv.allocate(2, 36, prefix=prefix)
    kv.release(2)
    kv.release(1)
    assert (kv.free_blocks, kv.cached_blocks, kv.available_blocks) == (20, 20, 40)
    assert kv.shared_positions(HASHES[:5]) == 0
    kv.allocate(3, 4)
    with pytest.raises(ValueError, match="positions = 40: needs 40 blocks, 36 are available"):
        kv.allocate(2, 40, prefix=prefix)
    assert kv.cached_blocks == 20
    kv.allocate(2, 36, prefix=prefix)
    assert (kv.free_blocks, kv.cached_blocks, kv.available_blocks) == (0, 0, 0)


def test_what_is_reserved_for_an_owner_may_lie_in_the_cache():
    kv = accounting(num_pages=4, incremental=True)
    kv.allocate(1, 8)
    kv.publish(1, HASHES[:2], first=0)
    kv.release(1)
    kv.allocate(2, 4, max_positions=16)
    assert (kv.free_blocks, kv.cached_blocks, kv.reserved_blocks) == (4, 8, 12)
    with pytest.raises(ValueError, match="needs 8 blocks, 0 are available"):
        kv.allocate(3, 8, prefix=kv.find_prefix(HASHES))
    assert len(kv.extend(2, 16)) == 4
    assert kv.find_prefix(HASHES) == ()


def test_release_all_forgets_every_prefix():
    kv = accounting()
    kv.allocate(1, 8)
    kv.publish(1, HASHES[:2], first=0)
    kv.release(1)
    kv.allocate(2, 8, prefix=kv.find_prefix(HASHES))
    kv.release_all()
    assert kv.find_prefix(HASHES) == ()
    assert (kv.free_blocks, kv.cached_blocks) == (kv.total_blocks, 0)


def test_changes_counts_whatever_changes_what_is_shared():
    """shared_positions() may be kept as long as `changes` is the same."""
    kv = accounting(num_pages=3)
    seen = [kv.changes]

    def has_changed() -> bool:
        seen.append(kv.changes)
        return seen[-1] != seen[-2]

    kv.allocate(1, 8)
    assert has_changed()
    kv.publish(1, HASHES[:2], first=0)
    assert has_changed() and kv.shared_positions(HASHES) == 8
    kv.release(1)
    assert has_changed() and kv.shared_positions(HASHES) == 0
    kv.allocate(2, 12, prefix=kv.find_prefix(HASHES))
    assert has_changed() and kv.shared_positions(HASHES) == 8
    kv.release_all()
    assert has_changed() and kv.shared_positions(HASHES) == 0


# -- what others would bring -----------------------------------------------------------------------


def test_pages_come_free_when_the_last_who_shares_them_leaves_and_a_prefix_stays():
    kv = accounting()
    prefix = kv.allocate(1, 24)[:5]
    kv.publish(1, HASHES[:5], first=0)
    kv.allocate(2, 36, prefix=prefix)
    assert kv.available_blocks == 0
    assert list(kv.lacking(36, (), [1, 2])) == [9, 9 - 1, 9 - 1 - 9]
    # With the prefix it needs 4 more; when both have left it still needs the 5, and finds them.
    assert list(kv.lacking(36, HASHES[:5], [1, 2])) == [4, 4 - 1, 4 - 1 - 4]
    assert list(kv.lacking(36, HASHES[:5], [2, 1])) == [4, 4 - 4, 4 - 4 - 1]


def test_what_is_reserved_for_a_leaver_comes_free_and_the_watermark_does_not():
    kv = accounting(incremental=True, watermark_ratio=0.25)  # 10 of 40 blocks
    kv.allocate(1, 4, max_positions=16)
    kv.allocate(2, 12)
    kv.extend(2, 16)  # beyond what was promised: 8 blocks are left, 2 less than should be
    assert kv.available_blocks == 0
    assert list(kv.lacking(8, (), [1])) == [2 + 1, 2 + 1 - 4]


# -- any order of calls ----------------------------------------------------------------------------

Content = tuple[int, ...]  # of a page: which prompt pages come before it, and its own


@dataclasses.dataclass
class Owner:
    """contents: of the full pages of its prompt, `complete` of them known to be complete.
    promised: positions in the end."""

    table: tuple[int, ...]
    contents: list[Content]
    complete: int
    promised: int


class Accounting(RuleBasedStateMachine):
    """Every page is in one place: free, idle in the cache, or held, by as many as share it. It
    holds what it is known for, and what was promised is there."""

    @initialize(incremental=st.booleans(), watermark=st.sampled_from([0.0, 0.3]))
    def start(self, incremental, watermark):
        self.kv = KVAccounting(KVGeometry(12, planes=3, block_size=4), incremental, watermark)
        self.incremental = incremental
        self.watermark = int(watermark * 36) * incremental
        self.owners_so_far = 0
        self.device_loss()

    @rule()
    @precondition(lambda self: self.owners)
    def device_loss(self):
        self.kv.release_all()
        self.owners: dict[int, Owner] = {}
        self.holds: dict[int, Content] = {}  # of pages, what they are known to hold
        self.known: dict[Content, int] = {}
        self.free = set(range(12))
        self.idle: list[int] = []  # used longest ago first

    @rule(
        pages=st.lists(st.integers(0, 1), max_size=4),
        last=st.integers(1, 4),
        more=st.integers(0, 20),
    )
    def allocate(self, pages, last, more):
        """A prompt of full pages, each of one of two contents, and up to one more."""
        contents = [tuple(pages[: i + 1]) for i in range(len(pages))]
        hashes = [hash_of(content) for content in contents]
        prefix = self.find(contents)
        assert self.kv.find_prefix(hashes) == prefix
        idle = sum(page in self.idle for page in prefix)
        shared = self.kv.shared_positions(hashes)
        assert shared == 4 * (len(prefix) - idle)
        positions = 4 * len(pages) + last
        needed = self.kv.cost(positions + more) - 3 * len(prefix)
        watermark = self.watermark if self.owners else 0
        usable = self.kv.free_blocks + self.kv.cached_blocks
        fits = needed + self.kv.reserved_blocks + watermark + 3 * idle <= usable
        assert fits == (positions + more - shared <= self.kv.room())
        self.owners_so_far += 1
        if not fits:
            with pytest.raises(ValueError, match="are available"):
                self.kv.allocate(self.owners_so_far, positions, positions + more, prefix)
            return
        table = self.kv.allocate(self.owners_so_far, positions, positions + more, prefix)
        assert table[: len(prefix)] == prefix
        self.idle = [page for page in self.idle if page not in prefix]
        self.take(table[len(prefix) :])
        assert len(table) == -(-(positions + more * (not self.incremental)) // 4)
        if last == 4:
            contents.append((*pages, 2))
        self.owners[self.owners_so_far] = Owner(table, contents, len(prefix), positions + more)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def extend(self, data):
        """Up to what was promised always, and beyond it while there is something to spare."""
        owner, one = self.draw_owner(data)
        positions = data.draw(st.integers(1, one.promised + 12))
        pages = -(-positions // 4)
        spare = len(self.free) + len(self.idle) - sum(map(reserved, self.owners.values()))
        fits = pages - len(one.table) <= reserved(one) + spare
        assert fits or positions > one.promised
        assert self.kv.can_extend(owner, positions) == fits
        if not fits:
            with pytest.raises(ValueError, match=f"owner {owner} was given"):
                self.kv.extend(owner, positions)
            return
        before, one.table = one.table, self.kv.extend(owner, positions)
        assert one.table[: len(before)] == before
        assert self.kv.capacity(owner) == 4 * len(one.table) >= positions
        assert len(one.table) == max(len(before), pages)
        self.take(one.table[len(before) :])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def publish(self, data):
        owner, one = self.draw_owner(data)
        first = one.complete
        one.complete = data.draw(st.integers(first, len(one.contents)))
        contents = one.contents[first : one.complete]
        for page, content in zip(one.table[first:], contents):
            assert self.holders(page) == 1  # it was written by this owner
            self.holds[page] = content
            self.known.setdefault(content, page)
        self.kv.publish(owner, [hash_of(content) for content in contents], first)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        self.let_go(self.draw_owner(data)[0])

    def let_go(self, owner: int) -> None:
        self.kv.release(owner)
        one = self.owners.pop(owner)
        for page in reversed(one.table):
            if not self.holders(page):
                is_known = self.known.get(self.holds.get(page)) == page
                self.idle.append(page) if is_known else self.free.add(page)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), positions=st.integers(20, 48))
    def what_one_more_lacks_is_what_will_be_missing_when_others_have_left(self, data, positions):
        """One whose prompt begins like somebody's, and others may share that, too."""
        _, alike = self.draw_owner(data)
        hashes = [hash_of(content) for content in alike.contents]
        leavers = data.draw(st.permutations(sorted(self.owners)))[:3]
        lacking = list(self.kv.lacking(positions, hashes, leavers))
        if len(lacking) < len(leavers) + 1:  # all of them would not do
            self.assert_lacks(positions, hashes, *lacking)
            for owner in leavers:
                self.let_go(owner)
            assert next(self.kv.lacking(positions, hashes, ())) > 0
            return
        for i, owner in enumerate(leavers):
            self.assert_lacks(positions, hashes, lacking[i])
            self.let_go(owner)
        if self.owners:  # else the watermark has gone, too
            self.assert_lacks(positions, hashes, lacking[-1])

    def assert_lacks(self, positions: int, hashes: list[bytes], pages: int) -> None:
        assert next(self.kv.lacking(positions, hashes, ())) == pages
        fits = positions - self.kv.shared_positions(hashes) <= self.kv.room()
        assert fits == (pages <= 0)

    def draw_owner(self, data) -> tuple[int, Owner]:
        owner = data.draw(st.sampled_from(sorted(self.owners)))
        return owner, self.owners[owner]

    def find(self, contents: list[Content]) -> tuple[int, ...]:
        known = itertools.takewhile(lambda content: content in self.known, contents)
        return tuple(self.known[content] for content in known)

    def holders(self, page: int) -> int:
        return sum(page in one.table for one in self.owners.values())

    def take(self, new: tuple[int, ...]) -> None:
        """These were given out: free ones while there are any, then the one used longest ago."""
        for page in new:
            if self.free:
                self.free.remove(page)
            else:
                assert page == self.idle.pop(0)
                del self.known[self.holds[page]]
            self.holds.pop(page, None)

    @invariant()
    def every_page_has_one_place(self):
        held = {page for one in self.owners.values() for page in one.table}
        assert len(held) + len(self.idle) + len(self.free) == 12
        assert held | set(self.idle) | self.free == set(range(12))
        assert self.kv.free_blocks == 3 * len(self.free)
        assert self.kv.cached_blocks == 3 * len(self.idle)
        for owner, one in self.owners.items():
            assert self.kv.table(owner) == one.table

    @invariant()
    def every_page_holds_what_it_is_known_for(self):
        for one in self.owners.values():
            assert len(set(one.table)) == len(one.table)
            complete = list(zip(one.table, one.contents))[: one.complete]
            assert all(self.holds[page] == content for page, content in complete)
        assert all(self.holds[page] == content for content, page in self.known.items())

    @invariant()
    def what_was_promised_is_there(self):
        assert self.kv.reserved_blocks == 3 * sum(map(reserved, self.owners.values()))
        assert self.kv.reserved_blocks <= self.kv.free_blocks + self.kv.cached_blocks


def reserved(one: Owner) -> int:
    """Pages promised and not given yet."""
    return max(-(-one.promised // 4) - len(one.table), 0)


def hash_of(content: Content) -> bytes:
    return repr(content).encode()


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
