"""rlt-jax generate --trace-output, trace view and profile."""

import json

import pytest

from rlt_jax.run_trace import read_trace
from tests.cli.support import (
    ADAPTIVE,
    SMALL,
    assert_one_error_line,
    parse_lines,
    prompt_flags,
)


def test_generate_records_what_it_ran_and_view_draws_it(generate, cli, tmp_path):
    path, picture = tmp_path / "run.jsonl", tmp_path / "run.svg"
    status, out, _ = generate(*prompt_flags(), "--json", "--trace-output", path)
    assert status == 0
    rows = [row for batch in read_trace(path).batches for row in batch.rows]
    for one in parse_lines(out):
        of = [row for row in rows if row.request == one["request_id"]]
        assert [row.exit_depth for row in of if row.exit_depth] == one["exit_depths"]
    assert cli("trace", "view", path, "--output", picture) == (0, f"wrote {picture}\n", "")
    assert picture.stat().st_size > 0


def test_an_interrupted_generate_leaves_complete_lines(generate, tmp_path, monkeypatch):
    from rlt_jax.runtime.runner import Runner

    submit = Runner.submit

    def interrupted(runner, batch):
        if batch.sequence == 6:
            raise KeyboardInterrupt
        return submit(runner, batch)

    monkeypatch.setattr(Runner, "submit", interrupted)
    path = tmp_path / "run.jsonl"
    assert generate(*prompt_flags(), "--trace-output", path)[0] == 130
    assert [json.loads(line) for line in path.read_text().splitlines()][-1]["error"]
    assert read_trace(path).batches[5].error == "KeyboardInterrupt"


@pytest.fixture
def profile(cli, checkpoint):
    def run(*arguments):
        return cli("profile", checkpoint, *SMALL, *ADAPTIVE, *arguments)

    return run


def test_profile_writes_the_steps_asked_for(profile, tmp_path):
    folder = tmp_path / "profile"
    status, out, _ = profile(*prompt_flags(), "--output", folder, "--skip=2", "--steps=3")
    assert (status, out) == (0, f"wrote {folder}: steps 3 to 5\n")
    assert len(list(folder.rglob("*.xplane.pb"))) == 1


def test_profile_ends_with_the_prompts(profile, tmp_path):
    flags = ["--prompt=a", "--output", tmp_path, "--steps=1000", "--max-tokens=2"]
    status, out, _ = profile(*flags)
    assert status == 0
    assert out.startswith(f"wrote {tmp_path}: steps 1 to ")
    last = int(out.split()[-1])
    assert last < 20
    folder = tmp_path / "none"
    result = profile("--prompt=a", "--output", folder, f"--skip={last}", "--max-tokens=2")
    assert_one_error_line(result, f"--skip = {last}: must be less than {last}, the steps of")
    assert not folder.exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["generate", "--prompt=a", "--trace-output=/no/run.jsonl"], "--trace-output = '/no/run"),
        (["generate", "--prompt=a", "--trace-output="], "--trace-output = '': must be a file"),
        (["profile", "m", "--prompt=a"], "required: --output"),
        (["profile", "m", "--prompt=a", "--output=/no/folder"], "--output = '/no/folder': must be"),
        (["profile", "m", "--prompt=a", "--output=x", "--steps=0"], "--steps = 0: must be an int"),
        (["profile", "m", "--prompt=a", "--output=x", "--skip=-1"], "--skip = -1: must be an int"),
        (["profile", "m", "--output=x"], "--prompt: give at least one prompt"),
        (["profile", "/no/model", "--prompt=a", "--output=x"], "/no/model"),
        (["trace", "view", "run.jsonl"], "required: --output"),
        (["trace", "view", "/no/run.jsonl", "--output=x.svg"], "/no/run.jsonl: cannot be read"),
        (["trace", "view", "run.jsonl", "--output=x.gif"], "--output = 'x.gif': must end in"),
        (["trace", "view", "run.jsonl", "--output=x.svg", "--first=x"], "invalid int value: 'x'"),
        (["trace", "nope"], "invalid choice: 'nope'"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_a_bad_command_is_one_line_and_status_2(cli, flags, message):
    assert_one_error_line(cli(*flags), message)


@pytest.mark.parametrize("command", [["trace"], ["trace", "view"], ["profile"]])
def test_help_shows_examples(cli, command):
    flags = command if command == ["trace"] else [*command, "--help"]
    status, out, _ = cli(*flags)
    assert status == 0
    assert f"rlt-jax {' '.join(command)}" in out
    assert "examples:" in out
