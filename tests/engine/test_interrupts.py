"""Interrupts, failing recovery: the engine on a fake device, at every point of the scheduler."""

import inspect
import sys

import pytest

from rlt_jax.engine.admission import WaitingRequests
from rlt_jax.engine.batching import Batcher
from rlt_jax.engine.core import EngineCore
from rlt_jax.engine.kv_accounting import KVAccounting
from rlt_jax.engine.preemption import HostMemory, Preemption
from rlt_jax.engine.prefix_cache import PrefixCache
from rlt_jax.engine.progress import Progress
from rlt_jax.engine.scheduler import Scheduler
from rlt_jax.engine.seating import Seating
from rlt_jax.engine.slots import RequestStage, Slots
from rlt_jax.engine.staging import Staging
from rlt_jax.engine.types import DeviceLostError
from rlt_jax.sampling_params import SamplingParams
from tests.engine.fake_device import FakeDevice, assert_empty, fake_engine, run

pytestmark = pytest.mark.once

# All that a step runs of these must have been interrupted, line by line.
CHOICES = (Scheduler, Seating, Preemption, HostMemory, WaitingRequests, Progress, Batcher, Staging)
CLEAN_UP = {"abort", "fail", "fail_running", "discard", "_start_empty", "drop_finished"}
CLEAN_UP |= {"keep_only"}
BETWEEN_STEPS = {"__init__", "Scheduler.add", "find", "has_unfinished_requests", "block_tables"}
BETWEEN_STEPS |= {"stage_of", "stats", "totals", "__len__", "__iter__"}
CHOOSING = [
    function
    for owner in CHOICES
    for name, function in inspect.getmembers(owner, inspect.isfunction)
    if not {name, function.__qualname__} & (CLEAN_UP | BETWEEN_STEPS)
]
STEP_FUNCTIONS = [
    *CHOOSING,
    EngineCore._submit_ahead,
    EngineCore._collect_oldest,
    EngineCore._tell,
    Slots.fill,
    Slots.free,
    Slots.enter,
    Slots.oldest,
    Slots.start_token,
    Slots.put_progress,
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

# Of all runs below: the states (see run_through) in which each line was interrupted.
interrupted_in: dict[tuple, set] = {}

REQUESTS = {
    "adaptive": ([1], SamplingParams(max_tokens=2, min_loops=1, exit_threshold=0.6)),
    "stops": ([2], SamplingParams(max_tokens=8, stop_token_ids=(11,))),
    "sampling": ([3] * 5, SamplingParams(max_tokens=2, temperature=0.5)),
    "short": ([4, 5], SamplingParams(max_tokens=1)),
}
# Of these one must leave: for the last, or since they lack pages in the end.
PREEMPTED = {
    "first": ([1] * 3, SamplingParams(max_tokens=4)),
    "adaptive": ([2] * 5, SamplingParams(max_tokens=4, min_loops=1, exit_threshold=0.6)),
    "waits": ([3] * 2, SamplingParams(max_tokens=3)),
    "urgent": ([4, 5], SamplingParams(max_tokens=2, priority=-1)),
}
URGENT_AT = 7  # steps before it comes

PREEMPTION = {"enable_preemption": True, "max_num_seqs": 2, "block_size": 2, "max_in_flight": 2}


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
        PREEMPTION | {"policy": "priority", "num_pages": 20},
        PREEMPTION | {"incremental": True, "num_pages": 5},
        PREEMPTION | {"incremental": True, "num_pages": 6, "caches_prefixes": True},
        PREEMPTION | {"incremental": True, "num_pages": 5, "mode": "mixed", "policy": "priority"},
        # A prompt begins again; one that has sampled cannot, and is given up.
        PREEMPTION
        | {"policy": "priority", "num_pages": 20, "max_num_batched_tokens": 1, "host_pages": 0},
        PREEMPTION | {"incremental": True, "num_pages": 5, "host_pages": 0},
    ],
    ids=str,
)
def test_an_interrupt_at_any_line_of_the_scheduler_leaves_a_working_engine(options):
    """Raises KeyboardInterrupt at every line that the scheduler runs, one a run: in a state in
    which no run before this one did at that line, if it is ever in such a one."""
    moments = {}
    for moment, (line, state) in run_through(options).items():
        moments.setdefault(line, {}).setdefault(state, moment)
    assert len(moments) > 400
    saved = 0
    for line, states in moments.items():
        before = interrupted_in.setdefault(line, set())
        state = next((one for one in states if one not in before), next(iter(states)))
        before.add(state)
        saved += run_interrupted(options, states[state])
    assert bool(saved) == ("enable_preemption" in options and "host_pages" not in options)


def run_through(options):
    """Answers all requests; of each line that the scheduler ran, by (step, number in the step): the
    line, and the state, which is the batches in flight and the stages of all requests."""
    core, device, requests = make_engine(options)
    lines = {}

    def look(moment, line):
        stages = frozenset(map(core.scheduler.stage_of, filter(core.scheduler.find, requests)))
        lines[moment] = line, (len(device.in_flight), stages)

    outputs = serve(core, requests, look)
    assert_answered(core, outputs, requests)
    assert device.resets == 0
    assert device.most_in_flight == options["max_in_flight"]
    totals = core.scheduler.totals()
    assert bool(totals["cached_prompt_tokens"]) == ("caches_prefixes" in options)
    given_up = any(output.error for output in outputs.values())
    assert given_up == ({"incremental", "host_pages"} <= options.keys())
    assert given_up or bool(totals["preemptions"]) == ("enable_preemption" in options)
    return lines


def run_interrupted(options, interrupted_at):
    """Answers all requests with an interrupt at this (step, number of the line in the step): those
    that run end by it. How many were saved on the host then."""
    core, device, requests = make_engine(options)
    running, saved = set(), None

    def interrupt(moment, line):
        nonlocal running, saved
        if moment == interrupted_at:
            find, waiting = core.scheduler.find, list(core.scheduler._waiting)
            unfinished = [one for one in map(find, requests) if one and not one.finished]
            running = {one.id for one in unfinished if one not in waiting}
            saved = core.scheduler.stats()["preempted"]
            raise KeyboardInterrupt

    outputs = serve(core, requests, interrupt, only_in_step=interrupted_at[0])
    assert_answered(core, outputs, requests, running)
    assert device.resets == 1
    return saved


def make_engine(options):
    """An engine, its device, and what is asked of it: (prompt, params) by name."""
    preempts = "enable_preemption" in options
    decides = {"leaves": lambda _, __, depth: depth >= 2, "ahead": 1}
    device = FakeDevice(scripted, alone=preempts, **(decides if "run_ahead" in options else {}))
    sizes = {"prefill_chunk_size": 4, "max_num_seqs": 3, "num_pages": 4}
    core, _ = fake_engine(device, **sizes | options)
    beginning = [3] * 4 if "caches_prefixes" in options else []
    asked = PREEMPTED if preempts else REQUESTS
    return core, device, {name: (beginning + p, params) for name, (p, params) in asked.items()}


def scripted(generation, index):
    return 11 if index == 2 else 20 * generation + index


def serve(core, requests, at_line, only_in_step=None):
    """The last output of each request, with interrupts by at_line((step, number), line) before each
    line of the scheduler."""
    pending, outputs, step, number = dict(requests), {}, 0, 0

    def trace(frame, event, argument):
        nonlocal number
        if frame.f_code not in STEP_CODE:
            return None
        if event == "line":
            at_line((step, number), (frame.f_code, frame.f_lineno))
            number += 1
        return trace

    while pending or core.has_unfinished_requests():
        for name in [name for name in pending if name != "urgent" or step == URGENT_AT]:
            core.add_request(name, *pending.pop(name))
        number = 0
        sys.settrace(trace if only_in_step in (None, step) else None)
        try:
            outputs |= {output.request_id: output for output in core.step()}
        except KeyboardInterrupt:
            left = filter(core.scheduler.find, requests)
            assert all(core.scheduler.stage_of(name) is RequestStage.WAITING for name in left)
        finally:
            sys.settrace(None)
        step += 1
    return outputs


def assert_answered(core, outputs, requests, interrupted=()):
    """Completely, but for the interrupted ones; and nothing is left of any."""
    assert outputs.keys() == requests.keys()
    for generation, (name, (_, params)) in enumerate(requests.items()):
        output = outputs[name]
        tokens = tuple(scripted(generation, index) for index in range(params.max_tokens))
        stops = bool(params.stop_token_ids)
        expected = tokens[:3] if stops else tokens
        if name in interrupted:
            assert output.error.startswith("interrupted")
            assert output.token_ids == tokens[: len(output.token_ids)]
        elif output.error:
            assert "no host memory left" in output.error
        else:
            assert output.finish_reason == ("stop" if stops else "length")
            assert output.token_ids == expected
    cached = core.scheduler.stats()["cached_blocks"]
    assert not cached or core.scheduler._caches_prefixes
    assert_empty(core, cached)


def test_the_interrupts_above_came_at_every_line():
    """But for those of an abort, which is between steps, and of a scheduler at fault."""
    missed = set()
    for function in CHOOSING:
        source, first = inspect.getsourcelines(function)
        for _, _, line in function.__code__.co_lines():
            if line not in (None, first) and (function.__code__, line) not in interrupted_in:
                missed.add((function.__qualname__, source[line - first].strip().split("(")[0]))
    assert missed == {
        ("Scheduler._finish", "self._waiting.remove"),
        ("Scheduler._finish", "del self._by_generation[request.generation]"),
        ("Scheduler._finish", "return"),
        ("Scheduler.fail_for_memory", "return []"),
        ("Scheduler.update", "raise RuntimeError"),
        ("Preemption.least_urgent_starved", "return None"),
        ("WaitingRequests.remove", "del self._queue[bisect.bisect_left"),
    }


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
