"""Which steps a decode measurement counts, on a scripted engine."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest

from rlt_jax.bench import decode, driver
from rlt_jax.bench.decode import _Steps
from rlt_jax.bench.driver import count_loops, draw_depths
from rlt_jax.bench.synthetic import OURO_1_4B
from rlt_jax.engine.types import Row, Rows, SchedulerOutput, Stage


@dataclasses.dataclass
class FakeRecorder:
    collected: list = dataclasses.field(default_factory=list)
    sampled: Counter = dataclasses.field(default_factory=Counter)
    total: int = 0

    def collect(self, batch, *generations):
        self.collected.append(batch)
        self.sampled.update(generations)
        self.total += len(generations)


@pytest.fixture
def clock(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(decode.time, "perf_counter", lambda: next(ticks))


def test_the_window_spans_the_steps_in_which_every_row_decodes(clock):
    recorder = FakeRecorder()
    steps = _Steps(recorder, rows=2)
    script = ["0", "1", "", "01", "01", "", "01", "01", "01"]
    for name, generations in enumerate(script):
        recorder.collect(name, *map(int, generations))
        steps.note()
    window = steps.window(first=2, last=4)
    assert [moment.tokens for moment in window.moments] == [(2, 2), (3, 3), (4, 4)]
    assert window.batches == (4, 5, 6)
    assert window.seconds == 2
    assert window.tokens == 4


def test_the_window_ends_when_the_first_row_does(clock):
    recorder = FakeRecorder()
    steps = _Steps(recorder, rows=2)
    for generations in ["01", "01", "0", "0", "01", "1", "1"]:
        recorder.collect("batch", *map(int, generations))
        steps.note()
    window = steps.window(first=2, last=5)
    assert (window.moments[0].tokens, window.moments[-1].tokens) == ((2, 2), (5, 3))
    with pytest.raises(ValueError, match="--tokens = 3: must be larger"):
        steps.window(first=4, last=4)


@pytest.mark.parametrize(
    "stage, num_tokens, loops",
    [
        (Stage.PREFILL, 1, 0),
        (Stage.CODA, 1, 0),
        (Stage.RECURRENT, 1, 1),
        (Stage.BOUNDARY, 1, 1),
        (Stage.TOKENS, 1, 4),
        (Stage.TOKENS, 2, 8),
    ],
)
def test_loops_of_a_batch(stage, num_tokens, loops):
    batch = SchedulerOutput(1, stage, (), num_tokens=num_tokens)
    assert count_loops([batch, batch], full_depth=4) == 2 * loops


@pytest.mark.parametrize("sizes, loops", [((0, 0, 5), 1), ((5, 3), 0)])
def test_a_mixed_batch_has_a_loop_of_decode_rows_or_none(sizes, loops):
    rows = Rows.of([Row(i, i, 0, depth=1, size=size) for i, size in enumerate(sizes)])
    batch = SchedulerOutput(1, Stage.MIXED, rows, num_loops=1 + (not loops))
    assert count_loops([batch], full_depth=4) == loops


def test_drawn_depths_begin_with_the_prompt_s_and_depend_on_the_seed_alone():
    drawn = draw_depths(OURO_1_4B, [2, 3], requests=3, tokens=50, seed=1)
    assert drawn == draw_depths(OURO_1_4B, [2, 3], requests=3, tokens=50, seed=1)
    assert drawn != draw_depths(OURO_1_4B, [2, 3], requests=3, tokens=50, seed=2)
    assert list(drawn) == ["0", "1", "2"]
    for depths in drawn.values():
        assert depths[0] == 4 and set(depths[1:]) == {2, 3} and len(depths) == 50


def test_prompts_are_random_tokens_of_the_vocabulary():
    prompts = driver.random_prompts(OURO_1_4B, 3, 1000, np.random.default_rng(0))
    assert [len(prompt) for prompt in prompts] == [1000] * 3
    assert prompts[0] != prompts[1]
    assert min(map(min, prompts)) >= 0 and 40_000 < max(map(max, prompts)) < 49152
