"""The exit rules, on hand-computed cases."""

import numpy as np
import pytest

from rlt_jax.config import ExitConfig
from rlt_jax.engine.exit_policy import (
    ExitBounds,
    OuroDelayedExit,
    OuroExit,
    RandomLookaheadExit,
    exit_policy,
)

OURO = OuroExit()


def exit_depth(bounds, signals, policy=OURO):
    """Runs a rule over a token's signals; (exit depth, loops whose signal was read)."""
    remaining, read = np.ones(1, np.float32), []
    leaves_at = bounds.max_loops
    for loop in range(1, bounds.max_loops + 1):
        if loop == leaves_at:
            return loop, read
        if loop in policy.gate_loops(bounds):
            read.append(loop)
            leaves, remaining = policy.decide(
                np.array([signals[loop - 1]], np.float32),
                remaining,
                np.array([loop]),
                np.array([bounds.min_loops]),
                np.array([bounds.threshold], np.float32),
            )
            if leaves[0]:
                leaves_at = min(leaves_at, loop + policy.lag)
                if leaves_at == loop:
                    return loop, read
    raise AssertionError("a token must leave at max_loops")


@pytest.mark.parametrize(
    ("hazards", "minimum", "maximum", "threshold", "depth"),
    [
        ((0.3, 0.3, 0.3), 2, 4, 0.5, 2),  # 1 - 0.49 = 0.51
        ((0.3, 0.2, 0.3), 2, 4, 0.5, 3),  # 0.44, then 0.608
        ((0.3, 0.3, 0.3), 1, 4, 0.2, 1),
        ((0.9, 0.1, 0.1), 3, 4, 0.5, 3),  # loops before min_loops count
        ((0.1, 0.1, 0.1), 2, 3, 0.9, 3),  # max_loops wins
        ((0.0, 0.0, 0.0), 2, 4, 0.0, 2),  # threshold 0: at min_loops
        ((0.5, 0.0, 0.0), 1, 4, 0.5, 1),  # reaching the threshold is enough
    ],
)
def test_ouro_exits_where_the_hazards_say(hazards, minimum, maximum, threshold, depth):
    assert exit_depth(ExitBounds(minimum, maximum, threshold), hazards)[0] == depth


def test_a_threshold_that_rounds_to_one_is_one():
    bounds = ExitBounds(1, 4, 1 - 1e-9)  # a device has float32 only, and never compares with 1
    for policy in (OuroExit(), OuroDelayedExit(), RandomLookaheadExit()):
        assert not policy.gate_loops(bounds) and policy.fixed_depth(bounds) == 4
    assert OuroExit().gate_loops(ExitBounds(1, 4, 1 - 1e-7))


def test_threshold_one_is_fixed_depth_even_when_the_sum_rounds_to_one():
    depth, read = exit_depth(ExitBounds(1, 4, 1.0), (1.0, 1.0, 1.0))
    assert depth == 4
    assert read == []


def test_the_gate_is_not_read_where_it_decides_nothing():
    assert exit_depth(ExitBounds(3, 3, 0.1), (1.0, 1.0, 1.0)) == (3, [])
    assert exit_depth(ExitBounds(1, 3, 1.0), ())[1] == []
    assert exit_depth(ExitBounds(1, 3, 0.99), (0.0, 0.0, 0.0))[1] == [1, 2]


@pytest.mark.parametrize(
    ("hazards", "minimum", "maximum", "threshold", "depth", "read"),
    [
        ((0.3, 0.3), 2, 4, 0.5, 3, [1, 2]),  # ouro leaves at 2
        ((0.9, 0.0), 1, 4, 0.5, 2, [1]),
        ((0.3, 0.3), 2, 3, 0.5, 3, [1]),  # max_loops wins: the second signal cannot matter
        ((0.1, 0.1), 2, 4, 0.9, 4, [1, 2]),
        ((0.9, 0.9), 1, 2, 0.1, 2, []),
        ((0.9, 0.9), 1, 4, 1.0, 4, []),
        ((0.9, 0.0, 0.0), 3, 5, 0.5, 4, [1, 2, 3]),
    ],
)
def test_delayed_exits_one_loop_later(hazards, minimum, maximum, threshold, depth, read):
    bounds = ExitBounds(minimum, maximum, threshold)
    assert exit_depth(bounds, hazards, OuroDelayedExit()) == (depth, read)


@pytest.mark.parametrize(
    ("scores", "minimum", "maximum", "threshold", "depth", "read"),
    [
        ((0.6, 0.0, 0.0), 1, 4, 0.5, 2, [1]),
        ((0.4, 0.5, 0.0), 1, 4, 0.5, 3, [1, 2]),  # no sum: a score counts alone
        ((0.9, 0.9, 0.9), 3, 4, 0.5, 3, [2]),  # loop 1 could only end the token before min_loops
        ((0.0, 0.0, 0.9), 1, 4, 0.5, 4, [1, 2]),
        ((0.9,), 1, 1, 0.5, 1, []),  # a hard maximum of 1 is honoured
        ((0.9, 0.9), 1, 4, 1.0, 4, []),
    ],
)
def test_lookahead_leaves_after_one_more_loop(scores, minimum, maximum, threshold, depth, read):
    bounds = ExitBounds(minimum, maximum, threshold)
    assert exit_depth(bounds, scores, RandomLookaheadExit()) == (depth, read)


def test_products_are_float32_step_by_step():
    hazards = np.random.default_rng(0).random(3).astype(np.float32)
    remaining = np.ones(1, np.float32)
    for loop in (1, 2, 3):
        probability, threshold = hazards[loop - 1 : loop], np.array([0.5], np.float32)
        _, remaining = OuroExit().decide(
            probability, remaining, np.array([loop]), np.array([4]), threshold
        )
    assert remaining.dtype == np.float32
    one = np.float32(1)
    assert remaining[0] == (one - hazards[0]) * (one - hazards[1]) * (one - hazards[2])


def test_trace_replays_depths_and_never_reads_the_gate():
    policy = exit_policy(ExitConfig(mode="trace", depths_by_request={"a": (4, 2, 3)}))
    bounds = policy.bind("a", None, ExitBounds(1, 4, 0.5), 3, 4)
    assert not policy.gate_loops(bounds)
    assert bounds.depths == (4, 2, 3)


@pytest.mark.parametrize(
    ("depths", "max_tokens", "message"),
    [
        (None, 1, "every request needs recorded depths"),
        ((4, 2), 3, "at least max_tokens = 3"),
        ((3, 2, 2), 3, "full depth, 4"),
        ((4, 1, 2), 3, r"\[1\] = 1: must be in min_loops..max_loops = 2..3"),
        ((4, 2, 4), 3, r"\[2\] = 4: must be in min_loops..max_loops = 2..3"),
    ],
)
def test_trace_refuses_depths_that_do_not_fit(depths, max_tokens, message):
    recorded = {"other": (4,)} if depths is None else {"a": depths}
    policy = exit_policy(ExitConfig(mode="trace", depths_by_request=recorded))
    with pytest.raises(ValueError, match=message):
        policy.bind("a", None, ExitBounds(2, 3, 1.0), max_tokens, 4)


def test_trace_id_names_the_recording():
    policy = exit_policy(ExitConfig(mode="trace", depths_by_request={"old": (4, 2)}))
    assert policy.bind("new", "old", ExitBounds(1, 4, 1.0), 2, 4).depths == (4, 2)
    with pytest.raises(ValueError, match="trace_id"):
        OuroExit().bind("new", "old", ExitBounds(1, 4, 1.0), 2, 4)
