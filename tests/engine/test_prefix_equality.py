"""Invariant 1 for prefix caching: whether a prompt's beginning was computed or found does not show
in what a request gets."""

import functools

import pytest

from rlt_jax import LLM, CacheConfig, ExecutionConfig, SamplingParams, SchedulerConfig
from rlt_jax.config import ExitConfig
from rlt_jax.outputs import RequestOutput
from tests.engine.test_equality import essence, features
from tests.support import SHAPES, Work, build_engine, drive, exit_bounds, watch

PAGE = SHAPES["tight"].block_size
HOST, DEVICE, AHEAD, BOTH = (False, "host"), (False, "device"), (True, "host"), (True, "device")
# How each exit mode can run: async_scheduling, exit_decision.
PIPELINES = {
    "ouro": [HOST, BOTH],
    "ouro_delayed": [HOST, AHEAD],
    "random_lookahead": [HOST, AHEAD],
    "trace": [HOST, AHEAD],
    "weighted": [HOST, AHEAD],
}
REFILL = [{"mode": "refill"}, {"mode": "no_refill"}]
STAGED = [
    {"mode": "mixed"},
    {"mode": "refill", "wavefront_chunked_prefill": True},
    {"mode": "mixed", "wavefront_chunked_prefill": True},
]
CELLS = [
    (mode, pipeline, scheduling)
    for mode, pipelines in PIPELINES.items()
    for pipeline in pipelines
    for scheduling in REFILL + STAGED * (mode != "weighted")
]


def conversations(mode: str, count: int = 14, moving_on: bool = False) -> list[Work]:
    """Three beginnings of two pages, each asked for again and again: by itself, longer, and after
    the request before it has gone; other bounds and thresholds each time. moving_on: other three
    after every six requests."""
    work = []
    for i in range(count):
        which = i % 3 + 3 * (i // 6) * moving_on
        first, second = which, which % 2  # the same second page comes after different first ones
        beginning = [(11 * first + 7 * j) % 97 for j in range(PAGE)]
        beginning += [(13 * second + 5 * j) % 97 for j in range(PAGE)]
        own = [(31 * i + j) % 97 for j in range(i % 5)]
        bounds = exit_bounds(mode, i)
        sampling = {"temperature": 0.8 * (i % 4 == 3), "seed": 2**40 + i, "logprobs": 0}
        params = SamplingParams(max_tokens=5 + i % 7, **bounds, **sampling)
        work.append(Work(tuple(beginning + own), params, arrival=5 * i))
    return work


@functools.cache
def exits(mode: str) -> ExitConfig:
    if mode != "trace":
        return ExitConfig(mode=mode, seed=3 * (mode == "random_lookahead"))
    recorded = without_caching("ouro")
    return ExitConfig(
        mode="trace", depths_by_request={name: o.exit_depths for name, o in recorded.items()}
    )


@functools.cache
def without_caching(mode: str) -> dict[str, RequestOutput]:
    engine = build_engine("tight", exit_config=exits(mode), max_in_flight=1)
    return drive(engine, conversations(mode))


@pytest.mark.parametrize(("mode", "pipeline", "scheduling"), CELLS, ids=str)
def test_tokens_and_depths_are_those_of_a_run_without_caching(mode, pipeline, scheduling):
    run_ahead, decision = pipeline
    engine = build_engine(
        "tight",
        exit_config=exits(mode),
        async_scheduling=run_ahead,
        exit_decision=decision,
        prefill_chunk_size=7,
        enable_prefix_caching=True,
        **scheduling,
    )
    watched = watch(engine)
    outputs, expected = drive(engine, conversations(mode)), without_caching(mode)
    assert essence(outputs) == essence(expected)
    for name, output in outputs.items():
        assert output.logprobs == pytest.approx(expected[name].logprobs, abs=1e-4)
    # It all happened.
    found = [output.num_cached_tokens for output in outputs.values()]
    assert {0, 2 * PAGE} <= set(found) and sum(n > 0 for n in found) >= 5
    totals = engine.core.scheduler.totals()
    assert totals["cached_prompt_tokens"] == sum(found)
    assert watched.most_in_flight == 2
    depths = {depth for output in outputs.values() for depth in output.exit_depths}
    assert len(depths) >= 3 or mode == "weighted"
    seen = features(watched)
    assert bool(seen["prompts beside decode rows"]) == (scheduling["mode"] == "mixed")
    assert bool(seen["chunks side by side"]) == ("wavefront_chunked_prefill" in scheduling)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"incremental_allocation": True},
        {"mode": "mixed", "incremental_allocation": True, "watermark_ratio": 0.1},
    ],
    ids=str,
)
def test_a_pool_in_which_prefixes_come_and_go_gives_the_same(options):
    """Fewer pages than all beginnings take."""
    work = conversations("ouro", count=24, moving_on=True)
    engine = build_engine("tight", enable_prefix_caching=True, **options)
    outputs = drive(engine, work)
    assert essence(outputs) == essence(drive(build_engine("tight"), work))
    assert sum(output.num_cached_tokens > 0 for output in outputs.values()) >= 5
    beginnings = {one.prompt[:end] for one in work for end in (PAGE, 2 * PAGE)}
    assert engine.core.scheduler.stats()["cached_blocks"] < 4 * len(beginnings)  # some given up


@pytest.mark.parametrize("pipeline", [HOST, DEVICE, BOTH], ids=str)
def test_what_a_request_finds_hangs_neither_on_its_exits_nor_on_those_of_who_left_it(pipeline):
    run_ahead, decision = pipeline
    options = {"async_scheduling": run_ahead, "exit_decision": decision}
    engine = build_engine("tight", enable_prefix_caching=True, **options)
    plain = build_engine("tight", **options)
    prompt = tuple(range(20, 20 + 2 * PAGE + 3))
    kinds = [
        {"exit_threshold": 0.3, "min_loops": 1},
        {"exit_threshold": 1.0},
        {"exit_threshold": 0.5, "max_loops": 2},
        {"max_loops": 1},
        {"exit_threshold": 0.6, "temperature": 0.9, "seed": 7},
    ]
    for i, fields in enumerate(kinds):
        work = [Work(prompt, SamplingParams(max_tokens=12, **fields))]
        output = drive(engine, work)["0"]
        assert output.num_cached_tokens == (2 * PAGE if i else 0)
        assert essence({"0": output}) == essence(drive(plain, work))


def test_through_llm_prompts_that_begin_alike_are_answered_alike_and_report_what_was_found():
    shots = "17+25= 42;85-17= 68;1+1= 2;"
    prompts = [shots + end for end in ("200+133=", "9+9=", "a=c;c=f;f=7;a?", "rev:stone=")]
    params = SamplingParams(max_tokens=8, exit_threshold=0.7)

    def answers(**cache) -> tuple[list[RequestOutput], dict]:
        with LLM(
            "ouro-tiny",
            cache_config=CacheConfig(num_blocks=256, block_size=8, **cache),
            scheduler_config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
            execution_config=ExecutionConfig(min_row_bucket=4, min_prefill_bucket=64),
        ) as llm:
            outputs = llm.generate(prompts[:1], params) + llm.generate(prompts[1:], params)
            return outputs, llm.engine.stats()

    plain, _ = answers()
    outputs, stats = answers(enable_prefix_caching=True)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert [o.exit_depths for o in outputs] == [o.exit_depths for o in plain]
    assert {depth for o in outputs for depth in o.exit_depths} >= {2, 4}
    shared = len(shots) // 8 * 8
    assert [o.num_cached_tokens for o in outputs] == [0, shared, shared, shared]
    assert {o.num_cached_tokens for o in plain} == {0}
    assert stats["prompt_tokens"] == sum(len(o.prompt_token_ids) for o in outputs)
    assert stats["cached_prompt_tokens"] == 3 * shared
    assert stats["free_blocks"] + stats["cached_blocks"] == stats["total_blocks"]
