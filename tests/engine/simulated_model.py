"""The model of the simulated device: hashes of integers, which are the same in every process."""

import functools
from collections.abc import Sequence

import numpy as np

FULL_DEPTH = 4
VOCAB_SIZE = 29


def read_prompt(text: int, token: int) -> int:
    """What the device knows of a prompt after one more token."""
    return hash((text, token))


def read_text(tokens: Sequence[int]) -> int:
    """What the device knows of a whole text."""
    return functools.reduce(read_prompt, tokens, 0)


def prelude(text: int, position: int, token: int) -> int:
    return hash((text, position, token))


def loop(hidden: int, depth: int) -> int:
    return hash((hidden, depth))


def gate(hidden: int) -> np.float32:
    """The hazard: 0, 1/10, ... 1."""
    return np.float32(hidden % 11) / np.float32(10)


def coda(hidden: int, draw: tuple[int, ...] = ()) -> int:
    """The next token. draw: seed and output index where it is sampled, nothing where greedy."""
    return hash((hidden, draw)) % VOCAB_SIZE
