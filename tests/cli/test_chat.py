"""rlt-jax chat: the conversation, its commands, its errors, and a real terminal."""

import io
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from rlt_jax import LLM, SamplingParams
from rlt_jax.cli import build_parser
from rlt_jax.cli_chat import Chat
from rlt_jax.runtime.runner import Runner
from tests.cli.support import SMALL, assert_one_error_line, neutral
from tests.tiny import OPTIONS

PARAMS = SamplingParams(max_tokens=3, exit_threshold=0.5, ignore_eos=True)
FLAGS = [*SMALL, "--max-tokens=3", "--exit-threshold=0.5", "--ignore-eos"]


@pytest.fixture
def chat(cli, checkpoint, monkeypatch):
    """Runs the command with these lines on standard input."""

    def run(lines, *flags):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        return cli("chat", "--model", checkpoint, *FLAGS, *flags)

    return run


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def conversation(llm):
    """What Python answers to the messages of one conversation, as (texts, messages)."""

    def ask(*lines, system=None):
        messages = [] if system is None else [{"role": "system", "content": system}]
        texts = []
        for line in lines:
            messages.append({"role": "user", "content": line})
            (output,) = llm.chat(messages, PARAMS)
            messages.append({"role": "assistant", "content": output.text})
            texts.append(output.text)
        return texts, messages

    return ask


def printed(texts):
    return "".join(neutral(text) + "\n" for text in texts)


def test_every_line_is_answered_with_what_came_before(chat, conversation):
    texts, _ = conversation("a", "b")
    assert texts[1] != conversation("b")[0][0]  # the history matters
    assert chat(["a", "", "b"]) == (0, printed(texts), "")


def test_a_system_message_comes_first(chat, conversation):
    texts, _ = conversation("a", system="Be.")
    assert texts != conversation("a")[0]
    assert chat(["a"], "--system", "Be.") == (0, printed(texts), "")


def test_reset_forgets_all_but_the_system_message(chat, conversation):
    texts = conversation("a", system="S")[0] + conversation("b", system="S")[0]
    status, out, err = chat(["a", "/reset", "b"], "--system=S")
    assert (status, out) == (0, printed(texts))
    assert "forgotten" in err


def test_exit_ends_and_other_commands_are_explained(chat):
    status, out, err = chat(["/help", "/nope x", "/exit", "not answered"])
    assert (status, out) == (0, "")
    for command in ("/reset", "/help", "/exit", "/nope: no such command"):
        assert command in err


def test_a_message_too_long_is_one_line_and_the_conversation_goes_on(chat, conversation):
    texts, _ = conversation("a", "b")
    status, out, err = chat(["a", "x" * 60, "b"])
    assert (status, out) == (2, printed(texts))
    error, hint = err.splitlines()
    assert error.startswith("rlt-jax: error: SamplingParams.max_tokens = 3: prompt (")
    assert error.endswith("must be <= 64, the model's context")
    assert "as before" in hint


def test_an_answer_of_open_length_fills_the_context(cli, checkpoint, monkeypatch, llm):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n" + "x" * 60 + "\n"))
    flags = ["--model", checkpoint, *SMALL, "--ignore-eos", "--verbose"]
    status, _, err = cli("chat", *flags)
    room = 64 - len(llm.encode_chat([{"role": "user", "content": "a"}])) + 1
    assert f"\n{room} tokens in " in err
    assert re.search(r"error: the conversation has \d+ tokens: must be <= 64, the context", err)
    assert status == 2


def test_thinking_reaches_the_template(checkpoint, tmp_path, cli, monkeypatch):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    template = "{{ raise_exception('thinks' if enable_thinking else 'acts') }}"
    (copy / "chat_template.jinja").write_text(template)
    for flag, word in (("--enable-thinking", "thinks"), ("--no-enable-thinking", "acts")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
        result = cli("chat", "--model", copy, *SMALL, flag)
        assert_one_error_line(result, f"chat template: {word}")


def test_a_checkpoint_without_chat_template_is_one_line(checkpoint, tmp_path, cli):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "tokenizer_config.json").write_text("{}")
    result = cli("chat", "--model", copy, *SMALL)
    assert_one_error_line(result, f"{copy}: has no chat template")
    (copy / "tokenizer.json").unlink()
    assert_one_error_line(cli("chat", "--model", copy, *SMALL), "has no chat template")


def test_a_bad_flag_does_not_wait_for_the_model(cli):
    result = cli("chat", "--model=/no/model", "--temperature=-1")
    assert_one_error_line(result, "SamplingParams.temperature = -1.0")


# Ctrl-C


@pytest.fixture
def interrupt(monkeypatch):
    """Presses Ctrl-C at the given batch, counted from now."""

    def at(batch):
        submit, calls = Runner.submit, []

        def submit_or_interrupt(runner, work):
            calls.append(work)
            if len(calls) == batch:
                raise KeyboardInterrupt
            return submit(runner, work)

        monkeypatch.setattr(Runner, "submit", submit_or_interrupt)

    return at


def interactive_chat(llm, checkpoint):
    options = build_parser().parse_args(["chat", "--model", checkpoint, *FLAGS])
    consoles = [Console(file=io.StringIO(), width=200) for _ in range(2)]
    return Chat(llm, options, *consoles, interactive=True), consoles


@pytest.mark.parametrize("batch", [1, 5])
def test_an_interrupt_stops_the_answer_only(llm, checkpoint, conversation, interrupt, batch):
    chat, (console, notes) = interactive_chat(llm, checkpoint)
    _, before = conversation("a")
    (whole,), _ = conversation("b")

    def lines():
        yield "a"
        assert chat.messages == before
        interrupt(batch)
        yield "b"
        if batch == 1:  # nothing had come
            assert chat.messages == before
        else:
            assert chat.messages[:-1] == [*before, {"role": "user", "content": "b"}]
        assert not llm.engine.has_unfinished_requests()
        yield "/reset"
        yield "b"

    assert chat.run(lines()) == 0
    assert "stopped" in notes.file.getvalue()
    assert chat.messages[-1] == {"role": "assistant", "content": whole}
    assert console.file.getvalue().endswith(neutral(whole) + "\n")


def test_an_interrupt_ends_a_chat_that_reads_from_a_pipe(chat, interrupt):
    interrupt(1)
    assert chat(["a", "b"]) == (130, "", "rlt-jax: interrupted\n")


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, *arguments):
        self.master, slave = pty.openpty()
        environ = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        environ.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlt_jax", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environ,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def type(self, text):
        os.write(self.master, text.encode())

    def wait_for(self, text, seconds=60):
        """Reads on until the text has come; returns what came before it."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self.master], [], [], left)[0], self.seen
            try:
                self.seen += os.read(self.master, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                assert text in self.seen, self.seen
        before, _, self.seen = self.seen.partition(text)
        return before

    def interrupt_until(self, text):
        """Ctrl-C until the text comes. One may be lost: Python's input() sees a signal only while
        it waits for a key, not in the moments between."""
        for _ in range(60):
            self.process.send_signal(signal.SIGINT)
            if select.select([self.master], [], [], 1)[0]:
                return self.wait_for(text)
        raise AssertionError(self.seen)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_on_a_terminal_it_prompts_colours_and_survives_ctrl_c(long_checkpoint):
    terminal = Terminal("chat", *long_checkpoint, "--ignore-eos", "--max-tokens=9")
    try:
        assert "/help lists the commands" in terminal.wait_for("> ")
        terminal.interrupt_until("> ")  # at the prompt: drops the line
        terminal.type("hello\n")
        terminal.wait_for("hello")
        assert "\x1b[38;2;" in terminal.wait_for("> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(timeout=30) == 0
    finally:
        terminal.close()
