"""The command line: rlt-jax generate | inspect | convert | export.

Whatever goes wrong is one line on stderr and exit status 2; --debug shows the traceback. What a
command needs is imported when it runs, so that --help is quick.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlt_jax.cli_options import (
    Parser,
    add_engine_flags,
    add_sampling_flags,
    config_from_flags,
    engine_options,
    integers,
    read_text,
)
from rlt_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rlt_jax.llm import LLM
    from rlt_jax.outputs import RequestOutput

# Characters that would steer the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    options = build_parser().parse_args(arguments)
    try:
        options.command(options)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # the reader had enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("rlt-jax: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if options.debug:
            raise
        print(f"rlt-jax: error: {describe(error)}", file=sys.stderr)
        return 2


def describe(error: Exception) -> str:
    """The error in one line. Those that are not about the input also say what they are."""
    line = " ".join(str(error).split()) or type(error).__name__
    ours = type(error).__module__.startswith(("builtins", "rlt_jax"))
    if ours and isinstance(error, (ValueError, OSError, ImportError, RuntimeError)):
        return line
    line = textwrap.shorten(f"{type(error).__name__}: {line}", 500)
    return f"{line} (--debug shows the traceback)"


def build_parser() -> Parser:
    parser = Parser(prog="rlt-jax", description="A JAX runtime for recurrent looped transformers.")
    parser.add_argument("--version", action=_Version, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run, help: str) -> Parser:
        command = commands.add_parser(name, help=help, description=run.__doc__.splitlines()[0])
        command.set_defaults(command=run)
        command.add_argument("--debug", action="store_true", help="show tracebacks of errors")
        return command

    _add_generate_flags(add("generate", run_generate, "answer prompts"))

    inspect = add("inspect", run_inspect, "describe a checkpoint")
    inspect.add_argument("path", help="a checkpoint's folder, or its hub id")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")

    convert = add("convert", run_convert, "Hugging Face checkpoint to Orbax")
    _add_folders(convert)
    convert.add_argument("--dtype", choices=("float32", "bfloat16"), help="cast the weights")
    convert.add_argument("--verify", action="store_true", help="read back and compare each tensor")

    _add_folders(add("export", run_export, "Orbax checkpoint to Hugging Face"))
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked for it."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from rlt_jax import __version__

        print(__version__)
        parser.exit()


def _add_folders(parser: Parser) -> None:
    parser.add_argument("source", metavar="SRC", help="a checkpoint's folder, or its hub id")
    parser.add_argument("destination", metavar="DST", help="the folder to write")
    parser.add_argument("--force", action="store_true", help="replace DST if it exists")


def _add_generate_flags(parser: Parser) -> None:
    prompts = parser.add_argument_group("prompts", "in the order given; at least one")
    prompts.add_argument(
        "--prompt", dest="prompts", action="append", metavar="TEXT", help="a prompt"
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
        "--prompt-file",
        dest="prompts",
        action="extend",
        type=_read_prompts,
        metavar="FILE",
        help="one prompt per line, empty lines left out (-: standard input)",
    )
    prompts.add_argument(
        "--chat", action="store_true", help="send each prompt through the model's chat template"
    )
    prompts.add_argument(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        help="a variable of the chat template, with --chat",
    )
    shown = parser.add_argument_group("output")
    shown.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt, a line each"
    )
    shown.add_argument(
        "--verbose", action="store_true", help="print to stderr where the start-up time went"
    )
    add_engine_flags(parser)
    add_sampling_flags(parser)


def _read_prompts(path: str) -> list[str]:
    try:
        text = sys.stdin.read() if path == "-" else read_text(path)
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"standard input: {error}") from None
    return [line for line in text.split("\n") if line.strip()]


def run_generate(options: argparse.Namespace) -> None:
    """Answers prompts, all in one batch."""
    prompts = options.prompts
    if not prompts:
        raise ValueError("--prompt: give at least one prompt (--prompt, --prompt-file, ...)")
    if options.enable_thinking is not None and not options.chat:
        raise ValueError("--enable-thinking: needs --chat, whose template reads it")
    if options.chat and not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("--prompt-token-ids: cannot be used with --chat, which takes text")
    params = config_from_flags(SamplingParams, options)
    engine = engine_options(options)

    # Whatever a library prints meanwhile must not end up among the answers.
    with contextlib.redirect_stdout(sys.stderr):
        start = time.perf_counter()
        from rlt_jax.llm import LLM, GenerationError

        with LLM(**engine) as llm:
            if options.verbose:
                _print_startup(llm, time.perf_counter() - start)
            start = time.perf_counter()
            failure = None
            try:
                if options.chat:
                    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
                    outputs = llm.chat(chats, params, enable_thinking=options.enable_thinking)
                else:
                    outputs = llm.generate(prompts, params)
            except GenerationError as error:  # the other prompts' answers are not lost
                failure, outputs = error, error.outputs
            seconds = time.perf_counter() - start
            if options.verbose:
                _print_compiling(llm, seconds)
            full_depth = llm.engine.model_config.total_ut_steps
    if options.json:
        for prompt, output in zip(prompts, outputs, strict=True):
            print(json.dumps(_as_json(prompt, output)))
    else:
        _print_outputs(prompts, outputs, seconds, full_depth)
    if failure is not None:
        raise failure


def _as_json(prompt: str | list[int], output: "RequestOutput") -> dict[str, Any]:
    fields = dataclasses.asdict(output)
    text = prompt if isinstance(prompt, str) else None
    if output.logprobs is not None:  # JSON has no infinities
        fields["logprobs"] = [x if math.isfinite(x) else None for x in output.logprobs]
    return {"request_id": fields.pop("request_id"), "prompt": text, **fields}


def _print_startup(llm: "LLM", seconds: float) -> None:
    phases = {**llm.startup_times, "other": seconds - sum(llm.startup_times.values())}
    print(f"start-up: {seconds:.2f} s", file=sys.stderr)
    _print_seconds(phases)
    plan = llm.engine.memory_plan
    print(
        f"KV pool: {plan.num_blocks} blocks of {plan.block_size} tokens, {plan.kv_bytes:,} bytes"
        f" ({plan.source}); weights: {plan.weight_bytes:,} bytes;"
        f" at most {llm.engine.max_executables} executables",
        file=sys.stderr,
    )


def _print_compiling(llm: "LLM", seconds: float) -> None:
    compiled = llm.engine.compile_seconds
    print(
        f"answering: {seconds:.2f} s, of it {sum(compiled.values()):.2f} s compiling"
        f" {len(compiled)} programs",
        file=sys.stderr,
    )
    _print_seconds(compiled)


def _print_seconds(phases: dict[str, float]) -> None:
    for phase, spent in phases.items():
        print(f"  {phase:<24} {spent:8.2f} s", file=sys.stderr)


def _print_outputs(
    prompts: list[str | list[int]], outputs: "list[RequestOutput]", seconds: float, full_depth: int
) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for prompt, output in zip(prompts, outputs, strict=True):
        shown = Text(prompt if isinstance(prompt, str) else f"{prompt} ", style="dim")
        text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", output.text)
        shown.append(text or str(list(output.token_ids)), style="not dim bold")
        if output.error is not None:
            shown.append(f" [error: {output.error}]", style="not dim red")
        console.print(shown, end="\n\n")
    depths = [depth for output in outputs for depth in output.exit_depths]
    line = f"{len(outputs)} prompt{'s' * (len(outputs) > 1)}, {len(depths)} tokens "
    line += f"in {seconds:.2f} s: {len(depths) / seconds:.1f} tokens/s"
    if depths:
        line += f", mean depth {sum(depths) / len(depths):.2f} of {full_depth}"
    console.print(Text(line, style="dim"))


def run_inspect(options: argparse.Namespace) -> None:
    """Prints a checkpoint's config, size and KV bytes per token, without reading its weights."""
    from rich.console import Console

    from rlt_jax.checkpoints_convert import inspect_checkpoint, render_checkpoint

    info = inspect_checkpoint(options.path)
    if options.json:
        fields = {"path": str(info.path), "config": dataclasses.asdict(info.config)}
        print(json.dumps({**vars(info), **fields}))
    else:
        width = None if sys.stdout.isatty() else 200  # nothing is folded in a file or a pipe
        Console(width=width).print(render_checkpoint(info))


def _stay_off_the_gpu() -> None:
    """Orbax starts JAX's backend, which would claim a GPU's memory for work on the host."""
    os.environ["JAX_PLATFORMS"] = "cpu"


def run_convert(options: argparse.Namespace) -> None:
    """Writes a Hugging Face checkpoint as an Orbax folder."""
    _stay_off_the_gpu()
    from rlt_jax.checkpoints_convert import convert

    written = convert(
        options.source,
        options.destination,
        dtype=options.dtype,
        verify=options.verify,
        force=options.force,
        show_progress=sys.stderr.isatty(),
    )
    print(f"wrote {written.folder}")


def run_export(options: argparse.Namespace) -> None:
    """Writes an Orbax checkpoint as a Hugging Face folder."""
    _stay_off_the_gpu()
    from rlt_jax.checkpoints_convert import export

    written = export(
        options.source,
        options.destination,
        force=options.force,
        show_progress=sys.stderr.isatty(),
    )
    print(f"wrote {written.folder}")
