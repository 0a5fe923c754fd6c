"""Which KV pages belong to whom: host-side bookkeeping only."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class KVGeometry:
    """num_pages logical pages of block_size tokens; each stands for `planes` blocks."""

    num_pages: int
    planes: int
    block_size: int


class KVAccounting:
    """Owns the free list. An owner is a request generation; its table lists logical pages.

    incremental: an owner gets pages as its tokens come to them. Those that it may still need are
    free, but reserved: extend() never fails. watermark_ratio: the share of all blocks that must
    stay free beside them where an owner comes to others.
    """

    def __init__(
        self, geometry: KVGeometry, incremental: bool = False, watermark_ratio: float = 0.0
    ):
        self.geometry = geometry
        self.incremental = incremental
        self._watermark = int(watermark_ratio * self.total_blocks) if incremental else 0
        self.release_all()

    @property
    def total_blocks(self) -> int:
        """Blocks of every depth."""
        return self.geometry.num_pages * self.geometry.planes

    @property
    def free_blocks(self) -> int:
        """Blocks in nobody's table."""
        return len(self._free) * self.geometry.planes

    @property
    def reserved_blocks(self) -> int:
        """Those of the free ones that owners may still need."""
        return self._num_reserved * self.geometry.planes

    @property
    def available_blocks(self) -> int:
        """Those that one more owner can have."""
        watermark = self._watermark if self._tables else 0
        return max(self.free_blocks - self.reserved_blocks - watermark, 0)

    def cost(self, positions: int) -> int:
        """Blocks that `positions` tokens take: planes * ceil(positions / block_size)."""
        return self._pages(positions) * self.geometry.planes

    def room(self) -> int:
        """Positions that the available blocks hold: cost(room()) <= available_blocks."""
        return self.available_blocks // self.geometry.planes * self.geometry.block_size

    def allocate(
        self, owner: int, positions: int, max_positions: int | None = None
    ) -> tuple[int, ...]:
        """Takes in an owner: pages for its first `positions` tokens, and more by extend() up to
        max_positions (None: no more); all of them now where not incremental. Returns its table."""
        max_positions = max_positions or positions
        if owner in self._tables:
            raise ValueError(f"owner = {owner}: already holds blocks")
        if self.cost(max_positions) > self.available_blocks:
            raise ValueError(
                f"positions = {max_positions}: needs {self.cost(max_positions)} blocks,"
                f" {self.available_blocks} are available"
            )
        self._tables[owner] = ()
        self._reserved[owner] = self._pages(max_positions)
        self._num_reserved += self._reserved[owner]
        return self.extend(owner, positions if self.incremental else max_positions)

    def capacity(self, owner: int) -> int:
        """Positions that the owner's pages hold."""
        return len(self._tables[owner]) * self.geometry.block_size

    def extend(self, owner: int, positions: int) -> tuple[int, ...]:
        """Gives the owner what its first `positions` tokens lack, out of what is reserved for it.
        Returns its table."""
        table = self._tables[owner]
        pages = max(self._pages(positions) - len(table), 0)
        if pages > self._reserved[owner]:
            most = self.capacity(owner) + self._reserved[owner] * self.geometry.block_size
            raise ValueError(f"positions = {positions}: owner {owner} was given {most} at most")
        self._reserved[owner] -= pages
        self._num_reserved -= pages
        self._tables[owner] = table + tuple(self._free.pop() for _ in range(pages))
        return self._tables[owner]

    def table(self, owner: int) -> tuple[int, ...]:
        return self._tables[owner]

    def release(self, owner: int) -> None:
        """Gives the owner's pages and reservation back; raises KeyError when it has none."""
        self._free.extend(reversed(self._tables.pop(owner)))
        self._num_reserved -= self._reserved.pop(owner)

    def release_all(self) -> None:
        """Every page is free again."""
        self._free = list(range(self.geometry.num_pages - 1, -1, -1))
        self._tables: dict[int, tuple[int, ...]] = {}
        self._reserved: dict[int, int] = {}  # pages
        self._num_reserved = 0

    def _pages(self, positions: int) -> int:
        return -(-positions // self.geometry.block_size)
