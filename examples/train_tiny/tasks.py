"""The tasks of ouro-tiny: (random generator, level of each row) -> prompts and answers.

    addition      17+25=             " 42"      operands of 1 to 4 digits
    subtraction   17-85=             " -68"     operands of 1 to 4 digits, any sign
    lookup        a=c;c=f;f=7;a?     " 7"       8 to 10 variables, 1 to 6 hops, lines in any order
    reverse       rev:stone=         " enots"   1 to 12 letters a-z
    sort          sort:stone=        " enost"   1 to 12 letters a-z
    count         count:l,hello=     " 2"       how often a letter occurs in 1 to 12 letters

An answer begins with one space and ends with the end token.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from examples.train_tiny.text import Piece, literal, number

Question = tuple[list[Piece], list[Piece]]  # prompt, answer (without its leading space)

MAX_DIGITS, MAX_HOPS, MAX_LETTERS = 4, 6, 12
MIN_VARIABLES, MAX_VARIABLES = 8, 10
OTHER_CHAINS_END = 0.5  # share of the variables off the first chain that hold a digit


def operands(
    rng: np.random.Generator,
    digits: np.ndarray,
    partner: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Two numbers, one of exactly `digits` digits and one of at most as many, in any order.

    One in five pairs lies near a partner, where random numbers hardly ever fall; in another fifth
    the first number ends in nines.
    """
    kind, limit = rng.random(len(digits)), 10**digits
    first = rng.integers(np.where(digits == 1, 0, limit // 10), limit)
    rounded = 10 ** rng.integers(0, digits + 1)
    first = np.where(kind < 0.2, first - first % rounded + rounded - 1, first)
    size = 10 ** rng.integers(1, digits + 1)
    second = rng.integers(np.where(size == 10, 0, size // 10), size)
    distance = rng.integers(-1, 2, len(digits)) * rng.integers(0, 10 ** rng.integers(0, digits) + 1)
    near = np.clip(partner(first, limit) + distance, 0, limit - 1)
    second = np.where(kind > 0.8, near, second)
    swap = rng.random(len(digits)) < 0.5
    return np.where(swap, second, first), np.where(swap, first, second)


def addition(rng: np.random.Generator, levels: np.ndarray) -> Question:
    """Near pairs have sums about the next power of ten."""
    a, b = operands(rng, levels, lambda first, limit: limit - first)
    n = len(levels)
    return [number(a), literal("+", n), number(b), literal("=", n)], [number(a + b)]


def subtraction(rng: np.random.Generator, levels: np.ndarray) -> Question:
    """Near pairs have differences about zero."""
    a, b = operands(rng, levels, lambda first, limit: first)
    n = len(levels)
    minus = (literal("-", n)[0], (a < b).astype(np.int64))
    prompt = [number(a), literal("-", n), number(b), literal("=", n)]
    return prompt, [minus, number(abs(a - b))]


def words(rng: np.random.Generator, few_letters: np.ndarray) -> np.ndarray:
    """[n, MAX_LETTERS]: letters of the whole alphabet, or of 1 to 6 letters of it."""
    n, shape = len(few_letters), (len(few_letters), MAX_LETTERS)
    alphabet = ord("a") + rng.permuted(np.tile(np.arange(26), (n, 1)), axis=1).astype(np.uint8)
    used = np.where(few_letters, rng.integers(1, 7, n), 26)
    return np.take_along_axis(alphabet, rng.integers(0, used[:, None], shape), axis=1)


def reverse(rng: np.random.Generator, levels: np.ndarray) -> Question:
    n = len(levels)
    word = words(rng, rng.random(n) < 0.2)
    backwards = np.maximum(levels[:, None] - 1 - np.arange(MAX_LETTERS), 0)
    answer = np.take_along_axis(word, backwards, axis=1)
    return [literal("rev:", n), (word, levels), literal("=", n)], [(answer, levels)]


def sort(rng: np.random.Generator, levels: np.ndarray) -> Question:
    n = len(levels)
    word = words(rng, rng.random(n) < 0.4)
    answer = np.sort(np.where(np.arange(MAX_LETTERS) < levels[:, None], word, 255), axis=1)
    prompt = [literal("sort:", n), (word, levels), literal("=", n)]
    return prompt, [(answer, levels)]


def count(rng: np.random.Generator, levels: np.ndarray) -> Question:
    """Four words in five repeat few letters; one asked letter in ten is any letter."""
    n = len(levels)
    word = words(rng, rng.random(n) < 0.8)
    occurring = word[np.arange(n), rng.integers(0, levels)]
    any_letter = rng.integers(ord("a"), ord("z") + 1, n).astype(np.uint8)
    asked = np.where(rng.random(n) < 0.1, any_letter, occurring)[:, None]
    occurs = (word == asked) & (np.arange(MAX_LETTERS) < levels[:, None])
    asked = (asked, np.ones(n, np.int64))
    prompt = [literal("count:", n), asked, literal(",", n), (word, levels), literal("=", n)]
    return prompt, [number(occurs.sum(1))]


@dataclasses.dataclass(frozen=True)
class Assignments:
    """lines: the text "a=c;c=f;f=7;". letters, answers, hops: [n, MAX_VARIABLES], for each
    variable its name, the digit that it leads to and in how many hops (0: no such variable).

    Variable 0 is the head of a chain of as many hops as were asked for.
    """

    lines: Piece
    letters: np.ndarray
    answers: np.ndarray
    hops: np.ndarray


def assignments(
    rng: np.random.Generator, first_hops: np.ndarray, variables: np.ndarray
) -> Assignments:
    """Variables 0..first_hops-1 are a chain; each other holds a digit or an earlier variable.

    The first one off the chain holds a digit, so that the answer is never the only digit.
    """
    n, node, shape = len(first_hops), np.arange(MAX_VARIABLES), (len(first_hops), MAX_VARIABLES)
    letters = ord("a") + rng.permuted(np.tile(np.arange(26), (n, 1)), axis=1)[:, :MAX_VARIABLES]
    digits = ord("0") + rng.integers(0, 10, shape)
    length = first_hops[:, None]
    ends = (rng.random(shape) < OTHER_CHAINS_END) | (node == length)
    ends = np.where(node < length, node == length - 1, ends)
    target = np.where(node < length, node + 1, rng.integers(0, np.maximum(node, 1), shape))
    target = np.minimum(target, MAX_VARIABLES - 1)

    hops = np.maximum(length - node, 1)
    answers = np.where(node < length, np.take_along_axis(digits, length - 1, axis=1), digits)
    for j in node[1:]:  # those off the chain, after what they point at
        follows, at = (j >= first_hops) & ~ends[:, j], target[:, j : j + 1]
        hops[follows, j] = 1 + np.take_along_axis(hops, at, axis=1)[follows, 0]
        answers[follows, j] = np.take_along_axis(answers, at, axis=1)[follows, 0]

    values = np.where(ends, digits, np.take_along_axis(letters, target, axis=1))
    equals, semicolon = np.full_like(letters, ord("=")), np.full_like(letters, ord(";"))
    lines = np.stack([letters, equals, values, semicolon], axis=2).astype(np.uint8)
    exists = node < variables[:, None]
    order = np.where(exists, rng.random(shape), 2.0).argsort(1)
    lines = np.take_along_axis(lines, order[:, :, None], axis=1).reshape(n, 4 * MAX_VARIABLES)
    return Assignments(
        (lines, 4 * variables),
        letters.astype(np.uint8),
        answers.astype(np.uint8),
        np.where(exists, hops, 0),
    )


def lookup(rng: np.random.Generator, levels: np.ndarray) -> Question:
    n = len(levels)
    drawn = assignments(rng, levels, rng.integers(MIN_VARIABLES, MAX_VARIABLES + 1, n))
    one = np.ones(n, np.int64)
    prompt = [drawn.lines, (drawn.letters[:, :1], one), literal("?", n)]
    return prompt, [(drawn.answers[:, :1], one)]


@dataclasses.dataclass(frozen=True)
class Task:
    """weights[i]: how often training draws level i + 1. share: of its family's training rows."""

    name: str
    family: str
    make: Callable[[np.random.Generator, np.ndarray], Question]
    weights: tuple[float, ...]
    share: float


FAMILY_WIDTHS = {"arithmetic": 16, "strings": 32, "lookup": 48}
_BY_LENGTH = tuple(float(3 + length) for length in range(1, MAX_LETTERS + 1))
TASKS = (
    Task("addition", "arithmetic", addition, (1, 2, 3, 4), 0.45),
    Task("subtraction", "arithmetic", subtraction, (1, 2, 3, 4), 0.55),
    Task("lookup", "lookup", lookup, (1, 1, 1, 1, 2, 3), 1.0),
    Task("reverse", "strings", reverse, _BY_LENGTH, 0.25),
    Task("sort", "strings", sort, _BY_LENGTH, 0.4),
    Task("count", "strings", count, _BY_LENGTH, 0.35),
)
