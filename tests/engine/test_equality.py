"""Invariant 1: tokens and depths are the same however a request was batched."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlt_jax.config import ExitConfig
from rlt_jax.engine.types import Stage
from rlt_jax.sampling_params import SamplingParams
from tests.oracle import Comparison
from tests.support import SHAPES, VOCAB, Work, build_engine, drive, random_work, watch

FEW = settings(
    max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)

MODES = [
    {"mode": "refill"},
    {"mode": "no_refill"},
    {"mode": "refill", "prefill_chunk_size": 1},
    {"mode": "refill", "prefill_chunk_size": 5, "max_prefill_batches_before_decode": 3},
    {"mode": "refill", "min_coda_batch_size": 3},
    {"mode": "no_refill", "prefill_chunk_size": 7},
]


def features(batches) -> Counter:
    """What happened in a run: that much each comparison has compared."""
    seen = Counter()
    chunks = Counter()
    for batch in batches:
        depths = {row.depth for row in batch.rows}
        seen["mixed depths"] += batch.stage is Stage.RECURRENT and len(depths) > 1
        seen["crowds"] += batch.stage is Stage.RECURRENT and len(batch.rows) > 1
        seen["coda of 3"] += batch.stage is Stage.CODA and len(batch.rows) >= 3
        seen["greedy and sampling"] += batch.samples
        seen["gates"] += batch.reads_gate
        if batch.stage is Stage.PREFILL:
            chunks.update(row.generation for row in batch.rows)
            seen["several prompts"] += len(batch.rows) > 1
    seen["chunked prompts"] = sum(count > 1 for count in chunks.values())
    return seen


def essence(outputs):
    return {key: (o.token_ids, o.exit_depths, o.finish_reason) for key, o in outputs.items()}


@pytest.mark.torch
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheduling", MODES, ids=str)
def test_crowd_equals_the_pytorch_oracle(shape, scheduling):
    work = random_work(numbers=1, count=14, logprobs=0)
    work = [dataclasses.replace(one, arrival=3 * i) for i, one in enumerate(work)]
    engine = build_engine(shape, eos_token_ids=(5,), **scheduling)
    batches = watch(engine)
    outputs = drive(engine, work)
    seen = features(batches)
    assert seen["crowds"] and seen["gates"]
    assert bool(seen["mixed depths"]) == (scheduling["mode"] == "refill")
    assert seen["coda of 3"] or "min_coda_batch_size" not in scheduling
    assert seen["chunked prompts"] >= 5 or "prefill_chunk_size" not in scheduling
    comparison = Comparison()
    for i, one in enumerate(work):
        comparison.compare(one, outputs[str(i)], SHAPES[shape].layout, eos=(5,))
    comparison.check(min_tokens=80)


@pytest.mark.torch
@pytest.mark.parametrize("shape", ["roomy", "shared"])
def test_hundreds_of_tokens_equal_the_pytorch_oracle(shape):
    work = [
        Work((7 + i, 3 * i, 11), SamplingParams(max_tokens=61, exit_threshold=threshold))
        for i, threshold in enumerate([0.3, 0.5, 0.6, 0.7, 0.8, 1.0])
    ]
    outputs = drive(build_engine(shape), work)
    comparison = Comparison()
    for i, one in enumerate(work):
        comparison.compare(one, outputs[str(i)], SHAPES[shape].layout)
    comparison.check(min_tokens=360)


@pytest.mark.parametrize("shape", SHAPES)
def test_alone_and_in_a_crowd_are_the_same(shape):
    work = random_work(numbers=2, count=9, temperature=0.8, top_k=20, top_p=0.9, seed=2**40 + 1)
    work += random_work(numbers=3, count=5)
    crowd = essence(drive(build_engine(shape), work))
    alone = {}
    for i, one in enumerate(work):
        alone |= {str(i): essence(drive(build_engine(shape), [one]))["0"]}
    assert crowd == alone
    assert len({depth for _, depths, _ in crowd.values() for depth in depths}) >= 3


def test_buckets_and_block_sizes_do_not_show():
    work = random_work(numbers=4, count=10)
    assert essence(drive(build_engine("roomy"), work)) == essence(
        drive(build_engine("tight"), work)
    )


def test_pool_shortage_makes_requests_wait_and_changes_nothing():
    work = [
        Work((i, i + 1), SamplingParams(max_tokens=50, exit_threshold=0.5), arrival=0)
        for i in range(6)
    ]
    tight = build_engine("tight")  # 13 pages of 8 positions: one request takes 7
    running = []
    step = tight.core.step

    def watched():
        outputs = step()
        running.append(tight.core.scheduler.stats()["running"])
        return outputs

    tight.core.step = watched
    assert essence(drive(tight, work)) == essence(drive(build_engine("roomy"), work))
    assert max(running) == 1


@st.composite
def workloads(draw):
    """Requests with arrivals and cancellations."""
    work = []
    for _ in range(draw(st.integers(1, 8))):
        prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=28))
        max_loops = draw(st.integers(1, 4))
        params = SamplingParams(
            max_tokens=draw(st.integers(1, 16)),
            temperature=draw(st.sampled_from([0.0, 0.9])),
            seed=draw(st.integers(0, 2**63 - 1)),
            min_loops=draw(st.integers(1, max_loops)),
            max_loops=max_loops,
            exit_threshold=draw(st.sampled_from([0.0, 0.3, 0.6, 1.0])),
            stop_token_ids=draw(st.sampled_from([(), (1, 2, 3)])),
        )
        arrival = draw(st.integers(0, 30))
        cancel = draw(st.one_of(st.none(), st.integers(0, 60)))
        work.append(Work(tuple(prompt), params, arrival, cancel and arrival + cancel))
    return work


@pytest.mark.parametrize("shape", SHAPES)
def test_replaying_recorded_depths_gives_the_same_tokens_without_the_gate(shape):
    work = random_work(numbers=6, count=10)
    recorded = drive(build_engine(shape), work)
    depths = {name: list(output.exit_depths) for name, output in recorded.items()}
    trace = ExitConfig(mode="trace", depths_by_request=depths)
    engine = build_engine(shape, exit_config=trace, prefill_chunk_size=5)
    batches = watch(engine)
    assert essence(drive(engine, work)) == essence(recorded)
    seen = features(batches)
    assert seen["mixed depths"] and not seen["gates"]
    assert len({depth for one in depths.values() for depth in one}) >= 3


SEEN = Counter()  # over all examples of the property below


@FEW
@given(
    shape=st.sampled_from(["roomy", "tight", "shared"]),
    work=workloads(),
    scheduling=st.fixed_dictionaries(
        {
            "mode": st.sampled_from(["refill", "no_refill"]),
            "prefill_chunk_size": st.sampled_from([1, 3, 16, 24]),
            "max_prefill_batches_before_decode": st.integers(1, 3),
            "min_coda_batch_size": st.integers(1, 4),
        }
    ),
)
def test_any_schedule_gives_each_request_what_it_gets_alone(shape, work, scheduling):
    engine = build_engine(shape, **scheduling)
    batches = watch(engine)
    outputs = drive(engine, work)
    SEEN.update(features(batches))
    SEEN.update(output.finish_reason for output in outputs.values())
    for i, one in enumerate(work):
        alone = drive(build_engine(shape), [dataclasses.replace(one, arrival=0, cancel=None)])["0"]
        got = outputs[str(i)]
        if got.finish_reason == "abort":
            count = len(got.token_ids)
            assert got.token_ids == alone.token_ids[:count]
            assert got.exit_depths == alone.exit_depths[:count]
        else:
            assert essence({"0": got}) == essence({"0": alone})


def test_the_property_above_met_every_feature():
    expected = {"mixed depths", "crowds", "gates", "chunked prompts", "greedy and sampling"}
    assert expected | {"abort", "length", "stop"} <= set(+SEEN)
