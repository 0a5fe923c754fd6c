"""rlt-jax bench on the command line: tables, help, errors."""

import json

import pytest

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
    for command in ("roofline", "decode", "prefill", "kernels", "throughput", "compare", "plot"):
        assert f"    {command}" in out


@pytest.mark.parametrize(
    "command, flags",
    [
        ("decode", ["--batch", "--max-num-batched-tokens", "--block-size", "--min-row-bucket"]),
        ("prefill", ["--prompt", "--kernels", "--gpu-memory-utilization"]),
        ("throughput", ["--closed-loop", "--exit-threshold", "--temperature", "--exit-mode"]),
        ("kernels", ["--rows", "--kernels", "--layout"]),
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
