"""Exact-match accuracy of parameters by dense passes: fast, for use while training.

The gold answer is fed and every output token must be the argmax at the depth where its input
token left the loop. That is exact match of greedy decoding: up to its first mistake, decoding is
fed the gold answer too. The result through the engine is examples/train_tiny/evaluate.py's.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.train_tiny import model
from examples.train_tiny.batch import DECODED, NOTHING, Batch, joined, plain_rows
from examples.train_tiny.data import Problems
from examples.train_tiny.objective import POLICY, gate_logit, is_decoded
from rlt_jax.models.ouro import OuroParams, coda
from rlt_jax.models.ouro_config import OuroConfig

CHUNK = 256  # problems of each task in one pass


class Grades(NamedTuple):
    """Exact match of each problem at each depth [D, n] and where it really left the loop [n];
    the exit depths of all decoded tokens (without the first output and the end token)."""

    by_depth: np.ndarray
    exact: np.ndarray
    depths: np.ndarray


@functools.partial(jax.jit, static_argnums=0)
def _grade(config: OuroConfig, params: OuroParams, batch: Batch, threshold: jax.Array):
    """right [D, t], the next token is the argmax at each depth; exit depth [t].

    threshold 1: every token runs to full depth.
    """
    params = jax.tree.map(lambda leaf: leaf.astype(POLICY.dtype), params)
    rows, full = joined(batch), config.total_ut_steps
    hidden = model.embed(params, rows.tokens)
    adaptive = is_decoded(rows.role) & (threshold < 1)

    def one_loop(carry, depth):
        hidden, history, remaining, exits = carry
        hidden, history = model.loop(config, POLICY, params, batch, hidden, history, exits < depth)
        right = coda(POLICY, params, hidden).argmax(-1) == rows.target
        remaining = remaining * (1 - jax.nn.sigmoid(gate_logit(params, hidden)))
        leaves = adaptive & (1 - remaining >= threshold) & (depth >= min(2, full))
        return (
            hidden,
            history,
            remaining,
            jnp.where(leaves, jnp.minimum(exits, depth), exits),
        ), right

    start = (
        hidden,
        model.no_history(config, batch, hidden.dtype),
        jnp.ones(rows.tokens.shape, jnp.float32),
        jnp.full(rows.tokens.shape, full),
    )
    (_, _, _, exits), right = jax.lax.scan(one_loop, start, 1 + jnp.arange(full))
    return right, exits


def grade(
    config: OuroConfig, params: OuroParams, papers: Mapping[str, Problems], threshold: float = 1.0
) -> dict[str, Grades]:
    """Grades of each task; all have equally many problems, taken CHUNK at a time."""
    graded = {name: [] for name in papers}
    (total,) = {len(problems) for problems in papers.values()}
    for start in range(0, total, CHUNK):
        batch = tuple(plain_rows(p[start : start + CHUNK]) for p in papers.values())
        right, exits = jax.device_get(_grade(config, params, batch, jnp.float32(threshold)))
        ends = np.cumsum([rows.tokens.size for rows in batch])[:-1]
        parts = zip(np.split(right, ends, axis=-1), np.split(exits, ends))
        for grades, rows, (right, exits) in zip(graded.values(), batch, parts):
            right, exits = (a.reshape(*a.shape[:-1], *rows.role.shape) for a in (right, exits))
            at_exit = np.take_along_axis(right, exits[None] - 1, axis=0)[0]
            silent = rows.role == NOTHING
            grades.append(
                Grades(
                    by_depth=(right | silent).all(-1),
                    exact=(at_exit | silent).all(-1),
                    depths=exits[rows.role == DECODED],
                )
            )
    return {
        name: Grades(*(np.concatenate(arrays, axis=-1) for arrays in zip(*grades)))
        for name, grades in graded.items()
    }


def _percent(exact: np.ndarray) -> float:
    return round(100 * float(exact.mean()), 2)


def accuracy_by_depth(graded: Mapping[str, Grades]) -> dict[str, list[float]]:
    """For each task: exact match in percent with total_ut_steps = 1..D."""
    return {name: [_percent(row) for row in grades.by_depth] for name, grades in graded.items()}


def accuracy_by_level(grades: Grades, problems: Problems) -> dict[int, list[float]]:
    """For each level of one task: the same."""
    return {
        int(level): [_percent(row) for row in grades.by_depth[:, problems.level == level]]
        for level in np.unique(problems.level)
    }


def accuracy_by_threshold(
    config: OuroConfig,
    params: OuroParams,
    papers: Mapping[str, Problems],
    thresholds: Sequence[float],
) -> dict[float, dict[str, float]]:
    """For each threshold: exact match per task in percent, their "mean", and "mean_depth"."""
    table = {}
    for threshold in thresholds:
        graded = grade(config, params, papers, threshold)
        row = {name: _percent(grades.exact) for name, grades in graded.items()}
        depths = np.concatenate([grades.depths for grades in graded.values()])
        row["mean"] = round(float(np.mean([row[name] for name in papers])), 2)
        row["mean_depth"] = round(float(depths.mean()), 3)
        table[threshold] = row
    return table
