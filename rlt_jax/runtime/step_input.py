"""Step inputs: the fields of a program's input packed in one int32 array.

One NumPy array straight into the program is the cheapest way to the device. A fresh array is
made for every step and never written again: the device may still be reading it.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """Named fields (name, shape, dtype of 4 bytes) one after the other in an int32 array."""

    fields: tuple[tuple[str, tuple[int, ...], type], ...]

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for _, shape, _ in self.fields)

    def pack(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """One fresh int32 array; raises ValueError when a field is missing or misshapen."""
        packed = np.empty(self.size, np.int32)
        start = 0
        for name, shape, dtype in self.fields:
            if name not in values:
                raise ValueError(f"{name} is missing")
            value = np.asarray(values[name], dtype)
            if value.shape != shape:
                raise ValueError(f"{name} has shape {value.shape}: must be {shape}")
            packed[start : start + value.size] = value.ravel().view(np.int32)
            start += value.size
        return packed

    def unpack(self, packed: jax.Array) -> dict[str, jax.Array]:
        """The fields, by static slices; called inside a program."""
        values, start = {}, 0
        for name, shape, dtype in self.fields:
            size = math.prod(shape)
            field = packed[start : start + size].reshape(shape)
            values[name] = lax.bitcast_convert_type(field, dtype)
            start += size
        return values


def _int32_fields(names: str, count: int):
    return tuple((name, (count,), np.int32) for name in names.split())


def row_layout(rows: int) -> PackedLayout:
    """Decode rows. slot: num_slots or more marks a padding row. The rest: see engine.types.Row."""
    return PackedLayout(_int32_fields("slot position depth exit_depth output_index", rows))


def prompt_layout(tokens: int, tiles: int) -> PackedLayout:
    """Prompt chunks, packed one after the other and cut into tiles. slot: as above; start: a tile's
    first position; count: its rows (0: no tile); ends_prompt: 1 when its last row is the prompt's
    last token."""
    fields = _int32_fields("slot start count ends_prompt", tiles)
    return PackedLayout((*fields, ("tokens", (tokens,), np.int32)))


def mixed_layout(rows: int, tokens: int, tiles: int) -> PackedLayout:
    """Decode rows, then prompt chunks as in prompt_layout. tile_slot, tile_depth: a tile's; window:
    where the hidden state of its first row is kept; tokens: read in tiles at depth 1."""
    fields = _int32_fields("slot position depth", rows)
    fields += _int32_fields("tile_slot tile_depth start count ends_prompt window", tiles)
    return PackedLayout((*fields, ("tokens", (tokens,), np.int32)))


def shared_prompt_layout(requests: int, tokens: int) -> PackedLayout:
    """As prompt_layout, with one tile of `tokens` rows for each request."""
    fields = _int32_fields("slot start count ends_prompt", requests)
    return PackedLayout((*fields, ("tokens", (requests, tokens), np.int32)))


def slot_layout(rows: int, table_width: int) -> PackedLayout:
    """Slots to set: block table, sampling parameters, exit bounds."""
    return PackedLayout(
        (
            ("slot", (rows,), np.int32),
            ("table", (rows, table_width), np.int32),
            ("temperature", (rows,), np.float32),
            ("top_k", (rows,), np.int32),
            ("top_p", (rows,), np.float32),
            ("seed", (rows, 2), np.uint32),
            ("min_loops", (rows,), np.int32),
            ("exit_threshold", (rows,), np.float32),
        )
    )
