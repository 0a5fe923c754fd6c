"""Invariant 1: tokens and depths are the same however a request was batched."""

import dataclasses
import functools
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlt_jax.config import ExitConfig
from rlt_jax.engine.types import Stage
from rlt_jax.outputs import RequestOutput
from rlt_jax.sampling_params import SamplingParams
from tests.oracle import Comparison
from tests.support import (
    SHAPES,
    VOCAB,
    Watched,
    Work,
    build_engine,
    drive,
    random_work,
    watch,
)

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
# Prompts go through the loops one at a time: where every depth has a plane of its own.
STAGED = [
    {"mode": "mixed"},
    {"mode": "mixed", "prefill_chunk_size": 5},
    {"mode": "mixed", "prefill_chunk_size": 3, "wavefront_chunked_prefill": True},
    {"mode": "refill", "prefill_chunk_size": 5, "wavefront_chunked_prefill": True},
]
CASES = [
    (shape, scheduling)
    for shape in SHAPES
    for scheduling in MODES + STAGED * (SHAPES[shape].layout == "last_exited")
]

# (max_in_flight, tokens_per_dispatch)
EXECUTIONS = [(1, 1), (1, 4), (2, 1), (2, 4)]

EOS = (5,)


def features(watched: Watched, eos: tuple[int, ...] = ()) -> Counter:
    """What happened in a run: that much each comparison has compared."""
    seen = Counter()
    chunks = Counter()
    for batch in watched.batches:
        depths = {row.depth for row in batch.rows if row.depth}
        seen[batch.stage] += 1
        seen["mixed depths"] += batch.stage is not Stage.PREFILL and len(depths) > 1
        seen["boundary of mixed depths"] += batch.stage is Stage.BOUNDARY and len(depths) > 1
        seen["crowds"] += batch.stage is not Stage.PREFILL and len(batch.rows) > 1
        seen["codas of 3"] += sum(row.exit_depth > 0 for row in batch.rows) >= 3
        seen["greedy and sampling"] += batch.samples
        seen["gates"] += batch.reads_gate
        seen["several tokens"] += batch.num_tokens > 1
        chunks.update(row.generation for row in batch.rows if row.tokens)
        seen["several prompts"] += batch.stage is Stage.PREFILL and len(batch.rows) > 1
        if batch.stage is Stage.MIXED:
            prompts = [row.generation for row in batch.rows if row.size]
            beside = len(prompts) < len(batch.rows)
            seen["prompts beside decode rows"] += beside
            loops = {row.depth for row in batch.rows if row.size}
            seen["prompts at several loops beside decode rows"] += beside and len(loops) > 1
            seen["chunks side by side"] += len(set(prompts)) < len(prompts)
            seen["several loops"] += batch.num_loops > 1
    for result in watched.results:
        for row in result.rows:
            seen["tokens after a stop id"] += any(token in eos for token in row.tokens[:-1])
    seen["chunked prompts"] = sum(count > 1 for count in chunks.values())
    seen["two in flight"] = watched.most_in_flight > 1
    return seen


def essence(outputs):
    return {key: (o.token_ids, o.exit_depths, o.finish_reason) for key, o in outputs.items()}


# Arriving one after the other, at all depths; then, when they have ended, all at full depth.
CROWD = [
    dataclasses.replace(one, arrival=3 * i)
    for i, one in enumerate(
        random_work(numbers=1, count=14, logprobs=0)
        + random_work(numbers=7, count=2, logprobs=0, temperature=0.9, seed=5)
    )
]
FULL_DEPTH = [
    Work((3 * i + 1, 50 - i, 7), SamplingParams(max_tokens=20, logprobs=0, stop_token_ids=(7, 2)))
    for i in range(4)
] + [Work((1, 2), SamplingParams(max_tokens=4, logprobs=0, temperature=0.9, seed=6))]


def run_both(engine) -> dict[str, RequestOutput]:
    outputs = drive(engine, CROWD)
    return outputs | {f"full {name}": o for name, o in drive(engine, FULL_DEPTH).items()}


@functools.cache
def one_by_one(layout: str) -> dict[str, RequestOutput]:
    """The outputs of run_both() when every request is alone in the engine."""
    engine = build_engine(
        {"last_exited": "roomy", "shared": "shared"}[layout], eos_token_ids=EOS, max_in_flight=1
    )
    outputs = {}
    for prefix, work in (("", CROWD), ("full ", FULL_DEPTH)):
        for i, one in enumerate(work):
            outputs[f"{prefix}{i}"] = drive(engine, [dataclasses.replace(one, arrival=0)])["0"]
    return outputs


@pytest.mark.parametrize(("shape", "scheduling"), CASES, ids=str)
@pytest.mark.parametrize(("max_in_flight", "tokens_per_dispatch"), EXECUTIONS)
def test_every_schedule_gives_each_request_what_it_gets_alone(
    shape, scheduling, max_in_flight, tokens_per_dispatch
):
    engine = build_engine(
        shape,
        eos_token_ids=EOS,
        max_in_flight=max_in_flight,
        tokens_per_dispatch=tokens_per_dispatch,
        **scheduling,
    )
    watched = watch(engine)
    outputs = run_both(engine)
    seen = features(watched, eos=(*EOS, 7, 2))
    refill = scheduling["mode"] != "no_refill"
    assert seen["crowds"] and seen["gates"] and seen["greedy and sampling"]
    assert seen[Stage.RECURRENT] and seen[Stage.CODA] and seen[Stage.TOKENS]
    assert bool(seen["boundary of mixed depths"]) == bool(seen["mixed depths"]) == refill
    assert seen["codas of 3"] or "min_coda_batch_size" not in scheduling
    assert seen["chunked prompts"] >= 5 or "prefill_chunk_size" not in scheduling
    mixed = scheduling["mode"] == "mixed"
    assert bool(seen["prompts beside decode rows"]) == mixed
    assert bool(seen["prompts at several loops beside decode rows"]) == mixed
    assert bool(seen["chunks side by side"]) == ("wavefront_chunked_prefill" in scheduling)
    assert watched.most_in_flight == max_in_flight
    assert bool(seen["several tokens"]) == (tokens_per_dispatch > 1)
    assert bool(seen["tokens after a stop id"]) == (tokens_per_dispatch > 1)
    alone = one_by_one(SHAPES[shape].layout)
    assert essence(outputs) == essence(alone)
    for name, output in outputs.items():
        assert output.logprobs == pytest.approx(alone[name].logprobs, abs=1e-4)


@pytest.mark.torch
@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_what_each_request_gets_alone_equals_the_pytorch_oracle(layout):
    outputs = one_by_one(layout)
    comparison = Comparison()
    for prefix, work in (("", CROWD), ("full ", FULL_DEPTH)):
        for i, one in enumerate(work):
            if one.params.temperature == 0:
                comparison.compare(one, outputs[f"{prefix}{i}"], layout, eos=EOS)
    comparison.check(min_tokens=150)


@pytest.mark.parametrize("tokens_per_dispatch", [2, 4])
def test_several_tokens_in_one_dispatch_are_what_one_by_one_gives(tokens_per_dispatch):
    engine = build_engine("tight", tokens_per_dispatch=tokens_per_dispatch)
    watched = watch(engine)
    work = [Work((9, i), SamplingParams(max_tokens=n)) for i, n in enumerate((13, 18))]
    outputs = drive(engine, work)
    at_once = [b.num_tokens for b in watched.batches if b.stage is Stage.TOKENS]
    assert set(at_once) == {1, tokens_per_dispatch}
    assert essence(outputs) == essence(drive(build_engine("tight"), work))


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
    engine = build_engine(shape)
    crowd = essence(drive(engine, work))
    alone = {str(i): essence(drive(engine, [one]))["0"] for i, one in enumerate(work)}
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
    """Requests with arrivals and cancellations; all at full depth, or at any."""
    work = []
    full_depth = draw(st.sampled_from([False, False, True]))
    for _ in range(draw(st.integers(2, 8))):
        prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=28))
        max_loops = 4 if full_depth else draw(st.integers(1, 4))
        params = SamplingParams(
            max_tokens=draw(st.integers(1, 16)),
            temperature=draw(st.sampled_from([0.0, 0.9])),
            seed=draw(st.integers(0, 2**63 - 1)),
            min_loops=draw(st.integers(1, max_loops)),
            max_loops=max_loops,
            exit_threshold=1 if full_depth else draw(st.sampled_from([0.0, 0.3, 0.6, 1.0])),
            stop_token_ids=draw(st.sampled_from([(), (1, 2, 3)])),
        )
        arrival = draw(st.integers(0, 15))
        cancel = draw(st.one_of(st.none(), st.integers(0, 40)))
        work.append(Work(tuple(prompt), params, arrival, cancel and arrival + cancel))
    return work


@pytest.mark.parametrize(
    ("shape", "scheduling"),
    [case for case in CASES if case[1] in (MODES[0], MODES[3], *STAGED)],
    ids=str,
)
@pytest.mark.parametrize("run_ahead", [False, True])
def test_replaying_recorded_depths_gives_the_same_tokens_without_the_gate(
    shape, scheduling, run_ahead
):
    work = random_work(numbers=6, count=10)
    recorded = drive(build_engine(shape), work)
    depths = {name: list(output.exit_depths) for name, output in recorded.items()}
    trace = ExitConfig(mode="trace", depths_by_request=depths)
    engine = build_engine(shape, exit_config=trace, async_scheduling=run_ahead, **scheduling)
    watched = watch(engine)
    assert essence(drive(engine, work)) == essence(recorded)
    assert watched.most_in_flight == 2
    seen = features(watched)
    assert seen["mixed depths"] and not seen["gates"]
    assert bool(seen["prompts beside decode rows"]) == (scheduling["mode"] == "mixed")
    assert bool(seen["chunks side by side"]) == ("wavefront_chunked_prefill" in scheduling)
    assert len({depth for one in depths.values() for depth in one}) >= 3


SEEN = Counter()  # over all examples of the property below


@FEW
@given(
    case=st.sampled_from(CASES),
    work=workloads(),
    options=st.fixed_dictionaries(
        {
            "prefill_chunk_size": st.sampled_from([1, 3, 16, 24]),
            "max_prefill_batches_before_decode": st.integers(1, 3),
            "min_coda_batch_size": st.integers(1, 4),
            "max_in_flight": st.integers(1, 3),
            "tokens_per_dispatch": st.sampled_from([1, 4]),
        }
    ),
)
def test_any_schedule_gives_each_request_what_it_gets_alone(case, work, options):
    shape, scheduling = case
    engine = build_engine(shape, **scheduling | options)
    watched = watch(engine)
    outputs = drive(engine, work)
    SEEN.update(features(watched))
    SEEN.update(output.finish_reason for output in outputs.values())
    plain = build_engine(shape, max_in_flight=1)
    for i, one in enumerate(work):
        alone = drive(plain, [dataclasses.replace(one, arrival=0, cancel=None)])["0"]
        got = outputs[str(i)]
        if got.finish_reason == "abort":
            count = len(got.token_ids)
            assert got.token_ids == alone.token_ids[:count]
            assert got.exit_depths == alone.exit_depths[:count]
        else:
            assert essence({"0": got}) == essence({"0": alone})


def test_the_property_above_met_every_feature():
    expected = {"mixed depths", "crowds", "gates", "chunked prompts", "greedy and sampling"}
    expected |= {"prompts beside decode rows", "chunks side by side"}
    expected |= {"several tokens", "two in flight", *Stage, "abort", "length", "stop"}
    expected -= {Stage.SAVE, Stage.RESTORE}  # in test_preemption_equality.py
    assert expected <= set(+SEEN)
