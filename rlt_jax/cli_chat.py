"""rlt-jax chat: a conversation with a model, through its checkpoint's chat template."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from rlt_jax.cli_options import (
    Parser,
    add_engine_flags,
    add_sampling_flags,
    config_from_flags,
    was_given,
)
from rlt_jax.cli_run import Stopwatch, loaded_llm, write_live
from rlt_jax.llm import LLM, GenerationError
from rlt_jax.outputs import RequestOutput
from rlt_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

MAX_TOKENS = 512  # of an answer, where the context has room and nothing else was asked for

_EXAMPLES = """\
examples:
  rlt-jax chat --model checkpoints/ouro-1.4b
  rlt-jax chat --model checkpoints/ouro-1.4b --system "Answer in one sentence." --temperature 0.7
  echo "What is 17+25?" | rlt-jax chat --model checkpoints/ouro-1.4b

in the conversation: /reset, /help, /exit; Ctrl-C stops an answer, Ctrl-D ends
"""

_HELP = """\
/reset   forget the conversation
/help    this list
/exit    end (as Ctrl-D does)
Ctrl-C   stop the answer"""


def add_chat_flags(add: Callable[..., Parser]) -> None:
    """Adds the command; `add` is the one of cli.build_parser."""
    parser = add("chat", run_chat, "talk with a model", _EXAMPLES, "rlt-jax chat [options]")
    chat = parser.add_argument_group("conversation")
    chat.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    chat.add_argument(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        help="a variable of the chat template",
    )
    chat.add_argument("--verbose", action="store_true", help="tell on stderr where the time went")
    add_sampling_flags(parser, {"max_tokens": f"{MAX_TOKENS}, less where the context ends"})
    add_engine_flags(parser)


def run_chat(options: argparse.Namespace) -> int:
    """Talks with a model that has a chat template.

    Reads a message per line and writes the answers as they come; on a terminal every token has
    the colour of the depth at which it left the loop.
    """
    from rich.console import Console

    from rlt_jax.terminal import AnswerConsole

    console, notes = AnswerConsole(), Console(stderr=True)
    config_from_flags(SamplingParams, options)  # a bad flag must not wait for the model
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    out = sys.stdout
    with loaded_llm(options, notes) as llm:
        chat = Chat(llm, options, console, notes, interactive)
        with contextlib.redirect_stdout(out) if interactive else contextlib.nullcontext():
            return chat.run(_typed_lines() if interactive else _read_lines())


def _read_lines() -> Iterator[str]:
    for line in sys.stdin:
        yield line.rstrip("\r\n")


def _typed_lines() -> Iterator[str]:
    """What a person types, until Ctrl-D. Ctrl-C drops the line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives input() editing and history)
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


class Chat:
    """The conversation so far, and how to go on with it. messages: what the template is given."""

    def __init__(
        self,
        llm: LLM,
        options: argparse.Namespace,
        console: "Console",
        notes: "Console",
        interactive: bool,
    ):
        from rlt_jax.terminal import AnswerWriter

        if llm.tokenizer is None or llm.tokenizer.chat_template is None:
            raise ValueError(
                f"{options.model}: has no chat template (chat_template.jinja, or chat_template in"
                " tokenizer_config.json); `rlt-jax generate` needs none"
            )
        self.messages: list[dict[str, str]] = []
        self._llm = llm
        self._options = options
        self._notes = notes
        self._interactive = interactive
        depth = llm.engine.model_config.total_ut_steps
        self._writer = AnswerWriter(console, depth, llm.tokenizer)
        self._reset()

    def run(self, lines: Iterable[str]) -> int:
        """Answers line after line; the exit status."""
        if self._interactive:
            self._note(f"{self._options.model}. /help lists the commands, Ctrl-D ends.")
            self._writer.legend()
        failed = False
        for line in lines:
            if not line.strip():
                continue
            if line.startswith("/"):
                if line.strip() == "/exit":
                    break
                self._command(line.strip())
            else:
                failed |= not self._answer(line)
        return 2 if failed and not self._interactive else 0

    def _command(self, line: str) -> None:
        if line == "/reset":
            self._reset()
            self._note("forgotten: a new conversation begins")
        elif line == "/help":
            self._note(_HELP)
        else:
            self._note(f"{line.split()[0]}: no such command; /help lists them")

    def _reset(self) -> None:
        system = self._options.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def _answer(self, text: str) -> bool:
        """Answers one message; False if it failed, and then the conversation is as before."""
        messages = [*self.messages, {"role": "user", "content": text}]
        latest: dict[str, RequestOutput] = {}
        stopwatch = Stopwatch(self._llm)
        try:
            prompt = self._llm.encode_chat(messages, enable_thinking=self._options.enable_thinking)
            stream = self._llm.stream([prompt], self._sampling_params(prompt))
            write_live(stream, latest, self._notes, self._writer, self._writer.begin)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            self._note("stopped")
        except (ValueError, GenerationError) as error:
            line = " ".join(str(error).split())
            self._notes.print(
                f"rlt-jax: error: {line}", markup=False, highlight=False, soft_wrap=True
            )
            if self.messages:
                self._note("the conversation is as before; /reset begins a new one")
            return False
        for output in latest.values():
            self.messages = [*messages, {"role": "assistant", "content": output.text}]
        if self._options.verbose:
            self._sum_up(list(latest.values()), *stopwatch.read())
        return True

    def _sampling_params(self, prompt: list[int]) -> SamplingParams:
        """The flags'; an answer of open length gets what the context has left."""
        if was_given(SamplingParams, "max_tokens", self._options):
            return config_from_flags(SamplingParams, self._options)
        engine = self._llm.engine
        plan = engine.memory_plan
        context = min(engine.model_config.max_position_embeddings, plan.num_pages * plan.block_size)
        if len(prompt) > context:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens: must be <= {context}, the context"
            )
        room = min(MAX_TOKENS, context - len(prompt) + 1)
        return config_from_flags(SamplingParams, self._options, max_tokens=room)

    def _sum_up(self, outputs: list[RequestOutput], seconds: float, compiling: float) -> None:
        from rlt_jax.terminal import print_summary

        if outputs:
            depth = self._writer.full_depth
            print_summary(self._notes, outputs, depth, seconds, compiling)
            if self._interactive:
                self._note("")

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
