"""Which KV pages belong to whom: host-side bookkeeping only."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from rlt_jax.engine.prefix_cache import PrefixCache


@dataclasses.dataclass(frozen=True)
class KVGeometry:
    """num_pages logical pages of block_size tokens; each stands for `planes` blocks."""

    num_pages: int
    planes: int
    block_size: int


class KVAccounting:
    """Owns the pages. An owner is a request generation; its table lists logical pages.

    Owners may share the pages of a prompt prefix; what nobody holds but the prefix cache is given
    up as soon as it is needed.
    incremental: an owner gets pages as its tokens come to them. Those that were promised to it
    stay available: extend() never fails up to there. watermark_ratio: the share of all blocks that
    must stay free beside them where an owner comes to others.
    """

    def __init__(
        self, geometry: KVGeometry, incremental: bool = False, watermark_ratio: float = 0.0
    ):
        self.geometry = geometry
        self.incremental = incremental
        self._watermark = int(watermark_ratio * self.total_blocks) if incremental else 0
        self.changes = 0
        self.release_all()

    @property
    def total_blocks(self) -> int:
        """Blocks of every depth."""
        return self.geometry.num_pages * self.geometry.planes

    @property
    def free_blocks(self) -> int:
        """Blocks in nobody's table and not in the cache."""
        return len(self._free) * self.geometry.planes

    @property
    def cached_blocks(self) -> int:
        """Blocks that only the prefix cache holds."""
        return self._cache.num_idle * self.geometry.planes

    @property
    def reserved_blocks(self) -> int:
        """Those of the free and the cached ones that owners may still need."""
        return self._num_reserved * self.geometry.planes

    @property
    def available_blocks(self) -> int:
        """Those that one more owner can have."""
        return max(self._headroom, 0)

    @property
    def _headroom(self) -> int:
        """Blocks promised to nobody, less the watermark."""
        watermark = self._watermark if self._tables else 0
        return self._spare_pages * self.geometry.planes - watermark

    @property
    def _spare_pages(self) -> int:
        """Promised to nobody."""
        return len(self._free) + self._cache.num_idle - self._num_reserved

    def pages(self, positions: int) -> int:
        """Logical pages that `positions` tokens take."""
        return -(-positions // self.geometry.block_size)

    def cost(self, positions: int) -> int:
        """Blocks that `positions` tokens take: planes * ceil(positions / block_size)."""
        return self.pages(positions) * self.geometry.planes

    def room(self) -> int:
        """Positions that the available blocks hold: cost(room()) <= available_blocks."""
        return self.available_blocks // self.geometry.planes * self.geometry.block_size

    def allocate(
        self,
        owner: int,
        positions: int,
        max_positions: int | None = None,
        prefix: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Takes in an owner: pages for its first `positions` tokens, and more by extend() up to
        max_positions (None: no more); all of them now where not incremental. Returns its table.

        prefix: pages that find_prefix() gave for it, to begin its table with.
        """
        max_positions = max_positions or positions
        if owner in self._tables:
            raise ValueError(f"owner = {owner}: already holds blocks")
        needed = self.cost(max_positions) - self._held(prefix) * self.geometry.planes
        if needed > self.available_blocks:
            raise ValueError(
                f"positions = {max_positions}: needs {needed} blocks,"
                f" {self.available_blocks} are available"
            )
        for page in prefix:
            self._holders[page] += 1
            self._cache.take(page)
        self.changes += 1
        self._tables[owner] = tuple(prefix)
        self._reserved[owner] = self.pages(max_positions) - len(prefix)
        self._num_reserved += self._reserved[owner]
        return self.extend(owner, positions if self.incremental else max_positions)

    def capacity(self, owner: int) -> int:
        """Positions that the owner's pages hold."""
        return len(self._tables[owner]) * self.geometry.block_size

    def extend(self, owner: int, positions: int) -> tuple[int, ...]:
        """Gives the owner what its first `positions` tokens lack, out of what is reserved for it
        and then of what is to spare. Returns its table."""
        if not self.can_extend(owner, positions):
            most = self.capacity(owner) + self._reserved[owner] * self.geometry.block_size
            raise ValueError(
                f"positions = {positions}: owner {owner} was given {most} at most, and there are"
                f" {self._spare_pages} pages to spare"
            )
        table = self._tables[owner]
        pages = max(self.pages(positions) - len(table), 0)
        promised = min(pages, self._reserved[owner])
        self._reserved[owner] -= promised
        self._num_reserved -= promised
        self._tables[owner] = table + tuple(self._take_page() for _ in range(pages))
        return self._tables[owner]

    def can_extend(self, owner: int, positions: int) -> bool:
        """Whether extend() would do, by what is reserved for the owner and what is to spare."""
        lacking = self.pages(positions) - len(self._tables[owner])
        return lacking <= self._reserved[owner] + self._spare_pages

    def lacking(
        self, positions: int, hashes: Sequence[bytes], leavers: Sequence[int]
    ) -> Iterator[int]:
        """Pages that one more owner of so many positions, the first of them known by these hashes,
        would lack: as it is, and after each of these owners has left. Only the first figure where
        they hold too little, even if they share nothing: page by page it would take long, and the
        same is asked at every step."""
        prefix = set(self._shared(hashes))
        lacking = self.pages(positions) - len(prefix) - self._headroom // self.geometry.planes
        yield lacking
        if lacking > sum(len(self._tables[owner]) + self._reserved[owner] for owner in leavers):
            return
        left: Counter[int] = Counter()
        for owner in leavers:
            lacking -= self._reserved[owner]
            for page in self._tables[owner]:
                left[page] += 1
                # Those of the prefix stay, for the one that comes.
                lacking -= left[page] == self._holders[page] and page not in prefix
            yield lacking

    def table(self, owner: int) -> tuple[int, ...]:
        return self._tables[owner]

    def release(self, owner: int) -> None:
        """Gives the owner's pages and reservation back; raises KeyError when it has none. Known
        pages stay in the cache, the first of a prefix the longest."""
        for page in reversed(self._tables.pop(owner)):
            self._holders[page] -= 1
            if not self._holders[page] and not self._cache.let_go(page):
                self._free.append(page)
        self._num_reserved -= self._reserved.pop(owner)
        self.changes += 1

    def release_all(self) -> None:
        """Every page is free again, and nothing known of any."""
        self._free = list(range(self.geometry.num_pages - 1, -1, -1))
        self._holders = [0] * self.geometry.num_pages
        self._tables: dict[int, tuple[int, ...]] = {}
        self._reserved: dict[int, int] = {}  # pages
        self._num_reserved = 0
        self._cache = PrefixCache()
        self.changes += 1

    # -- prefixes --------------------------------------------------------------------------------

    def find_prefix(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """The pages of the longest known prefix, for allocate() to share."""
        return self._cache.find(hashes)

    def shared_positions(self, hashes: Sequence[bytes]) -> int:
        """Positions of this prefix that need no more room, since other owners hold them, up to the
        first page that nobody does. The same until `changes` changes: what is evicted, nobody
        holds."""
        return len(self._shared(hashes)) * self.geometry.block_size

    def _shared(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        known = self._cache.find(hashes)
        return tuple(itertools.takewhile(lambda page: not self._cache.is_idle(page), known))

    def publish(self, owner: int, hashes: Sequence[bytes], first: int) -> None:
        """The owner's pages from the `first`-th on hold what these hashes say: others may share
        them."""
        pages = self._tables[owner][first : first + len(hashes)]
        for page_hash, page in zip(hashes, pages, strict=True):
            self._cache.put(page_hash, page)
        self.changes += 1

    def _held(self, prefix: Sequence[int]) -> int:
        """How many of these pages owners hold."""
        return sum(not self._cache.is_idle(page) for page in prefix)

    def _take_page(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page = self._cache.evict()
        self._holders[page] = 1
        return page
