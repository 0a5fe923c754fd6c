"""rlt-jax bench on the command line: tables, help, errors."""

import dataclasses
import json

import pytest

from rlt_jax.bench import synthetic
from rlt_jax.bench.recording import SOURCE, Conditions, read, write
from rlt_jax.bench.synthetic import load_model
from rlt_jax.cli import main
from tests.cli.support import SMALL, assert_one_error_line

QUICK = ["--context=8", "--tokens=6", "--skip=1", "--no-roofline"]


@pytest.fixture
def bench(cli, checkpoint):
    """Runs a command of bench on the tiny checkpoint."""

    def run(command, *arguments):
        return cli("bench", command, "--model", checkpoint, *SMALL, *arguments)

    return run


def test_bench_alone_shows_its_commands(cli):
    status, out, err = cli("bench")
    assert (status, err) == (0, "")
    for command in (
        "roofline",
        "decode",
        "prefill",
        "kernels",
        "throughput",
        "replay",
        "preemption",
        "soak",
        "compare",
        "plot",
    ):
        assert f"    {command}" in out


@pytest.mark.parametrize(
    "command, flags",
    [
        ("decode", ["--batch", "--max-num-batched-tokens", "--block-size", "--min-row-bucket"]),
        ("prefill", ["--prompt", "--kernels", "--gpu-memory-utilization"]),
        ("throughput", ["--closed-loop", "--exit-threshold", "--temperature", "--exit-mode"]),
        ("kernels", ["--rows", "--kernels", "--layout"]),
        ("replay", ["--record", "--modes", "--temperature", "--max-num-seqs", "--layout"]),
    ],
)
def test_config_fields_are_flags(cli, command, flags):
    status, out, _ = cli("bench", command, "--help-all")
    assert status == 0
    for flag in flags:
        assert f"  {flag} " in out or f"  {flag}\n" in out


def test_a_measurement_is_a_table_and_a_file(bench, tmp_path):
    file = tmp_path / "decode.json"
    status, out, _ = bench("decode", "--batch=2", "--layout=shared", *QUICK, f"--output={file}")
    assert status == 0
    assert "ms/step" in out and "shared" in out and "start-up: weights" in out
    assert out.endswith(f"wrote {file}\n")
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["layout"], row["batch"]) == ("shared", 2)


def test_several_tokens_per_dispatch(bench, tmp_path):
    file = tmp_path / "decode.json"
    arguments = ["--batch=2", "--context=8", "--tokens=16", "--skip=2", "--no-roofline"]
    status, _, _ = bench("decode", *arguments, "--tokens-per-dispatch=4", f"--output={file}")
    assert status == 0
    (row,) = json.loads(file.read_text())["rows"]
    # Tokens come four at a time: the window begins with the 5th and ends with the 17th.
    assert (row["first_position"], row["last_position"], row["steps"]) == (12, 23, 12)
    assert row["loops"] == 4 * 12


def test_compare_prints_ratios(bench, cli, tmp_path):
    file = tmp_path / "prefill.json"
    bench("prefill", "--requests=1", "--prompt=8", "--repeats=1", "--no-roofline", "--output", file)
    other = tmp_path / "compare.json"
    status, out, _ = cli("bench", "compare", file, file, "--output", other)
    assert status == 0 and "1.000" in out
    (row,) = json.loads(other.read_text())["rows"]
    assert row["ratios"]["tokens_per_s"] == 1


def test_plot_writes_the_picture(bench, cli, tmp_path):
    file, picture = tmp_path / "t.json", tmp_path / "t.svg"
    flags = ["--requests=1", "--prompt=8", "--output-tokens=4", "--repeats=1"]
    bench("throughput", *flags, "--output", file)
    status, out, _ = cli("bench", "plot", file, "--output", picture)
    assert (status, out) == (0, f"wrote {picture}\n")
    assert picture.stat().st_size > 0


RECORD = ["--requests=5", "--prompt=6", "--output-tokens=6", "--seed=1"]


@pytest.fixture(scope="module")
def recording(checkpoint, tmp_path_factory):
    """A recording of the tiny checkpoint."""
    file = tmp_path_factory.mktemp("recording") / "r.json"
    arguments = ["--record", str(file), "--model", checkpoint, *SMALL, *RECORD]
    assert main(["bench", "replay", *arguments]) == 0
    return file


def test_a_recording_is_replayed_in_every_mode(cli, recording, tmp_path):
    file, picture = tmp_path / "replay.json", tmp_path / "replay.svg"
    flags = [flag for flag in SMALL if "seqs" not in flag]  # the width is recorded
    status, out, err = cli("bench", "replay", recording, *flags, "--repeats=1", "--output", file)
    assert status == 0, err
    assert "of the ideal" in out and "5 of 5" in out and out.endswith(f"wrote {file}\n")
    document = json.loads(file.read_text())
    rows = document["rows"]
    assert [(row["mode"], row["in_flight"]) for row in rows] == [
        (mode, in_flight)
        for mode in ("refill", "no_refill", "mixed", "wavefront", "mixed_wavefront")
        for in_flight in ("sync", "async")
    ]
    assert {(row["width"], row["requests"], row["differing_requests"]) for row in rows} == {
        (4, 5, 0)
    }
    engines = document["config"]["engines"]
    assert [e["execution_config"]["max_in_flight"] for e in engines] == [1, 2] * 5
    assert [e["execution_config"]["async_scheduling"] for e in engines] == [False, True] * 5
    assert {e["exit_config"]["mode"] for e in engines} == {"trace"}
    # The first engine compiled; the others share its programs.
    assert not any(s["compile_seconds_by_program"] for s in document["startup"][1:2])
    assert cli("bench", "compare", file, file)[0] == 0
    assert cli("bench", "plot", file, "--output", picture)[0] == 0


def test_a_shared_layout_leaves_modes_out_and_says_so(cli, tmp_path, checkpoint):
    file, flags = tmp_path / "r.json", ["--model", checkpoint, *SMALL]
    assert cli("bench", "replay", "--record", file, "--layout=shared", *flags, *RECORD)[0] == 0
    arguments = ["bench", "replay", file, *SMALL, "--repeats=1", "--in-flight=async"]
    status, out, err = cli(*arguments)
    assert status == 0, err
    left_out = [line.split(":")[1] for line in out.splitlines() if line.startswith("left out: ")]
    assert left_out == [" mixed", " wavefront", " mixed_wavefront"]
    message = "SchedulerConfig.mode = 'mixed': needs CacheConfig.layout = \"last_exited\""
    assert_one_error_line(cli(*arguments, "--modes=refill,mixed"), message)


def test_bfloat16_tokens_are_counted_unless_they_must_be_exact(bench, cli, tmp_path):
    file = tmp_path / "r.json"
    # At full depth there are few programs to compile.
    assert bench("replay", "--record", file, "--dtype=bfloat16", "--depths=4", *RECORD)[0] == 0
    document = json.loads(file.read_text())
    document["rows"][3]["token_ids"][2] += 1
    file.write_text(json.dumps(document))
    arguments = ["bench", "replay", file, *SMALL, "--repeats=1", "--modes=refill"]
    status, out, _ = cli(*arguments)
    assert status == 0 and "4 of 5" in out
    assert_one_error_line(cli(*arguments, "--exact"), "request '3', output token 2 = ")


def test_another_token_ends_a_replay(cli, recording, tmp_path):
    document = json.loads(recording.read_text())
    document["rows"][3]["token_ids"][2] += 1
    file = tmp_path / "r.json"
    file.write_text(json.dumps(document))
    result = cli("bench", "replay", file, *SMALL, "--repeats=1", "--modes=refill")
    assert_one_error_line(result, "request '3', output token 2 = ")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--layout=shared"], "layout = 'last_exited' was recorded: here it is 'shared'"),
        (["--dtype=bfloat16"], "dtype = 'float32' was recorded: here it is 'bfloat16'"),
        (["--total-ut-steps=3"], "model.total_ut_steps = 4 was recorded: here it is 3"),
        (["--repeats=0"], "--repeats = 0: must be an integer >= 1"),
        (["--modes=turbo"], "argument --modes: invalid choice: 'turbo'"),
        (["--in-flight=3"], "argument --in-flight: invalid choice: '3'"),
        (["--first=6"], "--first = 6: must be an integer >= 1 and <= 5"),
        (["--wavefront-chunked-prefill"], "unrecognized arguments: --wavefront-chunked-prefill"),
        (["--max-in-flight=2"], "unrecognized arguments: --max-in-flight"),
        (["--record=x.json"], "must be given, or --record FILE instead, and not both"),
        (["--requests=4"], "--requests = 4: has a meaning only with --record"),
        (["--adaptive"], "--adaptive = True: has a meaning only with --record"),
        (["--exit-threshold=0.5"], "--exit-threshold = 0.5: has a meaning only with --record"),
    ],
    ids=lambda case: str(case)[:60],
)
def test_what_a_recording_does_not_allow_is_refused(cli, recording, arguments, message):
    assert_one_error_line(cli("bench", "replay", recording, *SMALL, *arguments), message)


def test_a_changed_recording_is_refused(cli, recording, tmp_path):
    document = json.loads(recording.read_text())
    document["rows"][0]["seed"] += 1
    file = tmp_path / "r.json"
    file.write_text(json.dumps(document))
    assert_one_error_line(cli("bench", "replay", file), f"{file}: fingerprint = '")


def test_other_random_weights_than_recorded_are_refused(
    cli, checkpoint, recording, tmp_path, monkeypatch
):
    """The checkpoint stands for random weights, which take seconds to draw."""
    model = load_model(model=checkpoint)
    monkeypatch.setattr(
        synthetic, "load_model", lambda seed, **_: dataclasses.replace(model, seed=seed)
    )
    conditions = Conditions.at_hand(dataclasses.replace(model, seed=1), "last_exited")
    source = dict.fromkeys(SOURCE) | {"synthetic": "ouro-tiny", "seed": 1}
    made = dataclasses.replace(read(str(recording)), conditions=conditions, source=source)
    file = tmp_path / "r.json"
    write(made, str(file), [], {}, model.device)
    assert cli("bench", "replay", file, *SMALL, "--repeats=1", "--modes=refill")[0] == 0
    message = "weights_seed = 1 was recorded: here it is 2"
    assert_one_error_line(cli("bench", "replay", file, "--seed=2"), message)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--exact"], "--exact = True: cannot go with --record"),
        (["--modes=refill"], "--modes = ['refill']: cannot go with --record"),
        (["--in-flight=sync"], "--in-flight = ['sync']: cannot go with --record"),
        (["--first=3"], "--first = 3: cannot go with --record"),
        (["--output=x.json"], "--output = 'x.json': cannot go with --record"),
        (["--kernels=auto,reference"], "must be one with --record"),
        (["--adaptive"], "--exit-threshold = 1.0: must be < 1 with --adaptive"),
        (["--adaptive", "--depths=2"], "--depths = [2]: cannot be used together with --adaptive"),
        (["--exit-threshold=0.5"], "--exit-threshold = 0.5: has a meaning only with --adaptive"),
        (["--depths=5"], "--depths = 5: must be an integer >= 1 and <= 4"),
        (["--output-tokens=1"], "--output-tokens = 1: must be an integer >= 2"),
        (["--prompt=60"], "--prompt = 60: with --output-tokens 16 must be <= 49"),
        (["--requests=0"], "--requests = 0: must be an integer >= 1"),
        (["--record=/no/r.json"], "--record = '/no/r.json': must be a file in a folder that"),
    ],
    ids=lambda case: str(case)[:60],
)
def test_what_cannot_be_recorded_is_refused(bench, tmp_path, arguments, message):
    file = tmp_path / "r.json"
    assert_one_error_line(bench("replay", "--record", file, "--prompt=8", *arguments), message)
    assert not file.exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nope"], "invalid choice: 'nope'"),
        (["decode", "--batch=x"], "argument --batch: invalid value 'x': must be integers"),
        (["decode", "--kernels=cuda"], "argument --kernels: invalid choice: 'cuda'"),
        (["decode", "--depth=2", "--mixed-depths=3"], "cannot be used together with --depth"),
        (["decode", "--block-size=0"], "CacheConfig.block_size = 0: must be an integer >= 1"),
        (["decode", "--exit-mode=ouro"], "unrecognized arguments: --exit-mode"),
        (["decode", "--seed=-1"], "--seed = -1: must be an integer >= 0"),
        (["decode", "--synthetic=gpt"], "--synthetic = 'gpt': must be one of ouro-1.4b"),
        (["decode", "--device=abacus"], "device = 'abacus'"),
        (["decode", "--output=/no/file.json"], "--output = '/no/file.json': must be a file in"),
        (["roofline", "--read-bytes=1"], "--read-bytes = 1: must be an integer >= 1048576"),
        (["roofline", "--output=/"], "--output = '/': must be a file in a folder that exists"),
        (["kernels", "--rows=0", "--synthetic=ouro-tiny"], "--rows = 0: must be an integer >= 1"),
        (["kernels", "--context=99999999", "--no-roofline"], "--context or --prompt = 99999999: "),
        (["kernels", "--kernels=mosaic"], "ExecutionConfig.kernels = 'mosaic': needs a CUDA GPU"),
        (["compare", "/no/a.json", "/no/b.json"], "/no/a.json: cannot be read"),
        (["replay"], "FILE = None: must be given, or --record FILE instead"),
        (["replay", "/no/r.json"], "/no/r.json: cannot be read"),
        (["compare", "a.json"], "required: B.json"),
        (["plot", "a.json"], "required: --output"),
        (["plot", "/no/a.json", "--output=x.svg"], "/no/a.json: cannot be read"),
        (["plot", "a.json", "--output=x.gif"], "--output = 'x.gif': must end in .png or .svg"),
    ],
    ids=lambda case: str(case)[:60],
)
def test_a_bad_command_is_one_line_and_status_2(cli, arguments, message):
    assert_one_error_line(cli("bench", *arguments), message)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["decode", "--batch=0"], "--batch = 0: must be an integer >= 1"),
        (["decode", "--batch=5", "--context=8"], "--batch = 5: must be <= 4"),
        (["decode", "--batch=1", "--depth=5"], "--depth = 5: must be an integer >= 1 and <= 4"),
        (["decode", "--batch=1", "--mixed-depths=0"], "--mixed-depths = 0: must be"),
        (
            ["throughput", "--prompt=8", "--mixed-depths=2", "--exit-threshold=0.5"],
            "--mixed-depths = [2]: cannot be used together with --exit-threshold",
        ),
        (["throughput", "--prompt=8", "--mixed-depths=2", "--max-loops=3"], "with --max-loops"),
        (
            ["decode", "--batch=1", "--context=8", "--tokens=5"],
            "--tokens = 5: must be an integer >= 6",
        ),
        (["decode", "--batch=1", "--context=63"], "--context = 63: with --tokens 16 must be <= 48"),
        (["decode", "--batch=4", "--context=8", "--block-size=1"], "--batch = 4: needs 96 KV"),
        (["prefill", "--prompt=65"], "--prompt = 65: must be an integer >= 1 and <= 64"),
        (["prefill", "--repeats=0"], "--repeats = 0: must be an integer >= 1"),
        (["throughput", "--prompt=60"], "--prompt = 60: with --output-tokens 16 must be <= 49"),
        (["throughput", "--requests=0"], "--requests = 0: must be an integer >= 1"),
        (["throughput", "--prompt=8", "--max-loops=9"], "max_loops = 9"),
    ],
    ids=lambda case: str(case)[:60],
)
def test_what_the_model_cannot_do_is_one_line_and_status_2(bench, arguments, message):
    assert_one_error_line(bench(*arguments), message)
