"""rlt-jax generate: where prompts come from, what is printed, what an interruption leaves."""

import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types

import pytest

from rlt_jax import LLM
from rlt_jax.engine.types import BatchError, Stage
from rlt_jax.llm_engine import LLMEngine
from rlt_jax.runtime.runner import Runner
from rlt_jax.terminal import TokenTexts
from rlt_jax.tokenizer import Tokenizer
from tests.cli.support import (
    ADAPTIVE,
    PROMPTS,
    SMALL,
    assert_one_error_line,
    neutral,
    parse_lines,
    prompt_flags,
)

# JSON


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
    stream = LLM.stream

    def infinite(*args, **kwargs):
        for step in stream(*args, **kwargs):
            output = dataclasses.replace(step.output, logprobs=(float("-inf"), -1.0))
            yield dataclasses.replace(step, output=output)

    monkeypatch.setattr(LLM, "stream", infinite)
    _, out, _ = generate("--prompt=a", "--json", "--logprobs=0")
    assert "Infinity" not in out
    assert parse_lines(out)[0]["logprobs"] == [None, -1.0]


# Text


def test_several_prompts_are_answered_in_order(generate, expected):
    status, out, err = generate(*prompt_flags())
    assert status == 0
    answers = [prompt + neutral(output.text) for prompt, output in zip(PROMPTS, expected)]
    assert out == "".join(f"{answer}\n\n" for answer in answers)
    assert re.fullmatch(rf"2 prompts, 24 tokens in .* tokens/s.*; {depths_of(expected)}\n", err)


def test_prompts_that_run_beside_decode_rows_are_answered_the_same(generate, monkeypatch, expected):
    """The second prompt is the longer one: it is in its loops when the first one decodes."""
    submit, chunks = Runner.submit, []

    def watched(runner, batch):
        if batch.stage is Stage.MIXED:
            chunks.append((batch.rows.num_decode, len(batch.rows) - batch.rows.num_decode))
        return submit(runner, batch)

    monkeypatch.setattr(Runner, "submit", watched)
    staged = ("--mode=mixed", "--wavefront-chunked-prefill", "--prefill-chunk-size=2")
    status, out, _ = generate(*prompt_flags(), "--json", *staged)
    assert status == 0
    for one, output in zip(parse_lines(out), expected, strict=True):
        assert one["token_ids"] == list(output.token_ids)
        assert one["exit_depths"] == list(output.exit_depths)
    assert (1, 4) in chunks


def depths_of(outputs):
    depths = [depth for output in outputs for depth in output.exit_depths[1:]]
    saved = 100 * (1 - sum(depths) / len(depths) / 4)
    return (
        f"mean depth {sum(depths) / len(depths):.2f} of 4 over {len(depths)} decoded tokens,"
        f" {saved:.0f} % of loops saved"
    )


def test_one_prompt_is_answered_as_it_comes(generate, monkeypatch, expected):
    submit, terminal, seen = Runner.submit, sys.stdout, []

    def watched(runner, batch):
        seen.append(terminal.getvalue())
        return submit(runner, batch)

    monkeypatch.setattr(Runner, "submit", watched)
    status, out, err = generate("--prompt", PROMPTS[0])
    assert status == 0
    assert out == PROMPTS[0] + neutral(expected[0].text) + "\n"
    assert len(set(seen)) >= 5
    assert all(out.startswith(one) for one in seen)
    assert re.fullmatch(rf"12 tokens in .* tokens/s.*; {depths_of(expected[:1])}\n", err)


@pytest.fixture
def terminal(monkeypatch):
    """Both streams show colours."""
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        "COLUMNS": "200",
    }.items():
        monkeypatch.setenv(name, value)


def escape_codes(text):
    return set(re.findall(r"\x1b\[[0-9;]*m", text))


@pytest.mark.parametrize("count", [1, 2])
def test_a_terminal_shows_the_legend_then_tokens_in_the_colours_of_their_depths(
    generate, tokenizer, terminal, count
):
    flags = [*prompt_flags(PROMPTS[:count]), "--exit-threshold=0.65", "--max-tokens=24"]
    _, out, _ = generate(*flags)
    legend, text = out.split("\n\n", 1)
    samples = re.findall(r"\x1b\[(38;2;[0-9;]+)m  \S (\d)", legend)
    assert [depth for _, depth in samples] == ["1", "2", "3", "4"]
    colour_of = {int(depth): f"\x1b[{colour}m" for colour, depth in samples}
    wanted = "".join(
        f"\x1b[2m{prompt}\x1b[0m"
        + "".join(colour_of[d] + neutral(t) + "\x1b[0m" for t, d in TokenTexts(tokenizer).pieces(o))
        + "\n\n"
        for prompt, o in zip(PROMPTS, json_outputs(generate(*flags, "--json")[1]))
    )
    assert text == wanted
    assert len(escape_codes(text)) >= 4  # dim, the end of a style, and at least two depths


def json_outputs(out):
    """The outputs that --json printed, as far as their pieces of text are concerned."""
    return [types.SimpleNamespace(**one) for one in parse_lines(out)]


@pytest.mark.parametrize("count", [1, 2])
def test_no_color_is_respected(generate, terminal, monkeypatch, count):
    monkeypatch.setenv("NO_COLOR", "1")
    _, out, _ = generate(*prompt_flags(PROMPTS[:count]))
    assert "exit depth" not in out
    assert escape_codes(out) <= {"\x1b[2m", "\x1b[0m"}  # the prompt is dim


def test_a_batch_has_a_progress_bar_on_stderr(generate, terminal):
    _, out, err = generate(*prompt_flags(), "--json")
    assert "\x1b" not in out
    assert len(parse_lines(out)) == 2
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", err)
    assert re.search(r"answering .* 2/2 .*tokens/s", plain)


def test_without_a_terminal_there_is_no_progress_bar(generate):
    _, _, err = generate(*prompt_flags(), "--json")
    assert err == ""


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


@pytest.mark.parametrize("flags", [[], ["--prompt-file=-"]])
def test_prompts_come_from_standard_input(generate, monkeypatch, expected, flags):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(PROMPTS)))
    _, out, _ = generate(*flags, "--json")
    assert [one["token_ids"] for one in parse_lines(out)] == [list(o.token_ids) for o in expected]


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_standard_input_has_no_prompt(generate, monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert_one_error_line(generate("--json"), "--prompt: give at least one prompt")


def test_chat_goes_through_the_template(generate, tokenizer):
    _, out, _ = generate("--prompt=Hi", "--chat", "--no-enable-thinking", "--json")
    ids = parse_lines(out)[0]["prompt_token_ids"]
    rendered = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered


def test_with_chat_the_answer_has_lines_of_its_own(generate):
    _, out, _ = generate("--prompt=Hi", "--chat")
    assert out.startswith("Hi\n")
    _, both, _ = generate("--prompt=Hi", "--prompt=Ho", "--chat")
    assert both.startswith(out + "\nHo\n")


def test_a_model_without_tokenizer_shows_token_ids(cli, checkpoint, tmp_path, expected):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "tokenizer.json").unlink()
    ids = [" ".join(map(str, ids)) for ids in (expected[0].prompt_token_ids, expected[0].token_ids)]
    prompt = "--prompt-token-ids=" + ids[0].replace(" ", ",")
    _, out, _ = cli("generate", "--model", copy, *SMALL, *ADAPTIVE, prompt)
    assert out == f"{ids[0]} {ids[1]}\n"


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


def test_a_failed_request_is_shown_with_its_error(generate, monkeypatch):
    def failing(runner, batch):
        raise BatchError("out of luck")

    monkeypatch.setattr(Runner, "submit", failing)
    status, out, err = generate("--prompt=a")
    assert (status, out) == (2, "a [error: out of luck]\n")
    assert err.endswith("rlt-jax: error: request '0': out of luck\n")


# Ctrl-C, and a reader that stops reading


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C at the 14th batch."""
    submit, calls = Runner.submit, []

    def submit_or_interrupt(runner, batch):
        calls.append(batch)
        if len(calls) == 14:
            raise KeyboardInterrupt
        return submit(runner, batch)

    monkeypatch.setattr(Runner, "submit", submit_or_interrupt)


def test_an_interrupted_answer_stays_as_far_as_it_came(generate, interrupted, expected):
    status, out, err = generate("--prompt", PROMPTS[0])
    assert status == 130
    whole = PROMPTS[0] + neutral(expected[0].text)
    assert len(PROMPTS[0]) < len(out.rstrip("\n")) < len(whole)
    assert whole.startswith(out.removesuffix("\n").rstrip("\N{REPLACEMENT CHARACTER}"))
    summary, last = err.splitlines()
    assert " tokens/s" in summary
    assert last == "rlt-jax: interrupted"


@pytest.mark.parametrize("flags", [["--json"], []])
def test_an_interrupted_batch_prints_what_is_there(generate, interrupted, expected, flags):
    status, out, err = generate(*prompt_flags(), *flags)
    assert status == 130
    assert err.endswith("rlt-jax: interrupted\n")
    if not flags:
        assert all(prompt in out for prompt in PROMPTS)
        return
    objects = parse_lines(out)
    assert [one["finish_reason"] for one in objects] == ["abort", "abort"]
    for one, output in zip(objects, expected):
        count = len(one["token_ids"])
        assert 0 < count < 12
        assert one["token_ids"] == list(output.token_ids[:count])


def test_ctrl_c_ends_a_real_run_with_what_was_there(long_checkpoint):
    flags = [*long_checkpoint, "--max-tokens=15000", "--ignore-eos", "--prompt=Hello"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlt_jax", "generate", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    first = process.stdout.read(len("Hello") + 1)  # it streams: the answer has begun
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first.startswith(b"Hello")
    assert out.endswith(b"\n")
    assert b"Traceback" not in err
    assert err.endswith(b"rlt-jax: interrupted\n")


@pytest.mark.parametrize("count", [1, 2])
def test_a_reader_that_stops_reading_ends_the_run(generate, monkeypatch, count):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        status, _, err = generate(*prompt_flags(PROMPTS[:count]))
        monkeypatch.undo()
    assert (status, err) == (1, "")
