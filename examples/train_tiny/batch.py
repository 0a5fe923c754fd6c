"""Rows of tokens, and what the model must say at each of their positions."""

import collections
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from examples.make_random_checkpoint import END_OF_TEXT, byte_level_tokenizer
from examples.train_tiny.data import LookupSheets, Problems, training_problems, training_sheets
from examples.train_tiny.tasks import FAMILY_WIDTHS, MAX_VARIABLES

VOCAB_SIZE = 264  # 3 special tokens, 256 bytes, 5 reserved
END_ID = byte_level_tokenizer(VOCAB_SIZE).token_to_id(END_OF_TEXT)
SMALL_LOOKUPS = 0.2  # share of training's lookups with fewer variables than the examined task
QUESTION_WIDTH = 4  # "a?", a space and the digit

# What the position's next token is. The first output comes from the prompt, at full depth;
# the others from a decoded token, at adaptive depth.
NOTHING, FIRST_OUTPUT, DECODED, END = range(4)


def _byte_ids() -> np.ndarray:
    """Token id of each ASCII byte."""
    tokenizer = byte_level_tokenizer(VOCAB_SIZE)
    return np.array([tokenizer.encode(chr(byte)).ids[0] for byte in range(128)], np.int32)


BYTE_IDS = _byte_ids()


@struct.dataclass
class Rows:
    """Rows of one width, each array [n, w].

    target: the next token, where role (above) is not NOTHING. question: 0 is seen by all later
    tokens of the row, any other number by the tokens of the same number only.
    """

    tokens: jax.Array
    target: jax.Array
    role: jax.Array
    position: jax.Array
    question: jax.Array


Batch = tuple[Rows, ...]


def plain_rows(problems: Problems) -> Rows:
    """One problem in each row."""
    tokens, position = BYTE_IDS[problems.text], np.arange(problems.text.shape[1])
    prompt, length = problems.prompt_length[:, None], problems.length[:, None]
    target = np.where(position == length - 1, END_ID, np.roll(tokens, -1, axis=1))
    role = np.where(position == prompt - 1, FIRST_OUTPUT, NOTHING)
    role = np.where((position >= prompt) & (position < length - 1), DECODED, role)
    role = np.where(position == length - 1, END, role)
    position = np.broadcast_to(position, tokens.shape)
    return Rows(tokens, target, role, position, np.zeros_like(tokens))


def sheet_rows(sheets: LookupSheets) -> Rows:
    """In each row the lines and then all their questions, each as if it followed the lines."""
    lines, length = sheets.lines
    n, width = len(lines), lines.shape[1] + QUESTION_WIDTH * MAX_VARIABLES
    mark, space = (np.full_like(sheets.names, ord(character)) for character in "? ")
    questions = np.stack([sheets.names, mark, space, sheets.answers], axis=2).reshape(n, -1)
    end = np.full(sheets.names.shape, END_ID)
    targets = np.stack([end, BYTE_IDS[space], BYTE_IDS[sheets.answers], end], axis=2)
    roles = np.array([NOTHING, FIRST_OUTPUT, DECODED, END]) * sheets.asked[:, :, None]

    column = np.arange(width)
    offset = column - length[:, None]  # into the questions
    inside = (offset >= 0) & (offset < questions.shape[1])
    at = np.clip(offset, 0, questions.shape[1] - 1)

    def pick(array):
        return np.take_along_axis(array.reshape(n, -1), at, axis=1)

    text = np.where(inside, pick(questions), np.pad(lines, ((0, 0), (0, width - lines.shape[1]))))
    return Rows(
        tokens=BYTE_IDS[text],
        target=pick(targets),
        role=np.where(inside, pick(roles), NOTHING),
        position=np.where(offset < 0, column, length[:, None] + at % QUESTION_WIDTH),
        question=np.where(offset < 0, 0, 1 + at // QUESTION_WIDTH),
    )


def flatten(groups: list[jax.Array]) -> jax.Array:
    """[n, w] arrays to one [t]."""
    return jnp.concatenate([group.reshape(-1) for group in groups])


def joined(batch: Batch) -> Rows:
    """All rows' tokens on one axis [t]."""
    return jax.tree.map(lambda *arrays: flatten(arrays), *batch)


def group_means(batch: Batch, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Means of masked values [..., t] over each group of rows: [..., groups]."""
    ends = np.cumsum([rows.tokens.size for rows in batch])[:-1]
    parts = zip(jnp.split(jnp.where(mask, values, 0), ends, axis=-1), jnp.split(mask, ends))
    return jnp.stack([v.sum(-1) / jnp.maximum(m.sum(), 1) for v, m in parts], axis=-1)


def training_batch(rows_per_family: Mapping[str, int], seed: int, step: int) -> Batch:
    """The batch of one step: the same for the same arguments."""
    batch = []
    for index, family in enumerate(FAMILY_WIDTHS):
        rng = np.random.default_rng([seed, step, index])
        count = rows_per_family[family]
        if family == "lookup":
            rows = sheet_rows(training_sheets(count, rng, SMALL_LOOKUPS))
        else:
            rows = plain_rows(training_problems(family, count, rng))
        batch.append(jax.tree.map(lambda array: array.astype(np.int16), rows))
    return tuple(batch)


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
