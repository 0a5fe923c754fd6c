"""Problems as device arrays, and what the model must say at each of their positions."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from examples.make_random_checkpoint import END_OF_TEXT, byte_level_tokenizer
from examples.train_tiny.data import FAMILY_WIDTHS, Problems, training_rows
from examples.train_tiny.model import Shapes, flatten

VOCAB_SIZE = 264  # 3 special tokens, 256 bytes, 5 reserved


def _byte_ids() -> np.ndarray:
    """Token id of each ASCII byte."""
    tokenizer = byte_level_tokenizer(VOCAB_SIZE)
    return np.array([tokenizer.encode(chr(byte)).ids[0] for byte in range(128)], np.int32)


BYTE_IDS = _byte_ids()
END_ID = byte_level_tokenizer(VOCAB_SIZE).token_to_id(END_OF_TEXT)


@struct.dataclass
class Rows:
    """Rows of one width: tokens [n, w] (after `length` anything), prompt_length, length [n]."""

    tokens: jax.Array
    prompt_length: jax.Array
    length: jax.Array


Batch = tuple[Rows, ...]


@dataclasses.dataclass(frozen=True)
class Targets:
    """All [t]. tokens: the next token. is_output: it is part of the answer or its end.

    is_decoded: the input token is fed at decode time, where the depth is adaptive: is_output
    without the first output, which comes from the prompt's last position. is_end: the next token
    ends the answer. group: index of the token's group of rows.
    """

    tokens: jax.Array
    is_output: jax.Array
    is_decoded: jax.Array
    is_end: jax.Array
    group: jax.Array


def rows_of(problems: Problems) -> Rows:
    return Rows(
        tokens=BYTE_IDS[problems.text],
        prompt_length=problems.prompt_length.astype(np.int32),
        length=problems.length.astype(np.int32),
    )


def shapes_of(batch: Batch) -> Shapes:
    return tuple(rows.tokens.shape for rows in batch)


def targets_of(batch: Batch) -> Targets:
    tokens, is_output, is_decoded, is_end, group = [], [], [], [], []
    for index, rows in enumerate(batch):
        width = rows.tokens.shape[1]
        position = jnp.arange(width)
        prompt, length = rows.prompt_length[:, None], rows.length[:, None]
        following = jnp.pad(rows.tokens[:, 1:], ((0, 0), (0, 1)))
        tokens.append(jnp.where(position == length - 1, END_ID, following))
        is_output.append((position >= prompt - 1) & (position < length))
        is_decoded.append((position >= prompt) & (position < length))
        is_end.append(jnp.broadcast_to(position == length - 1, rows.tokens.shape))
        group.append(jnp.full(rows.tokens.shape, index))
    return Targets(*map(flatten, (tokens, is_output, is_decoded, is_end, group)))


def training_batch(rows_per_family: Mapping[str, int], seed: int, step: int) -> Batch:
    """The batch of one step: the same for the same arguments."""
    families = [family for family in FAMILY_WIDTHS if family in rows_per_family]
    return tuple(
        rows_of(training_rows(family, rows_per_family[family], np.random.default_rng(key)))
        for index, family in enumerate(families)
        for key in [[seed, step, index]]
    )


def training_batches(
    rows_per_family: Mapping[str, int], seed: int, first_step: int, ahead: int = 12
) -> Iterator[tuple[int, Batch]]:
    """(step, batch) without end, drawn by threads `ahead` of their use."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        pending = collections.deque()
        step = first_step
        try:
            while True:
                while len(pending) < ahead:
                    next_step = step + len(pending)
                    pending.append(pool.submit(training_batch, rows_per_family, seed, next_step))
                yield step, pending.popleft().result()
                step += 1
        finally:
            for future in pending:
                future.cancel()
