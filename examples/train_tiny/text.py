"""Pieces of ASCII text of many rows at once, as NumPy arrays."""

from collections.abc import Sequence

import numpy as np

Piece = tuple[np.ndarray, np.ndarray]  # characters uint8 [n, k], how many of them count [n]

FNV_OFFSET, FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)


def literal(text: str, rows: int) -> Piece:
    return np.tile(np.frombuffer(text.encode(), np.uint8), (rows, 1)), np.full(rows, len(text))


def number(values: np.ndarray) -> Piece:
    """Decimal digits of non-negative integers below 10^5."""
    lengths = 1 + (values[:, None] >= 10 ** np.arange(1, 5)).sum(1)
    exponents = np.maximum(lengths[:, None] - 1 - np.arange(5), 0)
    return (ord("0") + values[:, None] // 10**exponents % 10).astype(np.uint8), lengths


def join(pieces: Sequence[Piece], width: int) -> Piece:
    """Writes the pieces of each row one after the other into `width` characters, then zeros."""
    rows = len(pieces[0][0])
    text, offsets = np.zeros((rows, width), np.uint8), np.zeros(rows, np.int64)
    for characters, lengths in pieces:
        row, column = np.nonzero(np.arange(characters.shape[1]) < lengths[:, None])
        text[row, offsets[row] + column] = characters[row, column]
        offsets = offsets + lengths
    return text, offsets


def fnv1a_step(value: np.ndarray, characters: np.ndarray) -> np.ndarray:
    """The hash after one more character."""
    return (value ^ characters) * FNV_PRIME


def fnv1a(piece: Piece) -> np.ndarray:
    """64-bit FNV-1a of each row."""
    characters, lengths = piece
    value = np.full(len(characters), FNV_OFFSET)
    for column in range(int(lengths.max(initial=0))):
        mixed = fnv1a_step(value, characters[:, column])
        value = np.where(column < lengths, mixed, value)
    return value
