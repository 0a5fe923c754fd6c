"""The command line: help, errors, exit statuses, and the commands about checkpoints."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rlt_jax
from rlt_jax.llm_engine import LLMEngine
from rlt_jax.runtime.runner import Runner
from tests.cli.support import ADAPTIVE, SMALL, assert_one_error_line, parse_lines, prompt_flags

# Errors: one line, exit status 2.

BAD_COMMANDS = [
    (["nope"], "invalid choice: 'nope'"),
    (["generate", "--model=m", "--nope"], "unrecognized arguments: --nope"),
    (["generate", "--model=m", "--max-tok=3"], "unrecognized arguments: --max-tok=3"),
    (["generate", "--model=m", "--speculative-config=x"], "unrecognized arguments"),
    (["generate", "--model=m", "--block-size=x"], "argument --block-size: invalid int value: 'x'"),
    (["generate", "--model=m", "--top-p=x"], "argument --top-p: invalid float value: 'x'"),
    (["generate", "--model=m", "--layout=x"], "argument --layout: invalid choice: 'x'"),
    (["generate", "--model=m", "--dtype=x"], "argument --dtype: invalid choice: 'x'"),
    (["generate", "--model=m", "--stop-token-ids=1,x"], "'1,x': must be integers with commas"),
    (["generate", "--model=m", "--depths-by-request={"], "--depths-by-request: the value is not"),
    (["generate", "--model=m", "--depths-by-request=/no"], "/no: cannot be read: No such file"),
    (["generate", "--model=m", "--prompt-file=/no"], "/no: cannot be read: No such file"),
    (["generate", "--model=m"], "--prompt: give at least one prompt"),
    (["generate", "--model=m", "--prompt=a", "--enable-thinking"], "needs --chat"),
    (["generate", "--model=m", "--prompt-token-ids=1", "--chat"], "cannot be used with --chat"),
    (
        ["generate", "--model=m", "--prompt=a", "--block-size=0"],
        "CacheConfig.block_size = 0: must be an integer >= 1",
    ),
    (
        ["generate", "--model=m", "--prompt=a", "--temperature=nan"],
        "SamplingParams.temperature = nan: must be a finite number >= 0",
    ),
    (["generate", "--model=m", "--prompt=a", "--exit-mode=trace"], "ExitConfig.depths_by_request"),
    (["generate", "--model=/no/model", "--prompt=a"], "/no/model"),
    (["inspect", "/no/model"], "/no/model"),
    (["convert", "/no/model", "/no/out"], "/no/model"),
    (["convert", "a", "b", "--dtype=int8"], "argument --dtype: invalid choice: 'int8'"),
    (["export", "/no/model", "/no/out"], "/no/model"),
    (["export", "/no/model"], "required: DST"),
]


@pytest.mark.parametrize("arguments, message", BAD_COMMANDS, ids=lambda case: str(case)[:60])
def test_a_bad_command_is_one_line_and_status_2(cli, arguments, message):
    assert_one_error_line(cli(*arguments), message)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--prompt="], "prompt = []: must have at least one token"),
        (["--prompt-token-ids=320"], "prompt[0] = 320: must be an integer >= 0 and <= 319"),
        (
            ["--prompt=a", "--prompt=" + "x" * 60],
            "prompts[1]: SamplingParams.max_tokens = 12: prompt (60 tokens)",
        ),
        (["--prompt=a", "--max-loops=5"], "max_loops = 5"),
        (["--prompt=a", "--device=abacus"], "device = 'abacus'"),
        (["--prompt=a", "--total-ut-steps=9"], "total_ut_steps = 9"),
        (["--prompt=a", "--tokenizer=/no"], "/no"),
    ],
)
def test_what_the_model_refuses_is_one_line_and_status_2(generate, flags, message):
    assert_one_error_line(generate(*flags, "--json"), message)


@pytest.mark.parametrize(
    "error, message",
    [
        (ZeroDivisionError("oh\n  no"), "ZeroDivisionError: oh no (--debug shows the traceback)"),
        (KeyError("key"), "KeyError: 'key' (--debug shows the traceback)"),
        (ValueError("field = 1:\n bad"), "error: field = 1: bad\n"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_an_unexpected_error_is_one_line_too(generate, monkeypatch, error, message):
    def fail(self, *args, **kwargs):
        raise error

    monkeypatch.setattr(LLMEngine, "__init__", fail)
    assert_one_error_line(generate("--prompt=a"), message)


def test_debug_shows_where_an_error_came_from(checkpoint):
    command = [sys.executable, "-m", "rlt_jax", "inspect", checkpoint + "-no"]
    plain, debug = (
        subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60)
        for flags in ([], ["--debug"])
    )
    assert (plain.returncode, debug.returncode) == (2, 1)
    assert "Traceback" not in plain.stderr
    assert debug.stderr.startswith("Traceback")
    assert plain.stderr.removeprefix("rlt-jax: error: ") in debug.stderr


def test_an_interrupt_is_one_line_and_status_130(generate, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "submit", interrupt)
    assert generate("--prompt=a") == (130, "", "rlt-jax: interrupted\n")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_reader_that_stops_reading_is_no_error_message(checkpoint, flags):
    command = [sys.executable, "-m", "rlt_jax", "inspect", checkpoint, *flags]
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (result.returncode, result.stderr) == (1, b"")


# The other commands


def test_inspect_shows_config_size_and_kv_bytes(cli, checkpoint):
    status, out, err = cli("inspect", checkpoint)
    assert (status, err) == (0, "")
    for text in ("total_ut_steps", "huggingface", "38,209", "152,836", "2,048", "512"):
        assert text in out


def test_inspect_json_is_one_object(cli, checkpoint):
    _, out, _ = cli("inspect", checkpoint, "--json")
    (facts,) = parse_lines(out)
    assert facts["path"] == checkpoint
    assert facts["config"]["total_ut_steps"] == 4
    assert facts["stored_bytes"] == 4 * facts["parameter_count"]
    kv = facts["kv_bytes_per_token"]
    assert kv["shared"] == 2 * 2 * 32 * 4  # k and v, layers, heads x head_dim, float32
    assert kv["last_exited"] == 4 * kv["shared"]


def test_convert_and_export_come_back_to_the_same_answers(cli, checkpoint, tmp_path, expected):
    orbax, back = tmp_path / "orbax", tmp_path / "back"
    assert cli("convert", checkpoint, orbax, "--verify") == (0, f"wrote {orbax}\n", "")
    assert cli("export", orbax, back) == (0, f"wrote {back}\n", "")
    for folder in (orbax, back):
        flags = ["--model", folder, *SMALL, *ADAPTIVE, *prompt_flags(), "--json"]
        _, out, _ = cli("generate", *flags)
        tokens = [one["token_ids"] for one in parse_lines(out)]
        assert tokens == [list(output.token_ids) for output in expected]


@pytest.mark.parametrize("command", ["convert", "export"])
def test_an_existing_folder_is_replaced_only_with_force(cli, checkpoint, tmp_path, command):
    source = checkpoint
    if command == "export":
        source = tmp_path / "orbax"
        cli("convert", checkpoint, source)
    target = tmp_path / "target"
    assert cli(command, source, target)[0] == 0
    assert_one_error_line(cli(command, source, target), str(target))
    assert cli(command, source, target, "--force") == (0, f"wrote {target}\n", "")


def test_convert_casts_to_the_dtype_asked_for(cli, checkpoint, tmp_path):
    cli("convert", checkpoint, tmp_path / "half", "--dtype=bfloat16")
    _, out, _ = cli("inspect", tmp_path / "half", "--json")
    assert set(parse_lines(out)[0]["dtypes"]) == {"bfloat16"}


# The packaged model


@pytest.fixture
def packaged(monkeypatch):
    """Puts a folder in the place of the packaged model."""
    return lambda folder: monkeypatch.setattr(
        "rlt_jax.checkpoints_convert.checkpoint.packaged_folder", lambda: Path(folder)
    )


def test_generate_takes_the_packaged_model_by_default(cli, packaged, checkpoint, expected):
    packaged(checkpoint)
    status, out, _ = cli("generate", *SMALL, *ADAPTIVE, *prompt_flags(), "--json")
    assert status == 0
    assert [one["token_ids"] for one in parse_lines(out)] == [list(o.token_ids) for o in expected]
    assert cli("inspect", "ouro-tiny") == cli("inspect", checkpoint)


def test_a_missing_packaged_model_is_one_line(cli, packaged, tmp_path):
    packaged(tmp_path)
    assert_one_error_line(cli("generate", "--prompt=a"), "has no packaged model")


# Help


def test_without_a_command_it_prints_its_help(cli):
    status, out, err = cli()
    assert (status, err) == (0, "")
    assert cli("--help") == (0, out, "")
    for command in ("generate", "chat", "inspect", "convert", "export"):
        assert f"    {command} " in out
    assert "examples:\n  rlt-jax generate" in out


@pytest.mark.parametrize("command", ["generate", "chat", "inspect", "convert", "export"])
def test_every_command_has_a_short_help_that_ends_with_examples(cli, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    status, out, _ = cli(command, "--help")
    assert status == 0
    lines = out.splitlines()
    assert len(lines) <= 64
    assert max(map(len, lines)) <= 100
    examples = lines[lines.index("examples:") + 1 :]
    assert f"rlt-jax {command} " in examples[0]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_all_shows_what_help_leaves_out(cli, command):
    _, short, _ = cli(command, "--help")
    status, out, _ = cli(command, "--help-all")
    assert status == 0
    for flag in ("--block-size", "--max-num-seqs", "--exit-mode", "--min-row-bucket"):
        assert f"\n  {flag} " in out
        assert flag not in short
    assert set(short.split()) < set(out.split())


def test_version_is_the_packages(cli):
    assert cli("--version") == (0, rlt_jax.__version__ + "\n", "")


def test_python_m_is_the_same_command_and_help_is_quick():
    code = (
        "import runpy, sys; sys.argv = ['rlt-jax', '--help']\n"
        "try: runpy.run_module('rlt_jax', run_name='__main__')\n"
        "except SystemExit as stop: print(stop.code, 'jax' in sys.modules)\n"
    )
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        seconds.append(time.perf_counter() - start)
    assert result.stdout.startswith("usage: rlt-jax")
    for command in ("generate", "inspect", "convert", "export"):
        assert command in result.stdout
    assert result.stdout.endswith("0 False\n")
    assert min(seconds) < 0.5


@pytest.mark.parametrize(
    ("redirection", "status", "message"),
    [
        ("--prompt-file - <&-", 2, "--prompt: give at least one prompt"),
        ("--prompt=a --max-tokens=2 >&-", 0, ""),
        ("--prompt=a --max-tokens=9 --temperature=9 --seed=1", 0, ""),
    ],
)
def test_closed_streams_and_narrow_encodings_give_no_traceback(
    long_checkpoint, redirection, status, message
):
    flags = " ".join(long_checkpoint)
    command = f"'{sys.executable}' -m rlt_jax generate {flags} {redirection}"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert message in done.stderr


def test_a_byte_order_mark_is_no_part_of_a_prompt(generate, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n", encoding="utf-8-sig")
    _, out, _ = generate(f"--prompt-file={file}", "--json")
    assert parse_lines(out)[0]["prompt"] == "one"


def test_inline_json_of_the_wrong_kind_is_not_taken_for_a_file(generate):
    result = generate("--prompt=a", "--exit-mode=trace", "--depths-by-request=[1]")
    assert_one_error_line(result, "must hold a JSON object")
