"""bench replay: what is recorded is what every mode gives, and anything else is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from rlt_jax.bench import compare, plot, record, recording, replay, report
from rlt_jax.bench.driver import BenchEngine, Configs
from rlt_jax.bench.modes import SCHEDULING, Mode, all_modes, refused_scheduling
from rlt_jax.bench.record import RecordSpec
from rlt_jax.bench.recording import Conditions, digest_of_weights
from rlt_jax.bench.replay import OutputMismatchError, ReplaySpec, _count_rows, _run_once
from rlt_jax.bench.synthetic import BenchModel
from rlt_jax.config import CacheConfig, ExecutionConfig, ExitConfig, SchedulerConfig
from rlt_jax.engine.types import Stage
from rlt_jax.models.ouro import DTypePolicy
from rlt_jax.sampling_params import SamplingParams
from tests.support import SHAPES, small_model

SPEC = RecordSpec(
    requests=6, prompt=9, output_tokens=8, params=SamplingParams(), depths=(2, 3, 4), seed=3
)
SOURCE = {"synthetic": None, "model": "small", "dtype": "float32", "total_ut_steps": 4, "seed": 3}
MODES = all_modes(SCHEDULING, ["auto"])


@pytest.fixture(scope="module")
def model():
    config, params = small_model()
    return BenchModel("small", config, params, DTypePolicy("float32"), jax.devices()[0], 1.0)


@pytest.fixture(scope="module")
def configs():
    """The shape that other tests have compiled already."""
    shape = SHAPES["tight"]
    return Configs(
        CacheConfig(num_blocks=shape.num_blocks, block_size=shape.block_size),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=shape.max_num_batched_tokens),
        ExitConfig(),
        ExecutionConfig(
            min_row_bucket=shape.min_row_bucket, min_prefill_bucket=shape.min_prefill_bucket
        ),
    )


def make(spec, model, configs):
    with BenchEngine(model, record.prepare(spec, model, configs)) as engine:
        return record.record(spec, engine, SOURCE)


def run(recorded, mode, model, configs, exact=True):
    spec = ReplaySpec(recorded, mode, repeats=2, exact=exact)
    with BenchEngine(model, replay.prepare(spec, model, configs)) as engine:
        (measured,) = replay.run(spec, engine, lambda _: None)
    return measured


@pytest.fixture(scope="module")
def recorded(model, configs):
    return make(SPEC, model, configs)


@pytest.fixture(scope="module")
def runs(recorded, model, configs):
    return [run(recorded, mode, model, configs) for mode in MODES]


@pytest.fixture
def file(recorded, model, tmp_path):
    path = tmp_path / "r.json"
    recording.write(recorded, str(path), ["bench", "replay"], {}, model.device)
    return path


def change(file, edit):
    document = json.loads(file.read_text())
    edit(document)
    file.write_text(json.dumps(document))
    return str(file)


def with_token(recorded, number, index, token):
    """The recording with one output token replaced."""
    requests = list(recorded.requests)
    tokens = list(requests[number].token_ids)
    tokens[index] = token
    requests[number] = dataclasses.replace(requests[number], token_ids=tuple(tokens))
    return dataclasses.replace(recorded, requests=tuple(requests))


def test_a_recording_holds_every_request(recorded):
    assert [request.id for request in recorded.requests] == list("012345")
    assert [request.seed for request in recorded.requests] == [3, 4, 5, 6, 7, 8]
    for request in recorded.requests:
        assert (len(request.prompt), len(request.token_ids)) == (9, 8)
        assert request.depths[0] == 4 and set(request.depths) <= {2, 3, 4}
    decoded = [depth for request in recorded.requests for depth in request.depths[1:]]
    assert set(decoded) == {2, 3, 4}
    assert recorded.mean_depth == sum(decoded) / len(decoded)
    assert (recorded.width, recorded.positions, recorded.output_tokens) == (4, 16, 48)


def test_every_mode_gives_what_was_recorded(runs, recorded):
    assert [(row.mode, row.in_flight, row.kernels) for row in runs] == [
        ("refill", "sync", "auto"),
        ("refill", "async", "auto"),
        ("no_refill", "sync", "auto"),
        ("no_refill", "async", "auto"),
        ("mixed", "sync", "auto"),
        ("mixed", "async", "auto"),
        ("wavefront", "sync", "auto"),
        ("wavefront", "async", "auto"),
        ("mixed_wavefront", "sync", "auto"),
        ("mixed_wavefront", "async", "auto"),
    ]
    for measured in runs:
        assert measured.differing_requests == 0
        assert 0 < measured.occupancy <= 1
        assert measured.mean_rows == pytest.approx(4 * measured.occupancy)  # one bucket, of 4
        assert len(measured.all_seconds) == 2 and measured.seconds == max(measured.all_seconds)
        assert 0 < measured.prefill_seconds < measured.fixed_seconds
    assert runs[0].occupancy > runs[2].occupancy  # that is what refilling is for


@pytest.mark.parametrize("in_flight, most", [("sync", 1), ("async", 2)])
def test_async_has_two_batches_in_flight(recorded, model, configs, in_flight, most):
    spec = ReplaySpec(recorded, Mode("refill", in_flight), repeats=1)
    flying, seen = set(), []
    with BenchEngine(model, replay.prepare(spec, model, configs)) as engine:
        runner = engine.parts.runner
        submit, collect = runner.submit, runner.collect

        def watched_submit(batch):
            flying.add(batch.sequence)
            seen.append(len(flying))
            return submit(batch)

        def watched_collect(ticket):
            output = collect(ticket)
            flying.remove(output.sequence)
            return output

        runner.submit, runner.collect = watched_submit, watched_collect
        for request in recorded.requests:
            engine.add(request.id, request.prompt, SamplingParams(max_tokens=8, min_loops=1))
        engine.finish()
    assert max(seen) == most


@pytest.mark.parametrize(
    "changes",
    [
        {"adaptive": True, "depths": (), "params": SamplingParams(exit_threshold=0.7)},
        {"params": SamplingParams(temperature=1.0, top_p=0.9, top_k=20)},
    ],
    ids=["the gate's depths", "sampled tokens"],
)
def test_other_recordings_are_replayed_too(model, configs, changes):
    made = make(dataclasses.replace(SPEC, **changes), model, configs)
    assert len({depth for request in made.requests for depth in request.depths}) >= 2
    assert run(made, Mode("refill", "async"), model, configs).differing_requests == 0


def test_another_token_is_an_error_or_counted(recorded, model, configs):
    right = recorded.requests[2].token_ids[5]
    changed = with_token(recorded, 2, 5, right + 1)
    with pytest.raises(OutputMismatchError) as refused:
        run(changed, MODES[0], model, configs)
    assert str(refused.value).startswith(
        f"request '2', output token 5 = {right}: must be {right + 1}, as recorded"
    )
    assert str(refused.value).endswith("the mode is refill, sync, auto kernels")
    assert run(changed, MODES[0], model, configs, exact=False).differing_requests == 1


def test_another_depth_is_always_an_error(recorded):
    @dataclasses.dataclass
    class Output:
        request_id: str
        token_ids: tuple
        exit_depths: tuple

    outputs = [Output(r.id, r.token_ids, r.depths) for r in recorded.requests]
    assert replay.count_differing(recorded, outputs, MODES[0], exact=False) == 0
    depths = recorded.requests[4].depths
    outputs[4].exit_depths = (*depths[:-1], 1)
    with pytest.raises(
        OutputMismatchError, match=rf"request '4', depth 7 = 1: must be {depths[-1]}"
    ):
        replay.count_differing(recorded, outputs, MODES[0], exact=False)


def test_the_ideal_scales_the_decode_time_of_the_fastest_full_depth(recorded, runs):
    def row(fixed, prefill, seconds):
        numbers = {"fixed_seconds": fixed, "prefill_seconds": prefill, "seconds": seconds}
        return dataclasses.replace(runs[0], **numbers)

    ideal = 2.0 + 8.0 * recorded.mean_depth / 4
    rows = replay.compare_with_ideal(recorded, [row(12.0, 1.0, 20.0), row(10.0, 2.0, 8.0)])
    assert [row.ideal_seconds for row in rows] == [ideal, ideal]
    assert [row.fraction for row in rows] == [ideal / 20, ideal / 8]
    assert rows[0].ideal_tokens_per_s == 48 / ideal


def test_a_row_s_figures_agree(runs):
    for row in runs:
        assert row.tokens_per_s == 48 / row.seconds
        assert row.fixed_tokens_per_s == 48 / row.fixed_seconds
        assert row.idle_share == 1 - row.back_to_back_seconds / row.seconds
        assert row.submit_seconds > 0 < row.wait_seconds
        assert row.submit_seconds + row.wait_seconds < row.seconds


@pytest.mark.parametrize("scheduling", SCHEDULING)
def test_occupancy_counts_the_loops_of_decode_rows_alone(recorded, model, configs, scheduling):
    spec = ReplaySpec(recorded, Mode(scheduling, "async"))
    with BenchEngine(model, replay.prepare(spec, model, configs)) as engine:
        batches = _run_once(spec, engine, "recorded").batches
        rows, loops, padded = _count_rows(engine, batches)
        calls = [len(engine.parts.runner.prepare(batch)) for batch in batches]
    assert rows == sum(depth for request in recorded.requests for depth in request.depths[1:])
    decoding = [
        batch for batch in batches if batch.rows.num_decode and batch.stage is not Stage.CODA
    ]
    assert (loops, padded) == (len(decoding), 4 * len(decoding))
    assert calls == [batch.num_loops + bool(batch.slot_updates) for batch in batches]
    mixed = {batch.rows.num_decode > 0 for batch in batches if batch.stage is Stage.MIXED}
    assert (True in mixed) == scheduling.startswith("mixed")
    assert (False in mixed) == scheduling.endswith("wavefront")


@pytest.mark.parametrize(
    "layout, refused", [("last_exited", []), ("shared", ["mixed", "wavefront", "mixed_wavefront"])]
)
def test_a_layout_s_modes_are_known_beforehand(layout, refused):
    reasons = refused_scheduling(CacheConfig(layout=layout))
    assert list(reasons) == refused
    for reason in reasons.values():
        assert 'needs CacheConfig.layout = "last_exited"' in reason


def test_the_first_requests_are_a_recording_of_their_own(recorded, model, configs):
    two = recorded.first(2)
    assert two.requests == recorded.requests[:2] and two.fingerprint != recorded.fingerprint
    assert run(two, Mode("mixed", "async"), model, configs).requests == 2


def test_what_is_written_is_read_again(recorded, file):
    read = recording.read(str(file))
    made_by = f"jax {jax.__version__} on cpu"
    assert read == dataclasses.replace(recorded, made_by=made_by)
    assert json.loads(file.read_text())["fingerprint"] == read.fingerprint == recorded.fingerprint
    assert len(read.fingerprint) == 64


def test_the_fingerprint_is_of_what_determines_the_outputs(recorded):
    def changed(**fields):
        return dataclasses.replace(recorded, **fields).fingerprint

    layout = dataclasses.replace(recorded.conditions, layout="shared")
    assert changed(width=3, exits={}, made_by="me") == recorded.fingerprint
    assert with_token(recorded, 0, 0, 1).fingerprint == recorded.fingerprint
    others = {
        changed(conditions=layout),
        changed(sampling={**recorded.sampling, "temperature": 1.0}),
        changed(requests=recorded.requests[:5]),
        recorded.fingerprint,
    }
    assert len(others) == 4


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda d: d.update(fingerprint="0" * 64), "fingerprint = '0000"),
        (lambda d: d.pop("fingerprint"), "fingerprint = None: must be '"),
        (lambda d: d["rows"][1]["prompt"].__setitem__(0, 5), "that of the file's contents"),
        (lambda d: d["rows"][1]["depths"].__setitem__(3, 1), "that of the file's contents"),
        (lambda d: d["rows"][0].update(seed=99), "that of the file's contents"),
        (lambda d: d["config"]["conditions"].update(layout="shared"), "of the file's contents"),
        (lambda d: d["config"]["sampling"].update(temperature=2), "of the file's contents"),
        (
            lambda d: d["rows"][1]["token_ids"].pop(),
            "token_ids of request '1': must be a list of 8",
        ),
        (
            lambda d: d["rows"][1]["token_ids"].__setitem__(2, "x"),
            "token_ids of request '1'[2] = 'x': must be an integer >= 0",
        ),
        (lambda d: d["config"].update(width=0), "width = 0: must be an integer >= 1"),
        (lambda d: d["config"].pop("source"), "--record` wrote: KeyError: 'source'"),
        (lambda d: d["rows"].append(3), "must be what `rlt-jax bench replay --record` wrote"),
        (lambda d: d.update(command="decode"), "command = 'decode': must be 'recording'"),
        (lambda d: d.update(format=2), "format = 2: must be 1"),
    ],
)
def test_a_file_that_was_changed_is_refused(file, edit, message):
    path = change(file, edit)
    with pytest.raises(ValueError) as refused:
        recording.read(path)
    assert str(refused.value).startswith(path) and message in str(refused.value)


def test_other_conditions_than_recorded_are_refused(recorded, model):
    recorded.check_conditions(Conditions.at_hand(model, "last_exited"), "r.json")
    smaller = model.config.with_total_ut_steps(3)
    others = {
        "layout = 'last_exited' was recorded: here it is 'shared'": (model, "shared"),
        "dtype = 'float32' was recorded: here it is 'bfloat16'": (
            dataclasses.replace(model, policy=DTypePolicy("bfloat16", "float32")),
            "last_exited",
        ),
        "model.total_ut_steps = 4 was recorded: here it is 3": (
            dataclasses.replace(model, config=smaller),
            "last_exited",
        ),
        "weights_seed = None was recorded: here it is 7": (
            dataclasses.replace(model, seed=7),
            "last_exited",
        ),
        "weights = ": (
            dataclasses.replace(
                model, params=jax.tree.map(lambda x: x.at[(0,) * x.ndim].add(1), model.params)
            ),
            "last_exited",
        ),
    }
    for message, (other, layout) in others.items():
        with pytest.raises(ValueError) as refused:
            recorded.check_conditions(Conditions.at_hand(other, layout), "r.json")
        assert str(refused.value).startswith(f"r.json: {message}")


def test_the_digest_sees_every_element_and_its_place():
    x = jnp.arange(12.0).reshape(3, 4)
    others = [x, x.T, x[::-1], x.at[2, 3].add(1e-6 * 11), x.astype(jnp.bfloat16), x.reshape(4, 3)]
    assert len({digest_of_weights({"x": other}) for other in others}) == len(others)
    assert digest_of_weights({"x": x}) == digest_of_weights({"x": x + 0})


def test_replays_can_be_compared_and_drawn(recorded, runs, tmp_path):
    path = str(tmp_path / "replay.json")
    rows = tuple(map(report.plain, replay.compare_with_ideal(recorded, runs)))
    report.write(report.Report("replay", (), rows).document(), path)
    _, compared = compare.compare(path, path)
    assert [(row.case["mode"], row.case["in_flight"]) for row in compared] == [
        (mode.scheduling, mode.in_flight) for mode in MODES
    ]
    assert {row.ratios["tokens_per_s"] for row in compared} == {1}
    _, lines = plot.read_lines([path], ["a"])
    assert [line.label for line in lines] == [
        f"a, mode {mode.scheduling}, in_flight {mode.in_flight}" for mode in MODES
    ]
