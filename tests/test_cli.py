"""The command line: its commands, output, errors and exit statuses."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import time

import pytest

import rlt_jax
from examples.make_random_checkpoint import make_random_checkpoint
from rlt_jax import LLM, CacheConfig, ExecutionConfig, SamplingParams, SchedulerConfig
from rlt_jax.cli import main
from rlt_jax.engine.types import BatchError
from rlt_jax.llm_engine import LLMEngine
from rlt_jax.runtime.runner import Runner
from rlt_jax.tokenizer import Tokenizer

TINY = {"hidden": 32, "layers": 2, "heads": 2, "head_dim": 16, "intermediate": 48}
# The programs of all tests are the same few.
SMALL = ["--num-blocks=256", "--max-num-seqs=4", "--min-row-bucket=4", "--min-prefill-bucket=8"]
ADAPTIVE = ["--max-tokens=12", "--exit-threshold=0.5", "--ignore-eos"]
ADAPTIVE_PARAMS = SamplingParams(max_tokens=12, exit_threshold=0.5, ignore_eos=True)
PROMPTS = ["Hello", "the quick brown fox"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    return str(make_random_checkpoint(folder, max_positions=64, dtype="float32", **TINY))


@pytest.fixture(scope="module")
def expected(checkpoint):
    """What the Python interface answers to PROMPTS."""
    with LLM(checkpoint, **_small_configs()) as llm:
        return llm.generate(PROMPTS, ADAPTIVE_PARAMS)


def _small_configs():
    return {
        "cache_config": CacheConfig(num_blocks=256),
        "scheduler_config": SchedulerConfig(max_num_seqs=4),
        "execution_config": ExecutionConfig(min_row_bucket=4, min_prefill_bucket=8),
    }


@pytest.fixture
def cli(capsys):
    """Runs a command; returns its exit status, stdout and stderr."""

    def run(*arguments):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = stop.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def generate(cli, checkpoint):
    def run(*arguments):
        return cli("generate", "--model", checkpoint, *SMALL, *ADAPTIVE, *arguments)

    return run


@pytest.fixture
def tokenizer(checkpoint):
    return Tokenizer.from_folder(checkpoint)


def prompt_flags(prompts=PROMPTS):
    return [part for prompt in prompts for part in ("--prompt", prompt)]


def assert_one_error_line(result, message):
    status, out, err = result
    assert status == 2
    assert out == ""
    assert err.startswith("rlt-jax: error: ")
    assert err.count("\n") == 1 and err.endswith("\n")
    assert message in err


# Errors: one line, exit status 2.

BAD_COMMANDS = [
    ([], "required: COMMAND"),
    (["nope"], "invalid choice: 'nope'"),
    (["generate", "--prompt=a"], "required: --model"),
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
        (["--prompt=a", "--prompt=" + "x" * 60], "prompts[1]: max_tokens = 12: prompt (60 tokens)"),
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


# generate


def parse_lines(out):
    assert out.endswith("\n")
    return [json.loads(line) for line in out[:-1].split("\n")]


def test_json_is_one_object_per_prompt_in_order_and_nothing_else(generate, expected):
    status, out, _ = generate(*prompt_flags(), "--json", "--seed=7", "--verbose")
    objects = parse_lines(out)
    assert status == 0
    assert [one["prompt"] for one in objects] == PROMPTS
    for one, output in zip(objects, expected, strict=True):
        want = json.loads(json.dumps(dataclasses.asdict(output)))
        assert one["sampling_params"]["seed"] == 7
        assert set(one) == {*want, "prompt"}
        for name in set(want) - {"metrics", "sampling_params"}:
            assert one[name] == want[name], name


def test_what_libraries_print_does_not_mix_with_json(generate, monkeypatch):
    init = LLMEngine.__init__

    def noisy(*args, **kwargs):
        print("loading!")
        init(*args, **kwargs)

    monkeypatch.setattr(LLMEngine, "__init__", noisy)
    status, out, err = generate("--prompt=a", "--json")
    assert status == 0
    assert len(parse_lines(out)) == 1
    assert "loading!" in err


def test_json_has_no_infinities(generate, monkeypatch):
    generate_ = LLM.generate

    def infinite(*args, **kwargs):
        outputs = generate_(*args, **kwargs)
        return [dataclasses.replace(o, logprobs=(float("-inf"), -1.0)) for o in outputs]

    monkeypatch.setattr(LLM, "generate", infinite)
    _, out, _ = generate("--prompt=a", "--json", "--logprobs=0")
    assert "Infinity" not in out
    assert parse_lines(out)[0]["logprobs"] == [None, -1.0]


def test_text_shows_prompts_answers_and_a_summary(generate, expected):
    status, out, err = generate(*prompt_flags())
    assert (status, err) == (0, "")
    visible = out.replace("\N{REPLACEMENT CHARACTER}", "")
    for prompt, output in zip(PROMPTS, expected):
        text = "".join(c for c in output.text if c == "\n" or c.isprintable())
        assert prompt + text.replace("\N{REPLACEMENT CHARACTER}", "") in visible
    depths = [depth for output in expected for depth in output.exit_depths]
    summary = out.splitlines()[-1]
    assert summary.startswith("2 prompts, 24 tokens in ")
    assert " tokens/s, " in summary
    assert summary.endswith(f"mean depth {sum(depths) / len(depths):.2f} of 4")


def test_text_cannot_steer_the_terminal(generate, monkeypatch):
    monkeypatch.setattr(Tokenizer, "decode", lambda *_: "red \x1b[31m bell \x07 csi \x9b1m line\n")
    _, out, _ = generate("--prompt=a")
    assert not set(out) & {"\x1b", "\x07", "\x9b"}
    assert "red \N{REPLACEMENT CHARACTER}[31m bell" in out


def test_verbose_tells_where_the_time_went_and_how_memory_was_planned(generate):
    _, out, err = generate("--prompt=a", "--verbose", "--json")
    total, *lines = err.splitlines()
    split = next(i for i, line in enumerate(lines) if line.startswith("KV pool: "))
    phases, (pool, answering, *compiled) = lines[:split], lines[split:]
    assert re.match(r"KV pool: \d+ blocks of \d+ tokens, .* at most \d+ executables", pool)
    assert f"compiling {len(compiled)} programs" in answering
    seconds = float(total.removeprefix("start-up: ").removesuffix(" s"))
    times = {line[2:26].strip(): float(line[26:].removesuffix(" s")) for line in phases}
    assert {"import", "load weights", "other"} < set(times)
    assert sum(times.values()) == pytest.approx(seconds, abs=0.01 * len(times))
    assert len(parse_lines(out)) == 1


def test_prompts_come_from_flags_ids_and_files_in_order(generate, tokenizer, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\nzwölf\r\n", encoding="utf-8")
    ids = tokenizer.encode("ids")
    _, out, _ = generate(
        "--prompt=first",
        f"--prompt-file={file}",
        "--prompt-token-ids=" + ",".join(map(str, ids)),
        "--json",
    )
    objects = parse_lines(out)
    assert [one["prompt"] for one in objects] == ["first", "one", "zwölf", None]
    assert objects[-1]["prompt_token_ids"] == ids


def test_prompts_come_from_standard_input(generate, monkeypatch, expected):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(PROMPTS)))
    _, out, _ = generate("--prompt-file=-", "--json")
    assert [one["token_ids"] for one in parse_lines(out)] == [list(o.token_ids) for o in expected]


def test_chat_goes_through_the_template(generate, tokenizer):
    _, out, _ = generate("--prompt=Hi", "--chat", "--no-enable-thinking", "--json")
    ids = parse_lines(out)[0]["prompt_token_ids"]
    rendered = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered


def test_a_failed_request_costs_no_other_its_answer(generate, monkeypatch, expected):
    submit, first = Runner.submit, []

    def failing(runner, batch):
        first.append(batch.rows[0].generation)
        if any(row.generation != first[0] for row in batch.rows):
            raise BatchError("out of luck")
        return submit(runner, batch)

    monkeypatch.setattr(Runner, "submit", failing)
    status, out, err = generate(*prompt_flags(), "--max-num-seqs=1", "--json")
    objects = parse_lines(out)
    assert status == 2
    assert err.endswith("rlt-jax: error: request '1': out of luck\n")
    assert [one["error"] for one in objects] == [None, "out of luck"]
    assert objects[0]["token_ids"] == list(expected[0].token_ids)


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
