"""rlt-jax generate: answers prompts, one as it comes, several in a batch."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlt_jax.cli_options import (
    Parser,
    add_engine_flags,
    add_sampling_flags,
    config_from_flags,
    integers,
    read_text,
)
from rlt_jax.cli_run import Stopwatch, collect, loaded_llm, print_compiling, write_live
from rlt_jax.llm import LLM, GenerationError, StreamIncrement
from rlt_jax.outputs import RequestOutput
from rlt_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from rlt_jax.terminal import AnswerWriter

Prompts = list[str | list[int]]

_EXAMPLES = """\
examples:
  rlt-jax generate --prompt "17+25=" --exit-threshold 0.5
  rlt-jax generate --prompt-file prompts.txt --json > answers.jsonl
  echo "The capital of France is" | rlt-jax generate --model checkpoints/ouro-1.4b
"""


def add_generate_flags(add: Callable[..., Parser]) -> None:
    """Adds the command; `add` is the one of cli.build_parser."""
    usage = "rlt-jax generate --prompt TEXT [options]"
    parser = add("generate", run_generate, "answer prompts", _EXAMPLES, usage)
    add_prompt_flags(parser)
    shown = parser.add_argument_group("output")
    shown.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt, a line each"
    )
    shown.add_argument("--verbose", action="store_true", help="tell on stderr where the time went")
    shown.add_argument(
        "--trace-output",
        metavar="FILE",
        help="write what every batch ran, a line of JSON each (rlt-jax trace view draws it)",
    )
    add_sampling_flags(parser)
    add_engine_flags(parser)


def add_prompt_flags(parser: Parser) -> None:
    """Where prompts come from; prompts_of() reads it."""
    prompts = parser.add_argument_group("prompts (in the order given; none: standard input)")
    prompts.add_argument(
        "--prompt", dest="prompts", action="append", metavar="TEXT", help="a prompt"
    )
    prompts.add_argument(
        "--prompt-file",
        dest="prompts",
        action="extend",
        type=_read_prompts,
        metavar="FILE",
        help="a prompt per line, empty lines left out (-: standard input)",
    )
    prompts.add_argument(
        "--prompt-token-ids",
        dest="prompts",
        action="append",
        type=integers,
        metavar="INT[,INT...]",
        help="a prompt's token ids",
    )
    prompts.add_argument(
        "--chat", action="store_true", help="send each prompt through the model's chat template"
    )
    prompts.add_argument(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        help="a variable of the chat template, with --chat",
    )


def _read_prompts(path: str) -> list[str]:
    try:
        text = sys.stdin.read() if path == "-" else read_text(path)
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"standard input: {error}") from None
    return [line for line in text.removeprefix("\ufeff").split("\n") if line.strip()]


def run_generate(
    options: argparse.Namespace,
    console: "Console | None" = None,
    notes: "Console | None" = None,
) -> None:
    """Answers prompts: one token by token as it comes, several in one batch.

    On a terminal every token has the colour of the depth at which it left the loop.
    """
    from rich.console import Console

    from rlt_jax.run_trace import check_trace_path
    from rlt_jax.terminal import AnswerConsole, AnswerWriter, print_summary

    console = console or AnswerConsole()  # sys.stdout itself is redirected below
    notes = notes or Console(stderr=True)
    prompts = prompts_of(options)
    if options.trace_output is not None:
        check_trace_path("--trace-output", options.trace_output)
    params = config_from_flags(SamplingParams, options)
    latest: dict[str, RequestOutput] = {}
    failure: BaseException | None = None
    with loaded_llm(options, notes) as llm:
        full_depth = llm.engine.model_config.total_ut_steps
        writer = AnswerWriter(console, full_depth, llm.tokenizer)
        live = len(prompts) == 1 and not options.json
        if options.trace_output is not None:
            llm.start_trace(options.trace_output)
        stopwatch = Stopwatch(llm)
        try:
            stream = _start(llm, prompts, params, options)
            if live:
                write_live(stream, latest, notes, writer, lambda: _begin(writer, prompts, options))
            else:
                collect(stream, latest, notes, stopwatch, len(prompts))
        except (GenerationError, KeyboardInterrupt) as error:  # what is there is not lost
            failure = error
        seconds, compiling = stopwatch.read()
        if options.verbose:
            print_compiling(llm, seconds, compiling)
    answers = [
        (prompt, _ended(latest[str(i)])) for i, prompt in enumerate(prompts) if str(i) in latest
    ]
    outputs = [output for _, output in answers]
    if options.json:
        for prompt, output in answers:
            print(json.dumps(_as_json(prompt, output)), file=console.file)
    elif outputs:
        if not live:
            _write_all(writer, answers, options)
        print_summary(notes, outputs, full_depth, seconds, compiling)
    if failure is not None:
        raise failure


def prompts_of(options: argparse.Namespace) -> Prompts:
    """The prompts of add_prompt_flags, or of standard input."""
    prompts = options.prompts
    if prompts is None and sys.stdin is not None and not sys.stdin.isatty():
        try:
            prompts = _read_prompts("-")
        except argparse.ArgumentTypeError as error:
            raise ValueError(str(error)) from None
    if not prompts:
        raise ValueError("--prompt: give at least one prompt (--prompt, --prompt-file, ...)")
    if options.enable_thinking is not None and not options.chat:
        raise ValueError("--enable-thinking: needs --chat, whose template reads it")
    if options.chat and not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("--prompt-token-ids: cannot be used with --chat, which takes text")
    return prompts


def _start(
    llm: LLM, prompts: Prompts, params: SamplingParams, options: argparse.Namespace
) -> Iterator[StreamIncrement]:
    ids = [str(i) for i in range(len(prompts))]
    if not options.chat:
        return llm.stream(prompts, params, request_ids=ids)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    thinking = options.enable_thinking
    return llm.stream_chat(chats, params, enable_thinking=thinking, request_ids=ids)


def _begin(writer: "AnswerWriter", prompts: Prompts, options: argparse.Namespace) -> None:
    writer.legend()
    writer.prompt(prompts[0], end="\n" if options.chat else "")


def _write_all(
    writer: "AnswerWriter",
    answers: list[tuple[str | list[int], RequestOutput]],
    options: argparse.Namespace,
) -> None:
    writer.legend()
    for prompt, output in answers:
        writer.prompt(prompt, end="\n" if options.chat else "")
        writer.answer(output)
        writer.end(blank=True)


def _ended(output: RequestOutput) -> RequestOutput:
    """An output that was broken off says so."""
    if output.finished:
        return output
    return dataclasses.replace(output, finished=True, finish_reason="abort")


def _as_json(prompt: str | list[int], output: RequestOutput) -> dict[str, Any]:
    fields = dataclasses.asdict(output)
    text = prompt if isinstance(prompt, str) else None
    if output.logprobs is not None:  # JSON has no infinities
        fields["logprobs"] = [x if math.isfinite(x) else None for x in output.logprobs]
    return {"request_id": fields.pop("request_id"), "prompt": text, **fields}
