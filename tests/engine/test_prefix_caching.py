"""Requests that begin behind a cached prefix: what they find, when, and what it saves.

The fake device keeps what its pages hold and refuses a batch that reads anything else.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_jax.engine.prefix_cache import page_hashes
from rlt_jax.engine.slots import RequestStage
from rlt_jax.engine.types import BatchError, DeviceLostError, SchedulerOutput
from tests.engine import scheduler_cost
from tests.engine.fake_device import (
    FULL_DEPTH,
    FakeDevice,
    adaptive,
    any_in_flight,
    assert_empty,
    fake_engine,
    params,
    run,
)

SIZE = 4  # tokens of a page, which takes as many blocks
PROMPT = list(range(10, 26))  # four pages


def caching_engine(device: FakeDevice | None = None, **options):
    return fake_engine(device, caches_prefixes=True, block_size=SIZE, **options)


def cached(core, prompt, sampling=None) -> int:
    """Runs a request, and whatever else is there: prompt tokens that it did not compute."""
    core.add_request("asks", prompt, sampling or params())
    return run(core)["asks"].num_cached_tokens


def known_pages(core, prompt) -> tuple[int, ...]:
    return core.scheduler.kv.find_prefix(page_hashes(prompt, SIZE, None))


def prompt_rows(device: FakeDevice, generation: int) -> list[tuple[int, int]]:
    """(position, size) of the prompt rows that begin."""
    return [
        (row.position, row.size)
        for batch in device.batches
        for row in batch.rows
        if row.generation == generation and row.tokens
    ]


def assert_everything_is_back(core) -> None:
    """But for what the cache keeps."""
    assert_empty(core, core.scheduler.stats()["cached_blocks"])


# -- what is found -----------------------------------------------------------------------------


def test_what_follows_the_prefix_is_computed_in_pages_of_its_own():
    core, device = caching_engine(max_in_flight=1)
    core.add_request("a", [*PROMPT, 1, 2], params(max_tokens=3))
    core.step()
    core.add_request("b", [*PROMPT, 3], params())
    outputs = run(core)
    assert [outputs[name].num_cached_tokens for name in "ab"] == [0, 16]
    assert prompt_rows(device, 0) == [(0, 18)]
    assert prompt_rows(device, 1) == [(16, 1)]
    one, other = (u.block_table for batch in device.batches for u in batch.slot_updates)
    assert one[:4] == other[:4] and one[4] != other[4]
    totals = core.scheduler.totals()
    assert (totals["prompt_tokens"], totals["cached_prompt_tokens"]) == (18 + 17, 16)
    assert_empty(core, cached_blocks=4 * 4)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (16, 12)],
)
def test_the_last_prompt_token_is_always_computed(tokens, expected):
    """So a prompt of whole pages computes its last page, of which one copy stays known."""
    core, device = caching_engine()
    core.add_request("a", PROMPT[:tokens], params())
    run(core)
    assert cached(core, PROMPT[:tokens]) == expected
    assert prompt_rows(device, 1) == [(expected, tokens - expected)]
    assert_empty(core, cached_blocks=4 * (tokens // SIZE))


def test_the_longest_known_prefix_is_found():
    core, _ = caching_engine()
    assert cached(core, PROMPT) == 0
    assert cached(core, [*PROMPT[:8], 1, *PROMPT[9:]]) == 8
    assert cached(core, [*PROMPT[:8], 1, *PROMPT[9:]]) == 12
    assert cached(core, [*PROMPT[:7], 1, *PROMPT[8:]]) == 4
    assert cached(core, [1, *PROMPT[1:]]) == 0
    assert cached(core, [*PROMPT, *range(30, 38), 1]) == 16
    assert cached(core, PROMPT[4:]) == 0  # the same pages behind another beginning


def test_requests_of_another_salt_find_nothing():
    core, _ = caching_engine()
    found = [
        cached(core, PROMPT, params(cache_salt=salt)) for salt in (None, "a", "b", None, "a", "c")
    ]
    assert found == [0, 0, 0, 12, 12, 0]


def test_nothing_is_cached_unless_asked_for():
    core, device = fake_engine()
    assert cached(core, PROMPT) == cached(core, PROMPT) == 0
    assert prompt_rows(device, 1) == [(0, 16)]
    assert_empty(core)


def test_exit_bounds_sampling_and_output_do_not_matter_to_what_is_found():
    core, _ = caching_engine()
    assert cached(core, PROMPT, adaptive(max_tokens=9)) == 0
    for sampling in (
        params(max_loops=1),
        adaptive(),
        params(temperature=1.0, seed=3),
        params(max_tokens=40),
    ):
        assert cached(core, PROMPT, sampling) == 12


# -- when it is found ----------------------------------------------------------------------------


def completed(batches: list[SchedulerOutput], generation: int) -> int:
    """Prompt tokens that have run all loops by the end of these batches."""
    return sum(
        row.size
        for batch in batches
        for row in batch.rows
        if row.generation == generation and row.depth + batch.num_loops - 1 == FULL_DEPTH
    )


CHUNKED = {
    "refill": {"max_num_batched_tokens": 4},
    "off the page borders": {"max_num_batched_tokens": 4, "prefill_chunk_size": 3},
    "no_refill": {"mode": "no_refill", "max_num_batched_tokens": 4},
    "mixed": {"mode": "mixed", "prefill_chunk_size": 4},
    "wavefront": {"wavefront_chunked_prefill": True, "prefill_chunk_size": 4},
    "mixed wavefront": {
        "mode": "mixed",
        "wavefront_chunked_prefill": True,
        "prefill_chunk_size": 3,
    },
}


@pytest.mark.parametrize("mode", CHUNKED)
@any_in_flight
def test_a_page_is_known_when_the_batch_that_completed_it_was_collected(mode, max_in_flight):
    core, device = caching_engine(max_in_flight=max_in_flight, **CHUNKED[mode])
    core.add_request("decodes", [1], params(max_tokens=60))
    for _ in range(3):
        core.step()
    core.add_request("a", PROMPT, params(max_tokens=60))
    seen, ahead = [0], False
    while len(known_pages(core, PROMPT)) < 4:
        core.step()
        collected = device.batches[: len(device.batches) - len(device.in_flight)]
        assert len(known_pages(core, PROMPT)) == completed(collected, 1) // SIZE
        ahead |= completed(device.batches, 1) // SIZE > len(known_pages(core, PROMPT))
        seen.append(len(known_pages(core, PROMPT)))
    assert list(dict.fromkeys(seen)) == [0, 1, 2, 3, 4]
    assert ahead == (max_in_flight > 1)
    assert ("wavefront" in mode) == any(
        Counter(row.generation for row in batch.rows)[1] > 1 for batch in device.batches
    )
    run(core)
    assert_empty(core, cached_blocks=4 * 4)


def test_chunks_of_a_wavefront_are_known_one_batch_after_the_other():
    core, device = caching_engine(max_in_flight=1, **CHUNKED["wavefront"])
    core.add_request("a", PROMPT, params())
    known = []
    while len(known) < 7:
        core.step()
        known.append(len(known_pages(core, PROMPT)))
    assert device.stages() == "M" * 7
    assert known == [0, 0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("mode", CHUNKED)
@any_in_flight
def test_a_request_admitted_while_another_is_in_prefill_shares_what_is_known_by_then(
    mode, max_in_flight
):
    core, device = caching_engine(max_in_flight=max_in_flight, **CHUNKED[mode])
    core.add_request("decodes", [1], params(max_tokens=60))
    core.add_request("a", PROMPT, params(max_tokens=60))
    while not (known := known_pages(core, PROMPT)):
        core.step()
    shared = 4 * len(known)
    assert 0 < shared < len(PROMPT)
    if max_in_flight == 1:
        assert core.scheduler.stage_of("a") is RequestStage.PREFILL
    assert cached(core, PROMPT) == shared
    assert prompt_rows(device, 2)[0][0] == shared
    assert_empty(core, cached_blocks=4 * 4)


def test_the_same_prompt_twice_in_flight_is_computed_twice_and_one_copy_is_known():
    core, device = caching_engine()
    for name in "ab":
        core.add_request(name, PROMPT, params(max_tokens=6))
    outputs = run(core)
    assert [outputs[name].num_cached_tokens for name in "ab"] == [0, 0]
    assert prompt_rows(device, 0) == prompt_rows(device, 1) == [(0, 16)]
    one, other = (u.block_table for batch in device.batches for u in batch.slot_updates)
    assert not set(one) & set(other)
    assert_empty(core, cached_blocks=4 * 4)


# -- how requests end ----------------------------------------------------------------------------


@any_in_flight
def test_what_a_cancelled_request_has_completed_is_found(max_in_flight):
    """Batches in flight when it is cancelled included."""
    core, _ = caching_engine(max_in_flight=max_in_flight, **CHUNKED["refill"])
    core.add_request("a", PROMPT, params())
    core.step()
    assert len(known_pages(core, PROMPT)) == 1
    core.abort_request("a")
    run(core)
    assert len(known_pages(core, PROMPT)) == max_in_flight
    assert_empty(core, cached_blocks=4 * max_in_flight)
    assert cached(core, PROMPT) == min(4 * max_in_flight, 12)


def test_a_chunk_cancelled_between_its_loops_is_not_found():
    core, device = caching_engine(max_in_flight=2, **CHUNKED["wavefront"])
    core.add_request("a", PROMPT, params())
    for _ in range(3):
        core.step()
    core.abort_request("a")  # the fourth loop of the first chunk is in flight
    run(core)
    assert len(device.batches) == 4 and len(known_pages(core, PROMPT)) == 1
    assert_empty(core, cached_blocks=4)
    assert cached(core, PROMPT) == 4


def test_a_request_cancelled_before_it_ran_leaves_nothing_to_find():
    core, _ = caching_engine(max_num_seqs=1)
    core.add_request("a", [1], params())
    core.add_request("b", PROMPT, params())
    core.step()
    core.abort_request("b")
    run(core)
    assert_empty(core)
    assert cached(core, PROMPT) == 0


def test_a_batch_that_fails_publishes_nothing_and_those_before_it_do():
    core, device = caching_engine(max_in_flight=3, **CHUNKED["refill"])
    submit = device.submit

    def failing(batch):
        if len(device.batches) == 2:
            device.submit = submit
            raise BatchError("no")
        return submit(batch)

    device.submit = failing
    core.add_request("a", PROMPT, params())
    assert run(core)["a"].finish_reason == "error"
    assert len(known_pages(core, PROMPT)) == 2
    assert_empty(core, cached_blocks=4 * 2)
    assert cached(core, PROMPT) == 8


@pytest.mark.parametrize("call", ["submit", "collect"])
def test_the_cache_goes_with_the_device_state(call):
    core, device = caching_engine(max_in_flight=2, max_num_seqs=2)
    core.add_request("before", PROMPT, params())
    run(core)
    for name in ("a", "b", "waits"):
        core.add_request(name, [*PROMPT, ord(name[0]) - 90], params(max_tokens=8))
    core.step()
    assert core.scheduler.find("a").cached_tokens == 16
    setattr(device, call, lambda _: (_ for _ in ()).throw(DeviceLostError("gone")))
    core.step()
    delattr(device, call)
    assert known_pages(core, PROMPT) == ()
    outputs = run(core)
    assert outputs["waits"].finish_reason == "length"
    assert outputs["waits"].num_cached_tokens == 0
    assert_empty(core, cached_blocks=4 * 4)
    assert cached(core, [*PROMPT, 1]) == 16


# -- what is given up ----------------------------------------------------------------------------


def test_under_a_tiny_pool_the_leaf_pages_of_the_oldest_prefix_are_given_up_first():
    core, _ = caching_engine(num_pages=6)
    other = list(range(50, 58))
    assert cached(core, PROMPT[:12], params(max_tokens=1)) == 0
    assert cached(core, other, params(max_tokens=1)) == 0
    assert cached(core, PROMPT[:5], params(max_tokens=1)) == 4  # used again: its first page
    assert_empty(core, cached_blocks=4 * 5)
    cached(core, [1, 2, 3], params(max_tokens=6))  # two pages: the free one and one more
    assert len(known_pages(core, PROMPT)) == 2 and len(known_pages(core, other)) == 2
    cached(core, [1, 2, 3], params(max_tokens=18))  # five pages
    assert len(known_pages(core, PROMPT)) == 1 and len(known_pages(core, other)) == 0
    assert_empty(core, cached_blocks=4)


def test_a_cache_that_fills_the_pool_keeps_nobody_waiting():
    core, _ = caching_engine(num_pages=5)
    for i in range(20):
        assert cached(core, [i] * 16, params(max_tokens=5)) == 0
        assert_empty(core, cached_blocks=4 * 4)
    assert cached(core, [19] * 16, params(max_tokens=5)) == 12


# -- admission -----------------------------------------------------------------------------------


def blocks(core) -> tuple[int, int]:
    stats = core.scheduler.stats()
    return stats["free_blocks"], stats["cached_blocks"]


def test_admission_counts_a_prefix_that_others_hold_and_one_that_nobody_holds():
    """The numbers of docs/scheduler.md: pages of 4 tokens, 40 blocks."""
    core, _ = caching_engine(num_pages=10)
    beginning = list(range(20))

    def ask(name, prompt, positions):
        core.add_request(name, prompt, params(max_tokens=positions + 1 - len(prompt)))

    def waits(name):
        return core.scheduler.stage_of(name) is RequestStage.WAITING

    ask("a", [*beginning, 30], positions=24)
    while len(known_pages(core, beginning)) < 5:
        core.step()
    assert blocks(core) == (16, 0)
    ask("b", [*beginning, 31], positions=40)
    ask("c", [*beginning, 31], positions=36)
    core.step()
    assert waits("b") and not waits("c")
    assert blocks(core) == (0, 0)
    core.abort_request("b")
    assert run(core)["c"].num_cached_tokens == 20
    assert blocks(core) == (20, 20)
    ask("d", [40], positions=4)
    ask("e", [*beginning, 32], positions=40)
    ask("f", [*beginning, 33], positions=36)
    core.step()
    assert waits("e") and not waits("d") and not waits("f")
    assert blocks(core) == (0, 0)
    outputs = run(core)
    assert [outputs[name].num_cached_tokens for name in "def"] == [0, 20, 20]
    assert_empty(core, cached_blocks=20)


def test_a_request_that_waits_is_admitted_as_soon_as_enough_of_it_is_known():
    """Of two with the same beginning the second does not fit beside the first until then."""
    core, _ = caching_engine(num_pages=6, max_in_flight=1)
    core.add_request("a", [*PROMPT, 1], params(max_tokens=4))  # 5 pages
    core.add_request("b", [*PROMPT, 2], params(max_tokens=4))
    core.step()
    assert core.scheduler.stage_of("a") is not RequestStage.PREFILL
    assert core.scheduler.stage_of("b") is RequestStage.WAITING
    core.step()
    assert core.scheduler.stage_of("b") is not RequestStage.WAITING
    outputs = run(core)
    assert [outputs[name].num_cached_tokens for name in "ab"] == [0, 16]
    assert_empty(core, cached_blocks=4 * 4)


def test_each_request_that_waits_is_measured_by_its_own_prefix():
    core, _ = caching_engine(num_pages=7, max_in_flight=1)
    core.add_request("a", [*PROMPT, 1], params(max_tokens=8))  # 6 pages
    core.step()
    core.add_request("other", [50] * 17, params(max_tokens=4))
    core.add_request("half", [*PROMPT[:8], *[51] * 9], params(max_tokens=4))
    core.add_request("same", [*PROMPT, 2], params(max_tokens=4))  # 5 pages, 4 of them there
    core.step()
    stages = {name: core.scheduler.stage_of(name) for name in ("other", "half", "same")}
    waiting = [name for name, stage in stages.items() if stage is RequestStage.WAITING]
    assert waiting == ["other", "half"]
    run(core)


def test_a_request_that_fits_by_its_prefix_alone_overtakes_and_is_counted():
    core, device = caching_engine(num_pages=8, max_num_seqs=8, max_admission_bypasses=2)
    core.add_request("holds", [*PROMPT, 1], params(max_tokens=4))  # 5 of 8 pages
    while len(known_pages(core, PROMPT)) < 4:
        core.step()
    core.add_request("large", [2] * 14, params(max_tokens=3))  # 4 pages
    for i in range(3, 7):
        core.add_request(f"small {i}", [*PROMPT, i], params(max_tokens=1))  # 5 pages, 4 shared
    core.step()
    stats = core.scheduler.stats()
    assert (stats["running"], stats["waiting"], stats["free_blocks"]) == (3, 3, 4)
    run(core)
    order = list(dict.fromkeys(row.generation for batch in device.batches for row in batch.rows))
    assert order[:4] == [0, 2, 3, 1]
    assert_everything_is_back(core)


def test_with_incremental_allocation_a_prefix_saves_what_is_held_and_what_is_reserved():
    core, _ = caching_engine(num_pages=8, incremental=True, max_in_flight=1)
    core.add_request("a", [*PROMPT, 1], params(max_tokens=12))  # 7 pages in the end, 5 now
    core.step()
    core.add_request("b", [*PROMPT, 2], params(max_tokens=4))  # 5 pages, 4 of them shared
    core.step()
    stats = core.scheduler.stats()
    assert (stats["running"], stats["waiting"]) == (2, 0)
    assert (stats["free_blocks"], stats["reserved_blocks"]) == (4 * 2, 4 * 2)
    outputs = run(core)
    assert outputs["b"].num_cached_tokens == 16
    assert_empty(core, cached_blocks=4 * 4)


# -- whatever comes ------------------------------------------------------------------------------

SEEN = Counter()  # over all examples of the property below
ENGINES = st.fixed_dictionaries(
    {
        "num_pages": st.sampled_from([9, 12, 40]),
        "max_in_flight": st.integers(1, 3),
        "max_num_seqs": st.integers(1, 4),
        "max_num_batched_tokens": st.sampled_from([4, 9, 32]),
        "prefill_chunk_size": st.integers(1, 32),
        "max_admission_bypasses": st.integers(0, 3),
        "incremental": st.booleans(),
        "watermark_ratio": st.sampled_from([0.0, 0.2]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "tokens_per_dispatch": st.sampled_from([1, 4]),
    }
)
MODES = st.sampled_from(
    [
        {"mode": "refill"},
        {"mode": "no_refill"},
        {"mode": "mixed"},
        {"wavefront_chunked_prefill": True},
        {"mode": "mixed", "wavefront_chunked_prefill": True},
    ]
)
# Pages of one of two contents, a few tokens more, output tokens, arrival, end by cancellation.
ASKS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([1, 2]), max_size=5),
        st.integers(1, SIZE),
        st.integers(1, 9),
        st.integers(0, 40),
        st.one_of(st.none(), st.none(), st.integers(0, 30)),
    ),
    min_size=3,
    max_size=14,
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(options=ENGINES, mode=MODES, asks=ASKS)
def test_no_request_ever_reads_what_is_not_of_its_own_prompt(options, mode, asks):
    """The device sees to that; and each request gets what it asked for."""
    device = FakeDevice(token=lambda generation, i: (31 * generation + i) % 97)
    core, _ = caching_engine(device, **options, **mode)
    outputs, names = {}, []
    for step in range(2000):
        for i, (pages, last, tokens, arrives, lasts) in enumerate(asks):
            if arrives == step:
                sampling = (params, adaptive)[i % 2](tokens, priority=i % 3)
                prompt = [page for page in pages for _ in range(SIZE)] + [3] * last
                core.add_request(str(i), prompt, sampling)
                names.append(str(i))
            if lasts is not None and arrives + lasts == step:
                SEEN["cancelled"] += core.abort_request(str(i))
        if step > 40 and not core.has_unfinished_requests():
            break
        outputs |= {output.request_id: output for output in core.step()}
    assert_everything_is_back(core)
    assert sorted(outputs) == sorted(names)
    pages_known = set()
    for generation, name in enumerate(names):
        output = outputs[name]
        tokens = tuple((31 * generation + i) % 97 for i in range(asks[int(name)][2]))
        assert output.token_ids == tokens[: len(output.token_ids)]
        assert output.finish_reason == "abort" or output.token_ids == tokens
        SEEN["hits"] += output.num_cached_tokens > 0
        SEEN["misses"] += output.num_cached_tokens == 0
        if output.token_ids:
            pages_known.update(page_hashes(output.prompt_token_ids, SIZE, None))
    SEEN["given up"] += len(pages_known) - core.scheduler.stats()["cached_blocks"] // 4


def test_the_property_above_met_hits_misses_eviction_and_cancellation():
    assert all(SEEN[feature] > 20 for feature in ("hits", "misses", "given up", "cancelled"))


# -- cost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("changing", [False, True])
def test_a_step_costs_the_same_with_a_hundred_and_with_ten_thousand_waiting_requests(changing):
    """They share a beginning of 32 pages with those that run. changing: what is shared is not the
    same from step to step. The bound is for a busy machine: it is far below a look at each."""
    case = scheduler_cost.cases(8)["ouro, gates"]
    few, many = (
        scheduler_cost.measure(
            case, requests=8, steps=60, waiting=waiting, shared=512, changing=changing
        ).schedule
        for waiting in (100, 10_000)
    )
    assert many < 3 * few + 100
