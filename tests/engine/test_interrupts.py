"""Interrupts, failing recovery: the engine on a fake device, at every point of the scheduler."""

import inspect
import sys

import pytest

from rlt_jax.engine.admission import WaitingRequests
from rlt_jax.engine.batching import Batcher
from rlt_jax.engine.core import EngineCore
from rlt_jax.engine.kv_accounting import KVAccounting
from rlt_jax.engine.prefix_cache import PrefixCache
from rlt_jax.engine.progress import Progress
from rlt_jax.engine.scheduler import Scheduler
from rlt_jax.engine.slots import Slots
from rlt_jax.engine.staging import Staging
from rlt_jax.engine.types import DeviceLostError
from rlt_jax.sampling_params import SamplingParams
from tests.engine.fake_device import FakeDevice, assert_empty, fake_engine, run

# What a step runs, apart from the clean-up after a failure.
STEP_FUNCTIONS = [
    EngineCore._submit_ahead,
    EngineCore._collect_oldest,
    EngineCore._tell,
    Scheduler.schedule,
    Scheduler._admit,
    Scheduler._reusable,
    Scheduler._shared_positions,
    Scheduler._extend_tables,
    Scheduler._slot_update,
    Scheduler.update,
    Scheduler._complete_prompts,
    Scheduler._emit,
    Scheduler._land,
    Scheduler._finish,
    Scheduler._release,
    WaitingRequests.admissible,
    Progress.schedule,
    Progress._prompts,
    Progress._decode_rows,
    Progress._route,
    Progress.hear,
    Batcher.choose,
    Batcher._at,
    Batcher._choose_refill,
    Batcher._choose_mixed,
    Batcher._choose_no_refill,
    Batcher._may_prefill,
    Batcher._enough_exits,
    Batcher._choose_coda,
    Batcher._choose_loop,
    Batcher._decode,
    Batcher._take,
    Batcher._tokens_at_once,
    Batcher._decode_rows,
    Batcher._prompts,
    Batcher._whole_chunks,
    Batcher._chunks,
    Batcher._side_by_side,
    Batcher._count_decoding,
    Batcher._next_part,
    Batcher._prompt_row,
    Staging.chunks_of,
    Staging._first_gap,
    Staging.start,
    Staging.advance,
    Staging.drop,
    Slots.fill,
    Slots.free,
    Slots.enter,
    Slots.oldest,
    Slots.start_token,
    KVAccounting.allocate,
    KVAccounting.extend,
    KVAccounting.release,
    KVAccounting.find_prefix,
    KVAccounting.shared_positions,
    KVAccounting.publish,
    KVAccounting._held,
    KVAccounting._take_page,
    PrefixCache.find,
    PrefixCache.put,
    PrefixCache.let_go,
    PrefixCache.take,
    PrefixCache.evict,
]
STEP_CODE = {function.__code__ for function in STEP_FUNCTIONS}
CHOICES = (Scheduler, WaitingRequests, Progress, Batcher, Staging)
CLEAN_UP = {"abort", "fail", "fail_running", "discard", "_start_empty", "drop_finished"}
QUESTIONS = {"__init__", "kv", "has_unfinished_requests", "block_tables", "stats", "totals"}
QUESTIONS |= {"add", "find", "stage_of", "__len__", "__iter__", "remove", "_order"}

interrupted_lines = set()  # (function, line) of all runs below


def test_the_functions_of_the_scheduler_are_all_known():
    for owner in CHOICES:
        functions = dict(inspect.getmembers(owner, inspect.isfunction))
        known = {f.__name__ for f in STEP_FUNCTIONS if f.__module__ == owner.__module__}
        assert functions.keys() <= known | CLEAN_UP | QUESTIONS


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "refill", "max_in_flight": 1},
        {"mode": "refill", "max_in_flight": 1, "max_num_batched_tokens": 1},
        {"mode": "refill", "max_in_flight": 2, "tokens_per_dispatch": 4},
        {"mode": "no_refill", "max_in_flight": 2, "planes": 1},
        {"incremental": True, "max_in_flight": 2, "block_size": 1, "num_pages": 9},
        {"mode": "refill", "max_in_flight": 2, "run_ahead": True},
        {"mode": "mixed", "max_in_flight": 2},
        {"caches_prefixes": True, "max_in_flight": 2, "block_size": 2, "num_pages": 8},
        {"mode": "refill", "max_in_flight": 2, "wavefront_chunked_prefill": True},
        {
            "mode": "mixed",
            "max_in_flight": 2,
            "max_num_batched_tokens": 2,
            "prefill_chunk_size": 1,
            "num_pages": 8,
            "wavefront_chunked_prefill": True,
        },
    ],
    ids=str,
)
def test_an_interrupt_at_any_line_of_the_scheduler_leaves_a_working_engine(options):
    """Raises KeyboardInterrupt at every line that the scheduler runs, once for each state in which
    it runs it, one a run."""
    states = run_interrupted(options, None)
    assert len(states) > 1000
    first_of_each = {state: event for event, state in reversed(list(enumerate(states)))}
    for event in first_of_each.values():
        run_interrupted(options, event)


def standing(scheduler):
    """The stages that there are requests in."""
    names = ("adaptive", "stops", "sampling", "short")
    return frozenset(scheduler.stage_of(name) for name in names if scheduler.find(name))


def run_interrupted(options, interrupted_at):
    """Answers requests with an interrupt at this event (None: without); of each event, a line about
    to run, the line and what the scheduler stood at."""
    requests = {
        "adaptive": ([1], SamplingParams(max_tokens=2, min_loops=1, exit_threshold=0.6)),
        "stops": ([2], SamplingParams(max_tokens=8, stop_token_ids=(11,))),
        "sampling": ([3] * 5, SamplingParams(max_tokens=2, temperature=0.5)),
        "short": ([4, 5], SamplingParams(max_tokens=1)),
    }
    decides = {"leaves": lambda _, __, depth: depth >= 2, "ahead": 1}
    device = FakeDevice(
        token=lambda generation, index: 11 if index == 2 else 7,
        **(decides if "run_ahead" in options else {}),
    )
    sizes = {"prefill_chunk_size": 4, "max_num_seqs": 3, "num_pages": 4}
    core, device = fake_engine(device, **sizes | options)
    beginning = [3] * 4 if "caches_prefixes" in options else []
    for name, (prompt, params) in requests.items():
        core.add_request(name, beginning + prompt, params)
    states = []

    def trace(frame, event, argument):
        if frame.f_code not in STEP_CODE:
            return None
        if event == "line":
            if len(states) == interrupted_at:
                sys.settrace(None)
                interrupted_lines.add((frame.f_code, frame.f_lineno))
                raise KeyboardInterrupt
            at = (frame.f_code, frame.f_lineno, len(device.in_flight))
            states.append((*at, standing(core.scheduler)) if interrupted_at is None else None)
        return trace

    outputs, interrupts = {}, 0
    while core.has_unfinished_requests():
        sys.settrace(trace if not interrupts else None)
        try:
            outputs |= {output.request_id: output for output in core.step()}
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            sys.settrace(None)
    assert outputs.keys() == requests.keys(), interrupted_at
    assert all(output.finished for output in outputs.values())
    reasons = {output.finish_reason for output in outputs.values()}
    assert reasons <= ({"length", "stop", "error"} if interrupts else {"length", "stop"})
    cached = core.scheduler.stats()["cached_blocks"]
    assert not cached or beginning
    assert_empty(core, cached)
    assert device.resets == interrupts == (interrupted_at is not None)
    if not interrupts:
        assert device.most_in_flight == options["max_in_flight"]
        assert bool(core.scheduler.totals()["cached_prompt_tokens"]) == bool(beginning)
    return states


def test_the_interrupts_above_came_at_every_line():
    missed = {}
    modules = {owner.__module__ for owner in CHOICES}
    for function in (one for one in STEP_FUNCTIONS if one.__module__ in modules):
        source, first = inspect.getsourcelines(function)
        for _, _, line in function.__code__.co_lines():
            if line is None or line == first or (function.__code__, line) in interrupted_lines:
                continue
            missed.setdefault(function.__name__, []).append(source[line - first].strip())
    assert missed.keys() <= {"update", "_finish"}, missed
    assert all(line.startswith("raise") for line in missed["update"])
    only_by_abort = {
        "self._waiting.remove(request)",
        "del self._by_generation[request.generation]",
        "return",
    }
    assert set(missed["_finish"]) == only_by_abort


def test_a_reset_that_fails_is_tried_again_and_no_output_is_lost():
    core, device = fake_engine(max_num_seqs=2)
    for name in "abc":
        core.add_request(name, [1], SamplingParams(max_tokens=2))
    core.step()
    core.abort_request("b")
    device.collect = lambda batch: (_ for _ in ()).throw(DeviceLostError("gone"))
    device.reset = lambda: (_ for _ in ()).throw(MemoryError("no room"))
    for _ in range(2):
        with pytest.raises(MemoryError):
            core.step()
    del device.collect, device.reset
    outputs = run(core)
    assert {name: output.finish_reason for name, output in outputs.items()} == {
        "a": "error",
        "b": "abort",
        "c": "length",
    }
    assert_empty(core)


def test_unfinished_requests_that_cannot_run_are_an_error_not_a_silent_loop():
    core, _ = fake_engine()
    core.add_request("a", [1], SamplingParams())
    core.scheduler.schedule = lambda: None
    with pytest.raises(RuntimeError, match="no request can run"):
        core.step()
