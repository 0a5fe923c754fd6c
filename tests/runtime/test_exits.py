"""Signals and decisions inside a program, against the host's exit rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.engine.exit_policy import OuroExit
from rlt_jax.runtime.device_state import SlotExits
from rlt_jax.runtime.exits import Exits, decide_exits, has_left, random_head
from tests.support import small_model

SLOTS = 64


def slot_exits(rng):
    return SlotExits(
        min_loops_s=jnp.asarray(rng.integers(1, 5, SLOTS), jnp.int32),
        threshold_s=jnp.asarray(rng.choice([0.1, 0.5, 0.7, 0.875, 1.0], SLOTS), jnp.float32),
        remaining_s=jnp.asarray(rng.random(SLOTS), jnp.float32),  # of earlier tokens
        left_s=jnp.ones(SLOTS, bool),
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_program_decides_what_the_host_would_to_the_bit(seed):
    rng = np.random.default_rng(seed)
    exits = slot_exits(rng)
    threshold, min_loops = np.asarray(exits.threshold_s), np.asarray(exits.min_loops_s)
    slots = rng.permutation(SLOTS)[:50]
    remaining, left = np.ones(50, np.float32), np.zeros(50, bool)
    decide = jax.jit(decide_exits)
    for depth in range(1, 5):
        # Halves and quarters, so that sums meet their thresholds exactly, and any numbers.
        hazards = np.where(rng.random(50) < 0.5, rng.choice([0.5, 0.25], 50), rng.random(50))
        hazards = hazards.astype(np.float32)
        runs = ~left
        where = np.where(runs, slots, SLOTS)  # rows that have left do not run
        depths = np.full(50, depth, np.int32)
        exits, leaves = decide(exits, jnp.asarray(where), jnp.asarray(depths), jnp.asarray(hazards))
        expected, updated = OuroExit().decide(
            hazards, remaining, depths, min_loops[slots], threshold[slots]
        )
        expected &= threshold[slots] < 1
        assert np.array_equal(np.asarray(leaves)[runs], expected[runs])
        remaining = np.where(runs, updated, remaining)
        assert np.array_equal(np.asarray(exits.remaining_s)[slots], remaining)
        left |= expected & runs
        assert np.array_equal(np.asarray(has_left(exits, jnp.asarray(slots), depths + 1)), left)
    assert left.any() and not left.all()


def test_the_first_loop_of_a_token_forgets_the_last_one():
    exits = slot_exits(np.random.default_rng(0))
    first = jnp.ones(SLOTS, jnp.int32)
    assert not has_left(exits, jnp.arange(SLOTS), first).any()
    assert has_left(exits, jnp.arange(SLOTS), first + 1).all()


def test_the_random_head_is_drawn_by_the_seed_alone():
    before = np.random.get_state()[1].copy()
    one, again, other = random_head(5, 4096), random_head(5, 4096), random_head(6, 4096)
    assert np.array_equal(np.random.get_state()[1], before)
    assert one.dtype == np.float32
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    assert abs(one.std() * 4096**0.5 - 1) < 0.05 and abs(one.mean() * 4096**0.5) < 0.1


def test_the_lookahead_signal_is_the_score_of_that_head_and_leaves_the_gate_alone():
    config, params = small_model()
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(5, config.hidden_size)), jnp.float32)
    score = Exits(lookahead_seed=3).signal(params, hidden)
    logit = np.asarray(hidden, np.float64) @ random_head(3, config.hidden_size)
    assert np.allclose(score, 1 / (1 + np.exp(-logit)), atol=1e-6)
    assert not np.allclose(score, Exits().signal(params, hidden), atol=1e-3)
