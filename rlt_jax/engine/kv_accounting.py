"""Which KV pages belong to whom: host-side bookkeeping only."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class KVGeometry:
    """num_pages logical pages of block_size tokens; each stands for `planes` blocks."""

    num_pages: int
    planes: int
    block_size: int


class KVAccounting:
    """Owns the free list. An owner is a request generation; its table lists logical pages."""

    def __init__(self, geometry: KVGeometry):
        self.geometry = geometry
        self.release_all()

    @property
    def total_blocks(self) -> int:
        """Blocks of every depth."""
        return self.geometry.num_pages * self.geometry.planes

    @property
    def free_blocks(self) -> int:
        return len(self._free) * self.geometry.planes

    def cost(self, positions: int) -> int:
        """Blocks that `positions` tokens take: planes * ceil(positions / block_size)."""
        return -(-positions // self.geometry.block_size) * self.geometry.planes

    def can_allocate(self, positions: int) -> bool:
        return self.cost(positions) <= self.free_blocks

    def allocate(self, owner: int, positions: int) -> tuple[int, ...]:
        """Reserves all pages of `positions` tokens and returns the block table."""
        if owner in self._tables:
            raise ValueError(f"owner = {owner}: already holds blocks")
        if not self.can_allocate(positions):
            raise ValueError(
                f"positions = {positions}: needs {self.cost(positions)} blocks,"
                f" {self.free_blocks} are free"
            )
        pages = self.cost(positions) // self.geometry.planes
        self._tables[owner] = tuple(self._free.pop() for _ in range(pages))
        return self._tables[owner]

    def table(self, owner: int) -> tuple[int, ...]:
        return self._tables[owner]

    def release(self, owner: int) -> None:
        """Gives the owner's pages back; raises KeyError when it holds none."""
        self._free.extend(reversed(self._tables.pop(owner)))

    def release_all(self) -> None:
        """Every page is free again."""
        self._free = list(range(self.geometry.num_pages - 1, -1, -1))
        self._tables: dict[int, tuple[int, ...]] = {}
