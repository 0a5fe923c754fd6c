"""The tasks of ouro-tiny: problems drawn with NumPy, and which of them are held out.

    addition      17+25=             " 42"      operands of 1 to 4 digits
    subtraction   17-85=             " -68"     operands of 1 to 4 digits, any sign
    lookup        a=c;c=f;f=7;a?     " 7"       8 to 10 variables, 1 to 6 hops, any order
    reverse       rev:stone=         " enots"   1 to 12 letters a-z
    sort          sort:stone=        " enost"   1 to 12 letters a-z
    count         count:l,hello=     " 2"       how often a letter occurs in 1 to 12 letters

An answer begins with one space and ends with the end token. A hash of the prompt decides whether a
problem is for training, for validation (which weights are kept) or for the final test.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

SPLITS = ("train", "validation", "test")
HASH_BUCKETS = 32  # bucket 0 is the test split, bucket 1 validation, the others are for training

MAX_DIGITS, MAX_HOPS, MAX_LETTERS = 4, 6, 12
MIN_VARIABLES, MAX_VARIABLES = 8, 10
OTHER_CHAINS_END = 0.5  # share of the variables off the asked chain that hold a digit

Piece = tuple[np.ndarray, np.ndarray]  # characters uint8 [n, k], how many of them count [n]
Question = tuple[list[Piece], list[Piece]]  # prompt, answer (without its leading space)


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


# --- pieces of text, many rows at once ------------------------------------------------------------


def _literal(text: str, rows: int) -> Piece:
    return np.tile(np.frombuffer(text.encode(), np.uint8), (rows, 1)), np.full(rows, len(text))


def _number(values: np.ndarray) -> Piece:
    """Decimal digits of non-negative integers below 10^5."""
    lengths = 1 + (values[:, None] >= 10 ** np.arange(1, 5)).sum(1)
    exponents = np.maximum(lengths[:, None] - 1 - np.arange(5), 0)
    return (ord("0") + values[:, None] // 10**exponents % 10).astype(np.uint8), lengths


def _join(pieces: Sequence[Piece], width: int) -> Piece:
    """Writes the pieces of each row one after the other into `width` characters."""
    rows = len(pieces[0][0])
    text, offsets = np.zeros((rows, width), np.uint8), np.zeros(rows, np.int64)
    for characters, lengths in pieces:
        row, column = np.nonzero(np.arange(characters.shape[1]) < lengths[:, None])
        text[row, offsets[row] + column] = characters[row, column]
        offsets = offsets + lengths
    return text, offsets


# --- the tasks: (generator, level of each row) -> prompt and answer -------------------------------


def _operands(rng: np.random.Generator, digits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two numbers, one of exactly `digits` digits and one of at most as many, in any order."""
    other = rng.integers(1, digits + 1)
    sizes = np.where(rng.random(len(digits)) < 0.5, (digits, other), (other, digits))
    low = np.where(sizes == 1, 0, 10 ** (sizes - 1))
    first, second = rng.integers(low, 10**sizes)
    return first, second


def _addition(rng: np.random.Generator, levels: np.ndarray) -> Question:
    a, b = _operands(rng, levels)
    n = len(levels)
    return [_number(a), _literal("+", n), _number(b), _literal("=", n)], [_number(a + b)]


def _subtraction(rng: np.random.Generator, levels: np.ndarray) -> Question:
    a, b = _operands(rng, levels)
    n = len(levels)
    minus = (_literal("-", n)[0], (a < b).astype(np.int64))
    prompt = [_number(a), _literal("-", n), _number(b), _literal("=", n)]
    return prompt, [minus, _number(abs(a - b))]


def _assignments(rng: np.random.Generator, hops: np.ndarray, variables: np.ndarray) -> Question:
    """Variables 0..hops-1 are the asked chain; the others hold a digit or an earlier variable."""
    n, node = len(hops), np.arange(MAX_VARIABLES)
    letters = ord("a") + rng.permuted(np.tile(np.arange(26), (n, 1)), axis=1)[:, :MAX_VARIABLES]
    digits = ord("0") + rng.integers(0, 10, (n, MAX_VARIABLES))
    on_chain = node < hops[:, None]
    target = np.where(on_chain, node + 1, rng.integers(0, np.maximum(node, 1), (n, MAX_VARIABLES)))
    ends = rng.random((n, MAX_VARIABLES)) < OTHER_CHAINS_END
    ends = np.where(on_chain, node == hops[:, None] - 1, ends | (node == hops[:, None]))
    target = np.minimum(target, MAX_VARIABLES - 1)
    values = np.where(ends, digits, np.take_along_axis(letters, target, axis=1))
    equals, semicolon = np.full_like(letters, ord("=")), np.full_like(letters, ord(";"))
    lines = np.stack([letters, equals, values, semicolon], axis=2)
    order = np.where(node < variables[:, None], rng.random((n, MAX_VARIABLES)), 2.0).argsort(1)
    lines = np.take_along_axis(lines, order[:, :, None], axis=1).reshape(n, 4 * MAX_VARIABLES)
    asked, one = letters[:, :1].astype(np.uint8), np.ones(n, np.int64)
    answer = np.take_along_axis(digits, hops[:, None] - 1, axis=1).astype(np.uint8)
    return [(lines.astype(np.uint8), 4 * variables), (asked, one), _literal("?", n)], [
        (answer, one)
    ]


def _lookup(rng: np.random.Generator, levels: np.ndarray) -> Question:
    variables = rng.integers(MIN_VARIABLES, MAX_VARIABLES + 1, len(levels))
    return _assignments(rng, levels, variables)


def _small_lookup(rng: np.random.Generator, levels: np.ndarray) -> Question:
    return _assignments(rng, levels, rng.integers(levels, MIN_VARIABLES))


def _letters(rng: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
    return rng.integers(ord("a"), ord("z") + 1, (len(lengths), MAX_LETTERS)).astype(np.uint8)


def _reverse(rng: np.random.Generator, levels: np.ndarray) -> Question:
    n, word = len(levels), _letters(rng, levels)
    backwards = np.maximum(levels[:, None] - 1 - np.arange(MAX_LETTERS), 0)
    answer = np.take_along_axis(word, backwards, axis=1)
    return [_literal("rev:", n), (word, levels), _literal("=", n)], [(answer, levels)]


def _sort(rng: np.random.Generator, levels: np.ndarray) -> Question:
    n, word = len(levels), _letters(rng, levels)
    answer = np.sort(np.where(np.arange(MAX_LETTERS) < levels[:, None], word, 255), axis=1)
    prompt = [_literal("sort:", n), (word, levels), _literal("=", n)]
    return prompt, [(answer.astype(np.uint8), levels)]


def _count(rng: np.random.Generator, levels: np.ndarray) -> Question:
    """Words over 1 to 6 letters, so that counts vary; one asked letter in ten is absent."""
    n = len(levels)
    alphabet = ord("a") + rng.permuted(np.tile(np.arange(26), (n, 1)), axis=1).astype(np.uint8)
    used = rng.integers(1, 7, n)
    word = rng.integers(0, used[:, None], (n, MAX_LETTERS))
    occurring = word[np.arange(n), rng.integers(0, levels)]
    asked = np.where(rng.random(n) < 0.1, used, occurring)
    count = ((word == asked[:, None]) & (np.arange(MAX_LETTERS) < levels[:, None])).sum(1)
    asked = (np.take_along_axis(alphabet, asked[:, None], axis=1), np.ones(n, np.int64))
    word = (np.take_along_axis(alphabet, word, axis=1), levels)
    prompt = [_literal("count:", n), asked, _literal(",", n), word, _literal("=", n)]
    return prompt, [_number(count)]


@dataclasses.dataclass(frozen=True)
class Task:
    """weights[i]: how often training draws level i + 1. share: of its family's training rows.

    An examined task is scored, each level drawn equally often.
    """

    name: str
    family: str
    make: Callable[[np.random.Generator, np.ndarray], Question]
    weights: tuple[float, ...]
    share: float
    examined: bool = True


FAMILY_WIDTHS = {"arithmetic": 16, "strings": 32, "lookup": 48}
_BY_LENGTH = tuple(float(3 + length) for length in range(1, MAX_LETTERS + 1))
TASKS = (
    Task("addition", "arithmetic", _addition, (1, 2, 3, 4), 0.45),
    Task("subtraction", "arithmetic", _subtraction, (1, 2, 3, 4), 0.55),
    Task("lookup", "lookup", _lookup, (1, 1, 1, 1.5, 2, 2), 0.85),
    Task("reverse", "strings", _reverse, _BY_LENGTH, 0.25),
    Task("sort", "strings", _sort, _BY_LENGTH, 0.4),
    Task("count", "strings", _count, _BY_LENGTH, 0.35),
    Task("small_lookup", "lookup", _small_lookup, (1, 1, 1, 1, 1, 1), 0.15, examined=False),
)
EXAMINED = tuple(task.name for task in TASKS if task.examined)


# --- drawing problems -----------------------------------------------------------------------------


def bucket(problems: Problems) -> np.ndarray:
    """FNV-1a of each prompt, its high half modulo HASH_BUCKETS."""
    value = np.full(len(problems), 0xCBF29CE484222325, np.uint64)
    for column in range(int(problems.prompt_length.max(initial=0))):
        mixed = (value ^ problems.text[:, column]) * np.uint64(0x100000001B3)
        value = np.where(column < problems.prompt_length, mixed, value)
    return (value >> np.uint64(32)) % np.uint64(HASH_BUCKETS)


def split_of(problems: Problems) -> np.ndarray:
    """Index into SPLITS of each problem."""
    return np.array([2, 1, 0])[np.minimum(bucket(problems), 2).astype(np.int64)]


def make_task(task: Task, rng: np.random.Generator, levels: np.ndarray) -> Problems:
    """One problem of the task for each level, of any split."""
    width, space = FAMILY_WIDTHS[task.family], _literal(" ", len(levels))
    prompt, answer = task.make(rng, levels)
    _, prompt_length = _join(prompt, width)
    text, length = _join([*prompt, space, *answer], width)
    return Problems(text, prompt_length, length, np.full(len(text), TASKS.index(task)), levels)


def training_rows(family: str, rows: int, rng: np.random.Generator) -> Problems:
    """Training problems of one family, tasks and levels mixed by their weights."""
    tasks = [task for task in TASKS if task.family == family]
    counts = rng.multinomial(rows + rows // 4 + 8, [task.share for task in tasks])
    parts = []
    for task, count in zip(tasks, counts):
        weights = np.array(task.weights) / sum(task.weights)
        levels = 1 + rng.choice(len(weights), count, p=weights)
        parts.append(make_task(task, rng, levels))
    problems = Problems.concatenate(parts)
    keep = rng.permutation(np.flatnonzero(split_of(problems) == 0))[:rows]
    assert len(keep) == rows
    return problems[keep]


def examination(split: str, per_task: int, seed: int = 0) -> dict[str, Problems]:
    """Different problems of a held-out split for each examined task, its levels equally often."""
    papers = {}
    for index, task in enumerate(TASKS):
        if not task.examined:
            continue
        rng = np.random.default_rng([seed, SPLITS.index(split), index])
        levels = 1 + rng.integers(0, len(task.weights), 64 * per_task + 1024)
        drawn = make_task(task, rng, levels)
        drawn = drawn[split_of(drawn) == SPLITS.index(split)]
        _, first = np.unique(drawn.text, axis=0, return_index=True)
        papers[task.name] = drawn[np.sort(first)[:per_task]]
        assert len(papers[task.name]) == per_task
    return papers
