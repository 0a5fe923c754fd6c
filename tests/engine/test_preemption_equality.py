"""Invariant 1 for preemption: who was saved to the host and restored, and when, does not show in
what a request gets."""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from rlt_jax import LLM, CacheConfig, ExecutionConfig, SamplingParams, SchedulerConfig, assembly
from rlt_jax.config import ExitConfig
from rlt_jax.engine.types import Stage
from rlt_jax.outputs import RequestOutput
from tests.engine.test_admission_equality import TINY
from tests.engine.test_equality import essence
from tests.engine.test_prefix_equality import PIPELINES, REFILL, STAGED
from tests.support import SHAPES, Watched, Work, build_engine, drive, exit_bounds, watch

# Slots that more urgent requests take; pages that running ones lack; both, and shared prefixes.
FORCED = {
    "slots": {"policy": "priority"},
    "pages": {"incremental_allocation": True},
    "both": {"policy": "priority", "incremental_allocation": True, "watermark_ratio": 0.1},
    "prefixes": {
        "policy": "priority",
        "incremental_allocation": True,
        "enable_prefix_caching": True,
    },
}
SHAPE = {("last_exited", forced): SHAPES["tight"] for forced in FORCED} | {
    ("shared", "slots"): SHAPES["shared"],
    ("shared", "pages"): TINY["shared"],
}


def cells() -> Iterator[tuple]:
    """Every exit mode in every way that it can run; those of FORCED in turn."""
    turns = itertools.cycle(FORCED)
    for mode, pipelines in PIPELINES.items():
        for pipeline, scheduling in itertools.product(pipelines, REFILL + STAGED):
            if mode == "weighted" and scheduling in STAGED:
                continue
            for forced in itertools.islice(turns, 1 + (scheduling == REFILL[0])):
                yield "last_exited", mode, pipeline, scheduling, forced
            if scheduling in REFILL:
                yield "shared", mode, pipeline, scheduling, "slots"
            if scheduling in REFILL and mode == "ouro_delayed":
                yield "shared", mode, pipeline, scheduling, "pages"


def work(mode: str) -> list[Work]:
    """Long and short ones, many of which begin alike; the later, the more urgent."""
    requests = []
    for i in range(12):
        beginning = [(11 * (i % 2) + 7 * j) % 97 for j in range(8)]
        own = [(31 * i + j) % 97 for j in range(1 + (5 * i) % 14)]
        bounds = exit_bounds(mode, i)
        params = SamplingParams(
            max_tokens=9 + (7 * i) % 17,
            temperature=0.8 * (i % 3 == 1),
            seed=2**40 + i,
            priority=-i // 3,
            logprobs=0,
            **bounds,
        )
        requests.append(Work(tuple(beginning + own), params, arrival=4 * i))
    return requests


@functools.cache
def exits(mode: str, layout: str) -> ExitConfig:
    if mode != "trace":
        return ExitConfig(mode=mode, seed=3 * (mode == "random_lookahead"))
    recorded = without_preemption("ouro", layout)
    return ExitConfig(
        mode="trace", depths_by_request={name: o.exit_depths for name, o in recorded.items()}
    )


@functools.cache
def without_preemption(mode: str, layout: str) -> dict[str, RequestOutput]:
    shape = SHAPE[layout, "slots"]
    engine = build_engine(shape, exit_config=exits(mode, layout), max_in_flight=1)
    return drive(engine, work(mode))


def seen(watched: Watched) -> Counter:
    """How often what was saved, and where those that were restored went on."""
    counts, restored = Counter(), set()
    for batch in watched.batches:
        for row in batch.rows:
            generation = row.generation
            if batch.transfer:
                counts[batch.stage] += 1
                restored.add(generation)
            elif generation in restored:
                restored.remove(generation)
                counts["in the prompt"] += row.size > 0 and row.position > 0
                counts["between two loops"] += not row.size and not row.exit_depth and row.depth > 1
                counts["before a coda"] += row.exit_depth > 0 and batch.stage is not Stage.TOKENS
    return counts


SEEN = Counter()  # over all cells


@pytest.mark.parametrize(
    ("layout", "mode", "pipeline", "scheduling", "forced"), list(cells()), ids=str
)
def test_tokens_and_depths_are_those_of_a_run_without_preemption(
    layout, mode, pipeline, scheduling, forced
):
    run_ahead, decision = pipeline
    engine = build_engine(
        SHAPE[layout, forced],
        exit_config=exits(mode, layout),
        async_scheduling=run_ahead,
        exit_decision=decision,
        prefill_chunk_size=7,
        enable_preemption=True,
        **scheduling,
        **FORCED[forced],
    )
    watched = watch(engine)
    outputs, expected = drive(engine, work(mode)), without_preemption(mode, layout)
    assert essence(outputs) == essence(expected)
    for name, output in outputs.items():
        assert output.logprobs == pytest.approx(expected[name].logprobs, abs=1e-4)
    # It all happened.
    counts = seen(watched)
    assert counts[Stage.SAVE] == counts[Stage.RESTORE] > 0
    preemptions = [output.metrics.preemptions for output in outputs.values()]
    assert engine.core.scheduler.totals()["preemptions"] == sum(preemptions) >= counts[Stage.SAVE]
    assert watched.most_in_flight == 2
    depths = {depth for output in outputs.values() for depth in output.exit_depths}
    assert len(depths) >= 3 or mode == "weighted"
    SEEN.update(counts)
    SEEN["found"] += sum(output.num_cached_tokens > 0 for output in outputs.values())


def test_the_cells_above_met_every_place_to_go_on_from():
    assert SEEN["in the prompt"] and SEEN["between two loops"] and SEEN["before a coda"]
    assert SEEN["found"]


@pytest.mark.parametrize("scheduling", [{"mode": "refill"}, STAGED[-1]], ids=str)
def test_a_request_that_leaves_again_and_again_and_in_several_transfers_gets_the_same(
    scheduling, monkeypatch
):
    monkeypatch.setattr(assembly, "transfer_pages", lambda _: 1)
    engine = build_engine(
        "tight",
        enable_preemption=True,
        policy="priority",
        incremental_allocation=True,
        prefill_chunk_size=7,
        max_in_flight=3,
        **scheduling,
    )
    watched = watch(engine)
    outputs = drive(engine, work("ouro"))
    assert essence(outputs) == essence(without_preemption("ouro", "last_exited"))
    assert max(output.metrics.preemptions for output in outputs.values()) >= 2
    saved = [batch.transfer for batch in watched.batches if batch.stage is Stage.SAVE]
    assert {transfer.count for transfer in saved} == {1}
    assert max(transfer.first for transfer in saved) >= 2
    stages = [batch.stage for batch in watched.batches]
    beside = [b for a, b, c in zip(stages, stages[1:], stages[2:]) if a is c is Stage.SAVE]
    assert {stage for stage in beside if stage is not Stage.SAVE}  # others ran in between


SHOTS = ("17+25= 42;85-17= 68;1+1=", "200+133=", "9+9=", "a=c;c=f;f=7;a?", "rev:stone=")


def tiny(host_memory_bytes: int | None = None, incremental: bool = False, **scheduling) -> LLM:
    return LLM(
        "ouro-tiny",
        cache_config=CacheConfig(
            num_blocks=4 * 64,
            block_size=8,
            incremental_allocation=incremental,
            host_memory_bytes=host_memory_bytes,
        ),
        scheduler_config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, **scheduling),
        execution_config=ExecutionConfig(min_row_bucket=4, min_prefill_bucket=64),
    )


def test_through_llm_a_pool_too_small_for_all_gives_the_same_answers_and_says_who_had_to_leave():
    params = SamplingParams(max_tokens=140, exit_threshold=0.7, ignore_eos=True)
    with tiny() as llm:
        plain = llm.generate(SHOTS, params)
    with tiny(incremental=True, enable_preemption=True) as llm:
        outputs, stats = llm.generate(SHOTS, params), llm.engine.stats()
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert [o.exit_depths for o in outputs] == [o.exit_depths for o in plain]
    left = [output.metrics.preemptions for output in outputs]
    assert left[0] == 0 < max(left)  # never the oldest
    assert stats["preemptions"] == sum(left)
    names = ("saving", "preempted", "restoring", "host_blocks", "running", "waiting")
    assert {stats[name] for name in names} == {0}
    assert stats["free_blocks"] == stats["total_blocks"]
    assert {output.metrics.preemptions for output in plain} == {0}


def test_without_host_memory_one_before_its_first_output_begins_again_and_gets_the_same():
    params = SamplingParams(max_tokens=16, exit_threshold=0.7, ignore_eos=True, priority=1)
    urgent = dataclasses.replace(params, priority=0)
    options = {"policy": "priority", "enable_preemption": True, "prefill_chunk_size": 4}
    with tiny(host_memory_bytes=0, **options) as llm:
        (plain,) = llm.generate([SHOTS[0]], params)
        engine, ended = llm.engine, {}
        for i in range(3):
            engine.add_request(f"before {i}", SHOTS[1], params)
        engine.step()
        engine.add_request("begins again", SHOTS[0], params)
        engine.step()
        engine.step()
        engine.add_request("urgent", SHOTS[2], urgent)
        while engine.has_unfinished_requests():
            ended |= {output.request_id: output for output in engine.step()}
            assert engine.stats()["host_blocks"] == 0
    left = {name for name, output in ended.items() if output.metrics.preemptions}
    assert left == {"begins again"}
    assert ended["begins again"].token_ids == plain.token_ids
    assert ended["begins again"].exit_depths == plain.exit_depths
