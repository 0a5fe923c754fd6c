"""The scheduler and the engine core under random workloads.

RLT_SIMULATOR_SEED=n runs only the workload of seed n: the one that a failure names.
"""

import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlt_jax.engine.types import Stage
from rlt_jax.sampling_params import SamplingParams
from tests.engine.simulated_device import FAILURES
from tests.engine.simulated_model import FULL_DEPTH
from tests.engine.simulator import simulate, simulate_seed
from tests.engine.workloads import EXIT_MODES, Ask, Choices, Workload, make_workload

pytestmark = pytest.mark.once

SOAK_BATCHES = 100_000
SEED = os.environ.get("RLT_SIMULATOR_SEED")
STAGES = [stage.value for stage in Stage]

# What the soak must have met, at least this often.
EVENTS = {
    **dict.fromkeys(STAGES, 1000),
    **{f"{count} in flight": 1000 for count in (1, 2, 3)},
    **{f"exit at {depth}": 1000 for depth in range(1, FULL_DEPTH + 1)},
    **{f"ended: {reason}": 100 for reason in ("stop", "length", "abort", "error")},
    **{f"abort: {stage}": 5 for stage in ("waiting", "prefill", "recurrent", "coda", "unknown")},
    **{f"abort: {stage} in flight": 5 for stage in ("prefill", "recurrent", "coda", "held")},
    **dict.fromkeys(FAILURES, 10),
    "several tokens in a dispatch": 100,
    "prompts beside decode rows": 1000,
    "several loops in a dispatch": 100,
    "chunks side by side": 1000,
    "a loop ahead of a signal": 100,
    "loops in vain": 100,
    "waiting for a slot or blocks": 1000,
    "overtaken": 100,
    "overtaken as often as allowed": 100,
    "a table grew": 1000,
    "prefix from the cache": 500,
    "prefix of all pages but the last": 30,
    "prefix of several requests": 30,
    "prefix of an unfinished prompt": 100,
    "prefix of a cancelled prompt": 10,
    "a completed page was given up": 1000,
    "name in use": 10,
    "name used again": 10,
    "too large": 10,
    "save": 300,
    "restore": 200,
    "preempted": 100,
    "began again": 30,
    "saved in the prompt": 10,
    "saved between loops": 10,
    "restored into other pages": 30,
    "restored on another device": 1,
    "no host memory left": 3,
    "abort: preempted": 5,
}


class HypothesisChoices(Choices):
    def __init__(self, draw):
        self._draw = draw

    def integer(self, low, high):
        return self._draw(st.integers(low, high))


@st.composite
def workloads(draw) -> Workload:
    return make_workload(HypothesisChoices(draw))


@pytest.mark.skipif(SEED is None, reason="RLT_SIMULATOR_SEED is not set")
def test_the_workload_of_the_given_seed():
    simulate_seed(int(SEED))


@pytest.mark.skipif(SEED is not None, reason="RLT_SIMULATOR_SEED is set")
def test_a_hundred_thousand_batches_lose_no_token_no_block_and_no_request():
    events: Counter[str] = Counter()
    seed = 0
    while sum(events[stage] for stage in STAGES) < SOAK_BATCHES:
        events += simulate_seed(seed)
        seed += 1
    assert not {name: events[name] for name, least in EVENTS.items() if events[name] < least}


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads())
def test_any_workload_gives_every_request_its_tokens_once(workload):
    simulate(workload)


# -- the expected exits ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "signals", "fields", "depth"),
    [
        ("ouro", (0.3, 0.3), {"exit_threshold": 0.5, "min_loops": 2}, 2),
        ("ouro_delayed", (0.3, 0.3), {"exit_threshold": 0.5, "min_loops": 2}, 3),
        ("ouro_delayed", (0.3, 0.3), {"exit_threshold": 0.5, "max_loops": 2}, 2),
        ("ouro", (1, 1), {"exit_threshold": 1}, 4),
        ("ouro", (1, 0), {"exit_threshold": 0.9, "min_loops": 3}, 3),
        ("random_lookahead", (0.6,), {"exit_threshold": 0.5, "min_loops": 1}, 2),
        ("random_lookahead", (0.6, 0.1, 0.6), {"exit_threshold": 0.5, "min_loops": 3}, 4),
        ("random_lookahead", (0.1, 0.6), {"exit_threshold": 0.5, "min_loops": 3}, 3),
        ("trace", (1, 1), {}, 3),
    ],
)
def test_the_expected_exit_follows_the_definition(mode, signals, fields, depth):
    ask = Ask("a", (1,), SamplingParams(seed=0, **fields), depths=(FULL_DEPTH, 3), arrives=0)
    signals = [np.float32(signal) for signal in (*signals, 0, 0, 0, 0)]
    left = (n for n in range(1, FULL_DEPTH + 1) if EXIT_MODES[mode].leaves(ask, 1, signals[:n]))
    assert next(left) == depth
