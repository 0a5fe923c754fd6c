"""Who is prefilled when."""

import pytest

from rlt_jax.engine.types import Stage
from rlt_jax.sampling_params import SamplingParams
from tests.engine.fake_device import fake_engine


def order_of_ends(core):
    ended = []
    while core.has_unfinished_requests():
        ended += [output.request_id for output in core.step() if output.finished]
    return ended


@pytest.mark.parametrize("budget", [4, 8])
def test_a_short_prompt_ends_before_a_long_one_that_came_first(budget):
    core, device = fake_engine(max_num_batched_tokens=budget, prefill_chunk_size=4)
    core.add_request("long", [1] * 40, SamplingParams(max_tokens=1))
    core.add_request("short", [1] * 6, SamplingParams(max_tokens=1))
    assert order_of_ends(core) == ["short", "long"]
    first = [batch.rows.generation.tolist() for batch in device.of(Stage.PREFILL)][:4]
    assert first == ([[0], [1], [0], [1, 0]] if budget == 4 else [[0, 1], [0, 1], [0], [0]])


def test_the_ceiling_holds_for_each_request_and_the_budget_for_the_batch():
    core, device = fake_engine(max_num_batched_tokens=10, prefill_chunk_size=4, max_num_seqs=6)
    for i in range(6):
        core.add_request(str(i), [1] * (5 + i), SamplingParams(max_tokens=1))
    order_of_ends(core)
    for batch in device.of(Stage.PREFILL):
        sizes = [len(tokens) for tokens in batch.rows.tokens]
        assert max(sizes) <= 4 and sum(sizes) <= 10
    assert max(len(batch.rows) for batch in device.of(Stage.PREFILL)) >= 3
