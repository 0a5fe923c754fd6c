"""What goes into a program and what comes out for the host, each packed in one int32 array.

One NumPy array straight into the program is the cheapest way to the device, and one array to copy
the cheapest way back. A fresh input is made for every step and never written again: the device may
still be reading it.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """Named fields (name, shape, dtype) one after the other in an int32 array. dtype: one of 4
    bytes, whose bits are kept, or bool, which takes as much."""

    fields: tuple[tuple[str, tuple[int, ...], type], ...]

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for _, shape, _ in self.fields)

    def pack(self, values: Mapping[str, np.ndarray | jax.Array]) -> np.ndarray | jax.Array:
        """One int32 array: a fresh NumPy array, or inside a program, of traced values, a traced
        one. Raises ValueError when a field is missing or misshapen."""
        traced = any(isinstance(value, jax.Array) for value in values.values())
        xp, words = (jnp, []) if traced else (np, [])
        for name, shape, dtype in self.fields:
            if name not in values:
                raise ValueError(f"{name} is missing")
            value = xp.asarray(values[name], dtype)
            if value.shape != shape:
                raise ValueError(f"{name} has shape {value.shape}: must be {shape}")
            value = value.ravel()
            words.append(value.astype(np.int32) if dtype is np.bool_ else _bits(value, np.int32))
        return xp.concatenate(words)

    def unpack(self, packed: np.ndarray | jax.Array) -> dict[str, np.ndarray | jax.Array]:
        """The fields: views of a NumPy array (but of bool fields), static slices in a program."""
        values, start = {}, 0
        for name, shape, dtype in self.fields:
            size = math.prod(shape)
            field = packed[start : start + size].reshape(shape)
            values[name] = field != 0 if dtype is np.bool_ else _bits(field, dtype)
            start += size
        return values


def _bits(array: np.ndarray | jax.Array, dtype: type) -> np.ndarray | jax.Array:
    """The same bits as another dtype of 4 bytes."""
    if isinstance(array, np.ndarray):
        return array.view(dtype)
    return lax.bitcast_convert_type(array, dtype)


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


def transfer_layout() -> PackedLayout:
    """Which pages of which slot: see engine.types.Transfer."""
    return PackedLayout(_int32_fields("slot first count", 1))


def result_layout(rows: int, tokens: int = 0, signal: str | None = None) -> PackedLayout:
    """What a program gives the host: with tokens, token and logprob of so many per row; the signal,
    "exit_probability" or "leaves". Without any of them: a word that shows that it is done."""
    fields = ()
    if tokens:
        fields += (("token", (rows, tokens), np.int32), ("logprob", (rows, tokens), np.float32))
    if signal:
        fields += ((signal, (rows,), np.bool_ if signal == "leaves" else np.float32),)
    return PackedLayout(fields or (("done", (1,), np.int32),))
