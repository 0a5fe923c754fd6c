"""Invariant 1 for every exit mode: the same tokens and depths whatever the pipeline, and the
oracle's."""

import dataclasses
import functools

import pytest

from rlt_jax.config import ExitConfig
from rlt_jax.engine.types import Stage
from rlt_jax.sampling_params import SamplingParams
from tests.engine.test_equality import essence, features
from tests.oracle import Comparison
from tests.support import SHAPES, Work, build_engine, drive, random_work, watch

ADAPTIVE = random_work(numbers=11, count=12, min_loops=1, max_loops=4)
ADAPTIVE = [dataclasses.replace(one, arrival=2 * i) for i, one in enumerate(ADAPTIVE)]
# Scores of the random head lie about one half.
LOOKAHEAD = [
    dataclasses.replace(
        one, params=dataclasses.replace(one.params, exit_threshold=(0.45, 0.5, 0.55, 1.0)[i % 4])
    )
    for i, one in enumerate(ADAPTIVE)
]
FULL = [Work((3 * i + 1, 50 - i, 7), SamplingParams(max_tokens=9 + i), arrival=i) for i in range(6)]
# Of each mode: its config, what it is given, and how it can run: async_scheduling, exit_decision.
HOST, AHEAD = (False, "host"), (True, "host")
MODES = {
    "ouro": (ExitConfig(), ADAPTIVE, [HOST, (False, "device"), (True, "device")]),
    "ouro_delayed": (ExitConfig(mode="ouro_delayed"), ADAPTIVE, [HOST, AHEAD]),
    "random_lookahead": (ExitConfig(mode="random_lookahead", seed=3), LOOKAHEAD, [HOST, AHEAD]),
    "weighted": (ExitConfig(mode="weighted"), FULL, [HOST, AHEAD]),
}
SHAPE_OF = {"last_exited": "tight", "shared": "shared"}
# How batches are made, and how many are in flight.
REFILL = [({"mode": "refill"}, 2), ({"mode": "no_refill"}, 2), ({"mode": "refill"}, 3)]
STAGED = [
    ({"mode": "mixed"}, 2),
    ({"mode": "refill", "wavefront_chunked_prefill": True}, 2),
    ({"mode": "mixed", "wavefront_chunked_prefill": True}, 3),
]
CELLS = [
    (mode, pipeline, layout, scheduling, max_in_flight)
    for mode, (_, _, pipelines) in MODES.items()
    for pipeline in pipelines
    for layout in SHAPE_OF
    # Mixed batches are refused with the others.
    for scheduling, max_in_flight in REFILL
    + (STAGED if mode != "weighted" and layout == "last_exited" else [])
]


@functools.cache
def synchronous(mode: str, layout: str):
    """The outputs of the plain run: refill, one batch in flight, the host decides."""
    exits, work, _ = MODES[mode]
    return drive(build_engine(SHAPE_OF[layout], exit_config=exits, max_in_flight=1), work)


@pytest.mark.parametrize(
    ("mode", "pipeline", "layout", "scheduling", "max_in_flight"), CELLS, ids=str
)
def test_tokens_and_depths_are_those_of_the_plain_run(
    mode, pipeline, layout, scheduling, max_in_flight
):
    exits, work, _ = MODES[mode]
    run_ahead, decision = pipeline
    engine = build_engine(
        SHAPE_OF[layout],
        exit_config=exits,
        max_in_flight=max_in_flight,
        async_scheduling=run_ahead,
        exit_decision=decision,
        prefill_chunk_size=7,
        **scheduling,
    )
    watched = watch(engine)
    outputs = drive(engine, work)
    assert essence(outputs) == essence(synchronous(mode, layout))
    # It all happened.
    seen, totals = features(watched), engine.core.scheduler.totals()
    assert watched.most_in_flight == max_in_flight
    depths = [depth for output in outputs.values() for depth in output.exit_depths]
    assert totals["output_tokens"] == len(depths)
    assert totals["mean_depth"] == sum(depths) / len(depths)
    if mode == "weighted":
        assert seen[Stage.TOKENS] and not seen[Stage.RECURRENT] and not seen["gates"]
    else:
        assert seen["gates"] and len(set(depths)) >= 3
        assert bool(seen["mixed depths"]) == (scheduling["mode"] != "no_refill")
        mixed, waves = scheduling["mode"] == "mixed", "wavefront_chunked_prefill" in scheduling
        assert bool(seen["prompts at several loops beside decode rows"]) == mixed
        assert bool(seen["chunks side by side"]) == waves
    signals_in_flight = most_signals_in_flight(watched)
    assert signals_in_flight == (0 if mode == "weighted" else 1 + run_ahead)
    in_vain = totals["idle_row_loops"]
    assert in_vain > 0 if run_ahead and decision == "device" else in_vain == 0


def most_signals_in_flight(watched) -> int:
    """Of one token: batches that it went on from without their signal, and the last one."""
    return max(
        (
            sum(begin <= start < end for begin, end in spans)
            for spans in watched.signals().values()
            for start, _ in spans
        ),
        default=0,
    )


@pytest.mark.torch
@pytest.mark.parametrize("layout", SHAPE_OF)
@pytest.mark.parametrize("mode", MODES)
def test_the_plain_run_equals_the_pytorch_oracle(mode, layout):
    exits, work, _ = MODES[mode]
    comparison = Comparison()
    for name, output in synchronous(mode, layout).items():
        one = work[int(name)]
        comparison.compare(one, output, SHAPES[SHAPE_OF[layout]].layout, exits=exits)
    comparison.check(min_tokens=60, min_depths=1 if mode == "weighted" else 3)


def test_the_modes_differ():
    depths = {
        mode: [o.exit_depths for o in synchronous(mode, "last_exited").values()]
        for mode in ("ouro", "ouro_delayed", "random_lookahead")
    }
    assert len({str(one) for one in depths.values()}) == 3
    full = drive(build_engine("tight", max_in_flight=1), FULL)
    assert essence(synchronous("weighted", "last_exited")) != essence(full)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_loops": 2}, r"SamplingParams.max_loops = 2: must be 4, the full depth, with"),
        ({"exit_threshold": 0.5}, r"SamplingParams.exit_threshold = 0.5: must be 1 with"),
    ],
)
def test_weighted_refuses_requests_that_would_leave(fields, message):
    engine = build_engine("tight", exit_config=MODES["weighted"][0])
    with pytest.raises(ValueError, match=message):
        engine.core.add_request("a", [1], SamplingParams(**fields))


def test_lookahead_heads_of_other_seeds_are_others():
    work = LOOKAHEAD[:4]
    runs = [
        essence(
            drive(
                build_engine("tight", exit_config=ExitConfig(mode="random_lookahead", seed=seed)),
                work,
            )
        )
        for seed in (3, 3, 4)
    ]
    assert runs[0] == runs[1] != runs[2]
