"""Who is admitted when: order, overtaking and its bounds, and what it costs."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_jax.config import SchedulerConfig
from rlt_jax.engine.admission import WaitingRequests
from rlt_jax.engine.exit_policy import ExitBounds
from rlt_jax.engine.request import Request
from rlt_jax.sampling_params import SamplingParams
from tests.engine import scheduler_cost
from tests.engine.fake_device import assert_empty, fake_engine, params, run


def request(generation: int, positions: int, priority: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=1, priority=priority)
    bounds = ExitBounds(min_loops=1, max_loops=4, threshold=1.0)
    return Request(str(generation), generation, (1,) * positions, sampling, bounds, arrived=0.0)


def queue_of(*positions: int, **config) -> WaitingRequests:
    """Requests that want so many positions each, in the order in which they came."""
    waiting = WaitingRequests(SchedulerConfig(**config))
    for generation, wanted in enumerate(positions):
        waiting.add(request(generation, wanted))
    return waiting


def admitted(waiting: WaitingRequests, room: int) -> list[int]:
    """The generations that one scan admits to room for so many positions."""
    chosen: list[Request] = []
    for one in waiting.admissible(lambda: room - sum(one.max_positions for one in chosen)):
        chosen.append(one)
    return [one.generation for one in chosen]


# -- order and overtaking ----------------------------------------------------------------------


def test_requests_are_admitted_in_order_of_arrival_while_they_fit():
    waiting = queue_of(3, 3, 3)
    assert admitted(waiting, room=6) == [0, 1]
    assert [one.generation for one in waiting] == [2]


def test_a_request_that_fits_overtakes_those_that_do_not():
    waiting = queue_of(9, 3, 9, 2)
    assert admitted(waiting, room=6) == [1, 3]
    assert [one.generation for one in waiting] == [0, 2]


def test_a_request_is_overtaken_max_admission_bypasses_times_and_then_waited_for():
    waiting = queue_of(9, 1, 1, 1, max_admission_bypasses=2)
    assert admitted(waiting, room=8) == [1, 2]
    assert admitted(waiting, room=8) == []  # there is room for the last one, but not its turn
    assert admitted(waiting, room=10) == [0, 3]


def test_overtakings_are_counted_from_scan_to_scan():
    waiting = queue_of(9, max_admission_bypasses=3)
    for generation in range(1, 4):
        waiting.add(request(generation, 1))
        assert admitted(waiting, room=8) == [generation]
    waiting.add(request(4, 1))
    assert admitted(waiting, room=8) == []


def test_each_request_that_does_not_fit_has_its_own_count():
    waiting = queue_of(9, 1, 8, 1, 1, 1, max_admission_bypasses=2)
    assert admitted(waiting, room=7) == [1, 3]  # the first one was overtaken twice, the third once
    assert admitted(waiting, room=9) == [0]
    assert admitted(waiting, room=7) == [4]  # now the third one was, too
    assert admitted(waiting, room=7) == []
    assert admitted(waiting, room=9) == [2, 5]


def test_without_bypasses_nobody_overtakes():
    waiting = queue_of(9, 1, max_admission_bypasses=0)
    assert admitted(waiting, room=8) == []
    assert admitted(waiting, room=10) == [0, 1]


def test_a_scan_looks_at_admission_scan_limit_requests():
    waiting = queue_of(9, 9, 1, admission_scan_limit=2)
    assert admitted(waiting, room=8) == []
    assert admitted(waiting, room=9) == [0]
    assert admitted(waiting, room=8) == [2]
    assert admitted(queue_of(1, 1, 1, admission_scan_limit=2), room=8) == [0, 1]


def test_with_policy_priority_the_lowest_goes_first_and_ties_are_by_arrival():
    waiting = queue_of(policy="priority")
    for generation, priority in enumerate([1, 0, 1, -5]):
        waiting.add(request(generation, 1, priority))
    assert admitted(waiting, room=4) == [3, 1, 0, 2]


def test_with_policy_fcfs_priorities_mean_nothing():
    waiting = queue_of()
    for generation, priority in enumerate([1, 0, -5]):
        waiting.add(request(generation, 1, priority))
    assert admitted(waiting, room=3) == [0, 1, 2]


def test_a_more_urgent_request_goes_before_one_that_was_overtaken_too_often():
    """It stands before it, and so does not overtake it."""
    waiting = queue_of(9, 1, 1, policy="priority", max_admission_bypasses=1)
    assert admitted(waiting, room=8) == [1]
    waiting.add(request(3, 1, priority=-1))
    assert admitted(waiting, room=8) == [3]


def test_a_request_that_ends_while_it_waits_leaves_nothing_behind():
    waiting = queue_of(9, 1, 1, max_admission_bypasses=1)
    first = next(iter(waiting))
    assert admitted(waiting, room=8) == [1]
    waiting.remove(first)
    assert [one.generation for one in waiting] == [2]
    assert admitted(waiting, room=8) == [2]
    assert len(waiting) == 0


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    work=st.lists(st.tuples(st.integers(1, 12), st.integers(-1, 1)), min_size=1, max_size=40),
    free=st.lists(st.integers(0, 12), max_size=40),
    config=st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["fcfs", "priority"]),
            "admission_scan_limit": st.integers(1, 6),
            "max_admission_bypasses": st.integers(0, 3),
        }
    ),
)
def test_nobody_is_overtaken_more_often_than_allowed_and_the_first_never_waits_in_vain(
    work, free, config
):
    """A request comes before each scan, and each scan finds another room."""
    waiting = WaitingRequests(SchedulerConfig(**config))
    rank = {}
    overtaken = dict.fromkeys(range(len(work)), 0)
    rooms = free + [12] * (len(work) + 20)  # in the end there is room for the largest
    for generation, room in enumerate(rooms):
        if generation < len(work):
            positions, priority = work[generation]
            waiting.add(request(generation, positions, priority))
            rank[generation] = priority * (config["policy"] == "priority"), generation
        there = list(waiting)
        assert [rank[one.generation] for one in there] == sorted(rank[o.generation] for o in there)
        chosen = admitted(waiting, room)
        assert not there or there[0].max_positions > room or there[0].generation in chosen
        left = {one.generation for one in waiting}
        for one in chosen:
            for other in left | set(chosen[chosen.index(one) + 1 :]):
                overtaken[other] += rank[other] < rank[one]
    assert len(waiting) == 0
    assert max(overtaken.values()) <= config["max_admission_bypasses"]


# -- in the engine -----------------------------------------------------------------------------


def order_of_admission(device) -> list[int]:
    """The generations in the order in which the device came to know them."""
    return list(dict.fromkeys(row.generation for batch in device.batches for row in batch.rows))


def test_the_engine_waits_for_a_request_that_was_overtaken_as_often_as_allowed():
    """The numbers of docs/scheduler.md: a page of 4 tokens takes 4 blocks, one per depth."""
    core, device = fake_engine(num_pages=6, max_num_seqs=8, max_admission_bypasses=2)
    core.add_request("a", [1] * 5, params(max_tokens=4))  # 8 blocks
    core.add_request("b", [1] * 17, params(max_tokens=2))  # 20 blocks
    for name in "cde":
        core.add_request(name, [1], params(max_tokens=2))  # 4 blocks
    core.step()
    stats = core.scheduler.stats()
    assert (stats["running"], stats["waiting"], stats["free_blocks"]) == (3, 2, 8)
    run(core)
    assert order_of_admission(device) == [0, 2, 3, 1, 4]
    assert_empty(core)


@pytest.mark.parametrize("bypasses", [0, 5, 8])
def test_under_a_stream_of_small_requests_a_large_one_is_admitted_after_so_many(bypasses):
    core, device = fake_engine(num_pages=6, max_num_seqs=8, max_admission_bypasses=bypasses)
    core.add_request("small", [1], params(max_tokens=8))  # two pages
    core.add_request("large", [1] * 20, params(max_tokens=5))  # all pages
    for i in range(100):
        core.add_request(f"small {i}", [1], params(max_tokens=5 + i % 4))
        core.step()
    assert order_of_admission(device).index(1) == 1 + bypasses
    run(core)
    assert_empty(core)


def test_urgent_requests_do_not_wait_behind_others():
    core, device = fake_engine(max_num_seqs=1, policy="priority")
    for name, priority in (("a", 0), ("b", 0), ("c", 3), ("d", -1)):
        core.add_request(name, [1], params(priority=priority))
    run(core)
    assert order_of_admission(device) == [3, 0, 1, 2]


def test_requests_cancelled_while_they_wait_leave_nothing_behind():
    core, _ = fake_engine(num_pages=6, max_num_seqs=2, max_admission_bypasses=1)
    core.add_request("a", [1] * 5, params(max_tokens=15))
    for name in "bcd":
        core.add_request(name, [1] * 20, params(max_tokens=5))
    core.step()
    assert core.scheduler.stats()["waiting"] == 3
    for name in "cbd":
        core.abort_request(name)
    assert core.scheduler.stats()["waiting"] == 0
    core.abort_request("a")
    run(core)
    assert_empty(core)


# -- cost --------------------------------------------------------------------------------------


def test_a_step_costs_the_same_with_ten_and_with_ten_thousand_waiting_requests():
    """Measured: 100 us each. The bound is for a busy machine: it is far below a look at each."""
    case = scheduler_cost.cases(8)["ouro, gates"]
    few, many = (
        scheduler_cost.measure(case, requests=8, steps=100, waiting=waiting).schedule
        for waiting in (10, 10_000)
    )
    assert many < 3 * few + 100


def test_ten_thousand_waiting_requests_come_and_go_in_milliseconds():
    waiting = queue_of()
    requests = [request(generation, 1, generation % 7) for generation in range(10_000)]
    start = time.perf_counter()
    for one in requests:
        waiting.add(one)
    for one in requests[::2] + requests[1::2]:
        waiting.remove(one)
    assert len(waiting) == 0
    assert time.perf_counter() - start < 2  # measured: 0.05
