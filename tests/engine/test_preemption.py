"""Who leaves for whom, what is kept of it, how it comes back: on the fake device.

The device refuses a victim that is in flight, rows of a saved request, and content that is not what
was saved; it keeps what its pages hold, wherever they come back.
"""

from collections.abc import Collection

import pytest

from rlt_jax.engine.prefix_cache import page_hashes
from rlt_jax.engine.slots import RequestStage
from rlt_jax.engine.types import Stage
from tests.engine.fake_device import (
    FakeDevice,
    adaptive,
    any_in_flight,
    assert_empty,
    fake_engine,
    params,
    run,
)

SIZE = 4  # tokens of a page


def token(generation: int, index: int) -> int:
    return (31 * generation + index) % 97


def preempting(device: FakeDevice | None = None, **options):
    """Two slots and one batch in flight, unless told otherwise."""
    device = device or FakeDevice(token, alone=True)
    usual = {"max_num_seqs": 2, "max_in_flight": 1, "policy": "priority", "block_size": SIZE}
    return fake_engine(device, enable_preemption=True, **usual | options)


def starved(device: FakeDevice | None = None, **options):
    """Two requests of four pages each, in the end, and five in all; nobody is more urgent."""
    options = {"policy": "fcfs", "incremental": True, "num_pages": 5} | options
    core, device = preempting(device, **options)
    for name in "ab":
        core.add_request(name, [1] * 6, adaptive(9))
    return core, device


def stages(core, names: str) -> list[str]:
    return [core.scheduler.stage_of(name).name.lower() for name in names]


def step_until(core, condition) -> None:
    for _ in range(1000):
        if condition():
            return
        core.step()
    raise AssertionError("it never came to that")


def is_at(core, name: str, *stages: RequestStage):
    return lambda: core.scheduler.stage_of(name) in stages


def decoding(core, *names: str):
    """Past their first output."""
    return lambda: all((one := core.scheduler.find(n)) and len(one.tokens) > 1 for n in names)


def preempted(outputs) -> dict[str, int]:
    return {name: o.metrics.preemptions for name, o in outputs.items() if o.metrics.preemptions}


def assert_complete(outputs, *, aborted: Collection[str] = "") -> None:
    """Every request got all its tokens, in their order. They are named in the order of arrival."""
    for name, output in outputs.items():
        count = len(output.token_ids)
        assert output.token_ids == tuple(token(ord(name) - ord("a"), i) for i in range(count))
        if name in aborted:
            assert output.finish_reason == "abort"
        else:
            assert (output.finish_reason, count) == ("length", output.sampling_params.max_tokens)


def saves(device: FakeDevice) -> list[tuple[int, int, int]]:
    """(generation, first page, pages) of each."""
    return transfers(device, Stage.SAVE)


def transfers(device: FakeDevice, stage: Stage) -> list[tuple[int, int, int]]:
    return [
        (batch.rows[0].generation, batch.transfer.first, batch.transfer.count)
        for batch in device.of(stage)
    ]


# -- who leaves ------------------------------------------------------------------------------------


@any_in_flight
@pytest.mark.parametrize(("priority", "leaves"), [(0, True), (1, True), (2, False), (3, False)])
def test_a_slot_is_taken_from_a_strictly_less_urgent_request_only(priority, leaves, max_in_flight):
    core, _ = preempting(max_in_flight=max_in_flight)
    for name in "ab":
        core.add_request(name, [1] * 6, adaptive(6, priority=2))
    step_until(core, decoding(core, *"ab"))
    core.add_request("c", [2] * 3, adaptive(4, priority=priority))
    outputs = run(core)
    assert preempted(outputs) == ({"b": 1} if leaves else {})
    assert_complete(outputs)
    assert (list(outputs) == ["a", "b", "c"]) != leaves
    assert_empty(core)


@pytest.mark.parametrize(("priority", "leaves"), [(1, True), (2, False)])
def test_memory_is_taken_from_a_strictly_less_urgent_request_only(priority, leaves):
    core, _ = preempting(max_num_seqs=3, num_pages=6)
    for name in "ab":
        core.add_request(name, [1] * 6, adaptive(6, priority=2))  # three pages each
    step_until(core, decoding(core, *"ab"))
    core.add_request("c", [2] * 3, adaptive(2, priority=priority))  # one page
    outputs = run(core)
    assert preempted(outputs) == ({"b": 1} if leaves else {})
    assert_complete(outputs)
    assert_empty(core)


@pytest.mark.parametrize("other", [2**70, 2**71, 2**63 - 1])
@pytest.mark.parametrize("sign", [-1, 1])
def test_priorities_beyond_what_an_array_holds_are_equally_urgent(sign, other):
    """Whatever their order, none of two takes the place of the other, again and again."""
    for priorities in ((2**70, other), (other, 2**70)):
        core, _ = preempting()
        core.add_request("a", [1] * 6, adaptive(6, priority=-(2**80)))
        for name, priority in zip("bc", priorities, strict=True):
            core.add_request(name, [1] * 6, adaptive(6, priority=sign * priority))
            step_until(core, decoding(core, *"ab"))
        outputs = run(core)
        assert preempted(outputs) == {}
        assert_complete(outputs)


def test_nothing_is_taken_by_priority_where_the_policy_is_by_arrival():
    core, _ = preempting(policy="fcfs")
    for name, priority in (("a", 2), ("b", 2), ("c", 0)):
        core.add_request(name, [1] * 6, adaptive(6, priority=priority))
    outputs = run(core)
    assert preempted(outputs) == {} and list(outputs) == ["a", "b", "c"]


def test_nobody_leaves_unless_asked_for():
    core, _ = fake_engine(max_num_seqs=2, policy="priority")
    for name, priority in (("a", 2), ("b", 2), ("c", 0)):
        core.add_request(name, [1] * 6, adaptive(6, priority=priority))
        core.step()
    assert preempted(run(core)) == {}


@pytest.mark.parametrize(("pages", "leave"), [(4, "c"), (5, "bc"), (7, "bc"), (8, "")])
def test_as_many_leave_as_are_needed_and_nobody_where_all_would_not_do(pages, leave):
    core, _ = preempting(max_num_seqs=4, num_pages=10)
    for name in "abc":  # 3 pages each; one is left, and the oldest stays
        core.add_request(name, [1] * 6, adaptive(6, priority=1))
    step_until(core, decoding(core, *"abc"))
    core.add_request("d", [2] * (SIZE * pages - 1), params(2))
    core.step()
    assert [s in ("saving", "waiting") for s in stages(core, "abc")] == [n in leave for n in "abc"]
    outputs = run(core)
    assert preempted(outputs) == dict.fromkeys(leave, 1)
    assert_complete(outputs)
    assert_empty(core)


@pytest.mark.parametrize(("pages", "looked_at"), [(7, 3), (8, 1)])
def test_where_all_would_not_do_their_pages_are_not_counted_at_every_step(pages, looked_at):
    core, _ = preempting(max_num_seqs=4, num_pages=10)
    for name in "abc":  # 3 pages each; one is left, and the oldest stays
        core.add_request(name, [1] * 6, adaptive(6, priority=1))
    step_until(core, decoding(core, *"abc"))
    lacking, seen = core.scheduler.kv.lacking, []

    def counted(*ask):
        for one in lacking(*ask):
            seen.append(one)
            yield one

    core.scheduler.kv.lacking = counted
    core.add_request("d", [2] * (SIZE * pages - 1), params(2))
    core.step()
    assert len(seen) == looked_at


def test_the_least_urgent_leaves_first_of_these_the_largest_and_of_these_the_latest():
    """The numbers of docs/scheduler.md: priorities and output tokens behind prompts of 4 tokens."""
    asks = {"a": (0, 9), "b": (1, 9), "c": (2, 9), "d": (2, 13), "e": (2, 9), "f": (1, 21)}
    core, _ = preempting(max_num_seqs=6, incremental=True)
    for name, (priority, max_tokens) in asks.items():
        core.add_request(name, [1] * 4, adaptive(max_tokens, priority=priority))
    step_until(core, decoding(core, *asks))
    for i in range(6):
        core.add_request(f"urgent {i}", [2], params(40, priority=-1))
    left = []
    while len(left) < 6:  # a, too: it is not the most urgent any more
        core.step()
        left += [n for n in asks if core.scheduler.find(n).preemptions and n not in left]
    assert left == ["d", "e", "c", "f", "b", "a"]


def test_the_oldest_of_the_most_urgent_is_never_a_victim():
    core, _ = preempting(max_num_seqs=1)
    core.add_request("a", [1] * 6, adaptive(6, priority=5))
    core.step()
    core.add_request("b", [2], params(priority=0))
    outputs = run(core)
    assert preempted(outputs) == {} and list(outputs) == ["a", "b"]


def test_nobody_else_comes_in_while_one_leaves_for_the_first():
    """d would fit into the page and the slot that are left, but then c might not in the end."""
    core, _ = preempting(max_num_seqs=3, num_pages=9, pages_per_transfer=1)
    core.add_request("a", [1] * 12, adaptive(5, priority=1))  # 4 pages
    core.add_request("b", [1] * 12, adaptive(5, priority=1))  # 4 pages; one is left
    step_until(core, decoding(core, *"ab"))
    core.add_request("c", [2] * 12, adaptive(5, priority=0))  # 4 pages
    step_until(core, is_at(core, "b", RequestStage.SAVING))
    core.add_request("d", [3] * 2, params(priority=1))  # one page
    while core.scheduler.stage_of("b") is RequestStage.SAVING:
        assert stages(core, "cd") == ["waiting", "waiting"]
        core.step()
    outputs = run(core)
    assert preempted(outputs) == {"b": 1}
    assert_complete(outputs)


def test_who_left_comes_back_once_the_one_that_it_left_for_was_in_and_must_leave_itself():
    """b leaves for c, then c for a's third page: b fits beside a, and overtakes c."""
    core, _ = preempting(incremental=True, num_pages=7)
    core.add_request("a", [1] * 4, adaptive(20, priority=0))
    core.add_request("b", [1] * 4, adaptive(9, priority=2))
    step_until(core, decoding(core, *"ab"))
    core.add_request("c", [2] * 16, adaptive(9, priority=1))  # 4 pages, and then 5
    step_until(core, lambda: core.scheduler.find("c").preemptions)
    assert stages(core, "bc") == ["waiting", "waiting"]
    core.step()
    assert stages(core, "c") == ["waiting"] and stages(core, "b") != ["waiting"]
    outputs = run(core)
    assert_complete(outputs)
    assert_empty(core)


@pytest.mark.parametrize(
    ("prompt", "ask", "options"),
    [
        (3, params(9), {"tokens_per_dispatch": 2}),  # saved behind the prompt, and two tokens more
        (4, adaptive(9), {"host_pages": 0}),  # begins again; the next token is on another page
    ],
)
def test_who_comes_back_has_room_to_go_on_and_need_not_leave_at_once(prompt, ask, options):
    """a has three pages of four until it ends; b lacks a second one, and waits for it outside."""
    core, _ = preempting(
        incremental=True, num_pages=4, max_num_batched_tokens=8, prefill_chunk_size=1, **options
    )
    core.add_request("a", [1] * 11, params(2))
    core.add_request("b", [2] * prompt, ask)
    outputs = run(core)
    assert preempted(outputs) == {"b": 1}
    assert_complete(outputs)
    assert_empty(core)


@pytest.mark.parametrize("more", [0, 1])
def test_a_prefix_that_only_victims_hold_is_no_room_for_the_one_that_shares_it(more):
    """It stays for the one that comes, so it brings nothing. Two victims share it; none leaves
    where both would not do."""
    core, _ = preempting(max_num_seqs=4, num_pages=10, caches_prefixes=True)
    prefix = [5] * (4 * SIZE)
    core.add_request("a", [1], params(16, priority=1))  # 4 pages, the oldest
    for name, tokens in (("b", [6]), ("c", [7])):  # 5 pages, 4 of them shared
        core.add_request(name, [*prefix, *tokens], adaptive(4, priority=1))
        while not core.scheduler.kv.find_prefix(page_hashes(prefix, SIZE, None)):
            core.step()
    core.step()
    assert core.scheduler.stats()["free_blocks"] == 0
    core.add_request("d", [*prefix, 8], params(8 + more, priority=0))  # 6 pages or 7
    core.step()
    outputs = run(core)
    assert preempted(outputs) == ({} if more else {"b": 1, "c": 1})
    assert outputs["d"].num_cached_tokens == 16
    assert_complete(outputs)


@pytest.mark.parametrize("end", ["its last token is in flight", "it was cancelled"])
def test_nobody_leaves_where_a_place_comes_free_anyway(end):
    core, _ = preempting(max_num_seqs=3, max_in_flight=2)
    for name in "abc":
        tokens = 30 if name != "b" or end == "it was cancelled" else 6
        core.add_request(name, [1] * 6, params(tokens, priority=1))
    if end == "it was cancelled":
        step_until(core, decoding(core, *"abc"))
        core.abort_request("b")
    else:
        step_until(core, is_at(core, "b", RequestStage.LAST))
    core.add_request("d", [2], params(2, priority=0))
    assert preempted(run(core)) == {}


# -- how it leaves ---------------------------------------------------------------------------------


@any_in_flight
def test_what_is_in_flight_of_a_victim_comes_back_first_and_nothing_of_it_runs_after(max_in_flight):
    core, device = preempting(max_in_flight=max_in_flight, pages_per_transfer=1)
    for name in "ab":
        core.add_request(name, [1] * 6, params(40, priority=1))
    step_until(core, decoding(core, *"ab"))
    core.add_request("c", [2], params(4, priority=0))
    in_flight = len(device.in_flight)
    decided = len(device.batches)
    core.step()
    assert stages(core, "b") == ["saving" if in_flight == 0 else "recurrent"]
    outputs = run(core)
    assert_complete(outputs)
    of_b = [b.stage for b in device.batches[decided:] if 1 in b.rows.generation]
    restored = of_b.index(Stage.RESTORE)
    assert set(of_b[:restored]) == {Stage.SAVE}
    assert (in_flight > 0) == (max_in_flight > 1)


@any_in_flight
def test_a_request_that_comes_back_is_no_victim_until_it_is_there(max_in_flight):
    core, device = preempting(max_in_flight=max_in_flight, pages_per_transfer=1)
    for name in "ab":
        core.add_request(name, [1] * 9, adaptive(9, priority=2))
    step_until(core, decoding(core, *"ab"))
    core.add_request("c", [2], adaptive(2, priority=1))
    step_until(core, is_at(core, "b", RequestStage.RESTORING))
    core.add_request("d", [3], params(priority=0))
    while core.scheduler.stage_of("b") is RequestStage.RESTORING:
        assert stages(core, "d") == ["waiting"]
        core.step()
    outputs = run(core)
    assert preempted(outputs) == {"b": 2}
    order = [(batch.stage, batch.rows[0].generation) for batch in device.batches if batch.transfer]
    pages = 3
    assert order == ([(Stage.SAVE, 1)] * pages + [(Stage.RESTORE, 1)] * pages) * 2
    assert_complete(outputs)


def test_transfers_take_turns_with_other_batches():
    """The timeline of docs/scheduler.md."""
    core, device = preempting(pages_per_transfer=1)
    for name in "ab":
        core.add_request(name, [1] * 6, adaptive(5, priority=1))
    for _ in range(5):
        core.step()
    core.add_request("c", [2] * 3, adaptive(2, priority=0))
    outputs = run(core)
    assert device.stages() == "PBRBR>B>PBBB<C<BRBRC"
    rows = ["".join("abc"[row.generation] for row in batch.rows) for batch in device.batches]
    assert rows == ["ab"] * 5 + ["b", "a", "b", "c"] + ["ac"] * 3 + ["b", "a", "b"] + ["b"] * 5
    going_on = device.batches[15].rows[0]
    assert (going_on.position, going_on.exit_depth, going_on.slot) == (7, 2, 1)
    assert preempted(outputs) == {"b": 1}
    assert_complete(outputs)
    assert transfers(device, Stage.SAVE) == [(1, 0, 1), (1, 1, 1)]
    assert transfers(device, Stage.RESTORE) == [(1, 0, 1), (1, 1, 1)]


def test_a_token_that_ends_a_victim_in_flight_ends_it():
    core, device = preempting(max_in_flight=3)
    for name in "ab":
        core.add_request(name, [1] * 6, params(40, priority=1, stop_token_ids=(31 + 5,)))
    step_until(core, lambda: len(core.scheduler.find("b").tokens) == 4)
    core.add_request("c", [2], params(4, priority=0))
    outputs = run(core)
    assert outputs["b"].finish_reason == "stop" and not saves(device)
    assert preempted(outputs) == {}
    assert_empty(core)


# -- pages that running requests lack --------------------------------------------------------------


@any_in_flight
def test_for_a_row_that_lacks_a_page_the_latest_leaves_and_it_goes_on_in_the_same_batch_order(
    max_in_flight,
):
    core, device = starved(max_in_flight=max_in_flight)
    outputs = run(core)
    assert preempted(outputs) == {"b": 1}
    assert_complete(outputs)
    assert_empty(core)
    alone, plain = fake_engine(max_in_flight=max_in_flight)
    alone.add_request("a", [1] * 6, adaptive(9))
    run(alone)

    def rows(device, generation):
        return [
            (row.position, row.depth, row.exit_depth)
            for batch in device.batches
            for row in batch.rows
            if row.generation == generation and not batch.transfer
        ]

    assert rows(device, 0) == rows(plain, 0) == rows(device, 1)


def test_one_leaves_at_a_time_for_a_row_that_lacks_a_page():
    core, _ = starved(pages_per_transfer=1, num_pages=7, max_num_seqs=3)
    core.add_request("c", [1] * 6, adaptive(9))
    step_until(core, is_at(core, "c", RequestStage.SAVING))
    while core.scheduler.stage_of("c") is RequestStage.SAVING:
        assert core.scheduler.stats()["saving"] == 1
        core.step()
    assert_complete(run(core))


def test_of_those_that_lack_pages_the_most_urgent_is_given_some_first():
    core, _ = preempting(max_num_seqs=3, incremental=True, num_pages=6)
    for name, priority in (("a", 1), ("b", 1), ("c", 0)):
        core.add_request(name, [1] * 6, adaptive(9, priority=priority))
    outputs = run(core)
    assert next(iter(outputs)) == "c" and "c" not in preempted(outputs)
    assert preempted(outputs).keys() == {"a", "b"}
    assert_complete(outputs)


def test_the_one_that_lacks_pages_leaves_itself_where_all_others_are_more_urgent():
    core, _ = preempting(incremental=True, num_pages=5)
    core.add_request("a", [1] * 8, adaptive(9, priority=0))  # from two pages to four
    core.add_request("b", [1] * 6, adaptive(9, priority=1))
    outputs = run(core)
    assert preempted(outputs) == {"b": 1}
    assert_complete(outputs)


def test_with_preemption_no_pages_are_reserved_beyond_those_of_the_prompt():
    """The numbers of docs/scheduler.md: a prompt of 4 tokens, 12 positions in all, 20 blocks."""
    for enable, running in ((False, 1), (True, 4)):
        device = FakeDevice(token, alone=True)
        options = {"num_pages": 5, "incremental": True, "enable_preemption": enable}
        core, _ = fake_engine(device, max_in_flight=1, **options)
        for name in "abcd":
            core.add_request(name, [1] * 4, adaptive(9))
        core.step()
        stats = core.scheduler.stats()
        assert stats["running"] == running
        assert stats["reserved_blocks"] == (0 if enable else 8)
        outputs = run(core)
        assert {o.finish_reason for o in outputs.values()} == {"length"}
        assert bool(preempted(outputs)) == enable


# -- host memory -----------------------------------------------------------------------------------


def test_without_host_memory_requests_before_their_first_output_begin_again_and_others_wait():
    core, device = preempting(host_pages=0, max_num_seqs=3, prefill_chunk_size=2)
    for name in "ab":
        core.add_request(name, [1] * 6, adaptive(9, priority=2))
    step_until(core, decoding(core, *"ab"))
    core.add_request("c", [1] * 8, adaptive(3, priority=2))
    step_until(core, is_at(core, "c", RequestStage.PREFILL))
    core.step()
    for name in "de":
        core.add_request(name, [2], adaptive(3, priority=0))
    outputs = run(core)
    assert preempted(outputs) == {"c": 1}  # and nobody for e
    assert not saves(device)
    begins = [row.position for b in device.batches for row in b.rows if row.generation == 2]
    assert begins[:5] == [0, 0, 2, 4, 6]
    assert_complete(outputs)
    assert_empty(core)


@pytest.mark.parametrize(("host_pages", "saved"), [(3, False), (4, True)])
def test_each_transfer_takes_the_host_memory_of_a_full_one(host_pages, saved):
    """Two pages or three, and two of four: a transfer of two pages at a time."""
    core, device = preempting(host_pages=host_pages, pages_per_transfer=2)
    for name in "ab":
        core.add_request(name, [1] * 10, adaptive(5, priority=1))
    step_until(core, decoding(core, *"ab"))
    core.add_request("c", [2], adaptive(3, priority=0))
    core.step()
    assert core.scheduler.stats()["host_blocks"] == 4 * 4 * saved
    outputs = run(core)
    assert preempted(outputs) == ({"b": 1} if saved else {})
    assert transfers(device, Stage.RESTORE) == [(1, 0, 2), (1, 2, 1)] * saved
    assert_empty(core)


@pytest.mark.parametrize(("host_pages", "leave"), [(3, ""), (4, "bc")])
def test_host_memory_must_hold_all_that_leave_for_one(host_pages, leave):
    """Two pages of each."""
    core, _ = preempting(max_num_seqs=4, num_pages=9, host_pages=host_pages, pages_per_transfer=1)
    for name in "abc":  # 3 pages each in the end
        core.add_request(name, [1] * 6, adaptive(6, priority=1))
    step_until(core, decoding(core, *"abc"))
    core.add_request("d", [2] * 20, params(2))  # 6 pages
    core.step()
    assert core.scheduler.stats()["host_blocks"] == (16 if leave else 0)
    outputs = run(core)
    assert preempted(outputs) == dict.fromkeys(leave, 1)
    assert_complete(outputs)


def test_where_nobody_can_go_on_the_least_urgent_ends_with_an_error_that_names_the_option():
    core, _ = starved(host_pages=0)
    outputs = run(core)
    assert outputs["b"].finish_reason == "error" and 0 < len(outputs["b"].token_ids) < 9
    assert "no host memory left" in outputs["b"].error
    assert "CacheConfig.host_memory_bytes" in outputs["b"].error
    assert_complete({"a": outputs["a"]})
    assert_empty(core)


def test_nobody_ends_with_an_error_while_there_is_host_memory():
    """Two rows of one batch lack a page at the same time, and nothing is in flight."""
    core, _ = starved(num_pages=4)
    outputs = run(core)
    assert preempted(outputs) == {"b": 1}
    assert_complete(outputs)


def test_pages_too_few_for_one_that_nobody_can_leave_for_go_to_the_next():
    """c, in its prompt, leaves one page: a lacks two, b one."""
    options = {"block_size": 3, "num_pages": 4, "incremental": True, "policy": "fcfs"}
    core, _ = preempting(
        max_num_seqs=3, host_pages=0, tokens_per_dispatch=4, prefill_chunk_size=4, **options
    )
    core.add_request("a", [1] * 3, params(5))
    core.add_request("b", [1] * 4, params(5))
    core.step()
    core.add_request("c", [1] * 3, params(1))
    outputs = run(core)
    assert preempted(outputs) == {"c": 1}
    assert_complete(outputs)
