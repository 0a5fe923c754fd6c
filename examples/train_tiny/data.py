"""Problems for training and for the examination, and which of them are held out.

A hash of the prompt decides: one bucket in 32 is the final test, one is validation (which weights
are kept), all the others are for training.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from examples.train_tiny.tasks import (
    FAMILY_WIDTHS,
    MAX_HOPS,
    MAX_VARIABLES,
    MIN_VARIABLES,
    TASKS,
    Task,
    assignments,
)
from examples.train_tiny.text import Piece, fnv1a, fnv1a_step, join, literal

SPLITS = ("train", "validation", "test")
HASH_BUCKETS = 32  # bucket 0 is the test split, bucket 1 validation


@dataclasses.dataclass(frozen=True)
class Problems:
    """n problems of one family. text: uint8 [n, width], prompt, answer, zeros.

    prompt_length, length: [n], characters of the prompt, and of prompt and answer together.
    task: [n], index into TASKS. level: [n], its difficulty (digits, hops or letters).
    """

    text: np.ndarray
    prompt_length: np.ndarray
    length: np.ndarray
    task: np.ndarray
    level: np.ndarray

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, rows) -> "Problems":
        return Problems(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))

    def prompts(self) -> list[str]:
        return [bytes(t[:p]).decode() for t, p in zip(self.text, self.prompt_length)]

    def answers(self) -> list[str]:
        ends = zip(self.text, self.prompt_length, self.length)
        return [bytes(t[p:n]).decode() for t, p, n in ends]

    @staticmethod
    def concatenate(parts: Sequence["Problems"]) -> "Problems":
        fields = [field.name for field in dataclasses.fields(Problems)]
        return Problems(*(np.concatenate([getattr(p, name) for p in parts]) for name in fields))


def split_of(prompt_hash: np.ndarray) -> np.ndarray:
    """Index into SPLITS, from the high half of each prompt's hash."""
    bucket = (prompt_hash >> np.uint64(32)) % np.uint64(HASH_BUCKETS)
    return np.array([2, 1, 0])[np.minimum(bucket, 2).astype(np.int64)]


def make_problems(task: Task, rng: np.random.Generator, levels: np.ndarray) -> Problems:
    """One problem of the task for each level, of any split."""
    width, space = FAMILY_WIDTHS[task.family], literal(" ", len(levels))
    prompt, answer = task.make(rng, levels)
    _, prompt_length = join(prompt, width)
    text, length = join([*prompt, space, *answer], width)
    return Problems(text, prompt_length, length, np.full(len(text), TASKS.index(task)), levels)


def _training_levels(task: Task, count: int, rng: np.random.Generator) -> np.ndarray:
    weights = np.array(task.weights) / sum(task.weights)
    return 1 + rng.choice(len(weights), count, p=weights)


def training_problems(family: str, count: int, rng: np.random.Generator) -> Problems:
    """Problems of one family for training, tasks and levels mixed by their weights."""
    tasks = [task for task in TASKS if task.family == family]
    counts = rng.multinomial(count + count // 4 + 32, [task.share for task in tasks])
    problems = Problems.concatenate(
        [make_problems(task, rng, _training_levels(task, n, rng)) for task, n in zip(tasks, counts)]
    )
    split = split_of(fnv1a((problems.text, problems.prompt_length)))
    keep = rng.permutation(np.flatnonzero(split == 0))[:count]
    assert len(keep) == count
    return problems[keep]


@dataclasses.dataclass(frozen=True)
class LookupSheets:
    """Assignments with several questions each, for training: they share the reading of the lines.

    names, answers: uint8 [n, MAX_VARIABLES], the variables in the order of asking and what they
    lead to. asked: [n, MAX_VARIABLES], false where there is no question: no such variable, too
    many hops, or a prompt that is held out.
    """

    lines: Piece
    names: np.ndarray
    answers: np.ndarray
    asked: np.ndarray


def training_sheets(count: int, rng: np.random.Generator, small_share: float) -> LookupSheets:
    """`small_share` of the rows have fewer variables than the examined task."""
    (task,) = (task for task in TASKS if task.family == "lookup")
    hops = _training_levels(task, count, rng)
    variables = np.where(
        rng.random(count) < small_share,
        rng.integers(hops, MIN_VARIABLES),
        rng.integers(MIN_VARIABLES, MAX_VARIABLES + 1, count),
    )
    drawn = assignments(rng, hops, variables)
    prompt_hash = fnv1a_step(fnv1a(drawn.lines)[:, None], drawn.letters)
    prompt_hash = fnv1a_step(prompt_hash, np.uint8(ord("?")))
    asked = (drawn.hops > 0) & (drawn.hops <= MAX_HOPS) & (split_of(prompt_hash) == 0)
    return LookupSheets(drawn.lines, drawn.letters, drawn.answers, asked)


def examination(split: str, per_task: int, seed: int = 0) -> dict[str, Problems]:
    """Different problems of a held-out split for each task, its levels equally often."""
    papers = {}
    for index, task in enumerate(TASKS):
        rng = np.random.default_rng([seed, SPLITS.index(split), index])
        levels = 1 + rng.integers(0, len(task.weights), 64 * per_task + 1024)
        drawn = make_problems(task, rng, levels)
        held_out = split_of(fnv1a((drawn.text, drawn.prompt_length))) == SPLITS.index(split)
        drawn = drawn[held_out]
        _, first = np.unique(drawn.text, axis=0, return_index=True)
        papers[task.name] = drawn[np.sort(first)[:per_task]]
        assert len(papers[task.name]) == per_task
    return papers
