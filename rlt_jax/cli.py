"""The command line: rlt-jax generate | chat | bench | trace | profile | inspect | convert | export.

Whatever goes wrong is one line on stderr and exit status 2; --debug shows the traceback. What a
command needs is imported when it runs, so that --help is quick.
"""

import argparse
import dataclasses
import inspect
import io
import json
import os
import sys
import textwrap
from collections.abc import Callable, Sequence

from rlt_jax.cli_bench import add_bench_flags
from rlt_jax.cli_chat import add_chat_flags
from rlt_jax.cli_generate import add_generate_flags
from rlt_jax.cli_options import Parser
from rlt_jax.cli_trace import add_trace_flags
from rlt_jax.config import DTYPES

_EXAMPLES = """\
examples:
  rlt-jax generate --prompt "17+25=" --exit-threshold 0.5
  rlt-jax chat --model checkpoints/ouro-1.4b
  rlt-jax convert ByteDance/Ouro-1.4B checkpoints/ouro-1.4b --verify

`rlt-jax COMMAND --help` lists a command's options.
"""

_INSPECT_EXAMPLES = """\
examples:
  rlt-jax inspect ouro-tiny
  rlt-jax inspect checkpoints/ouro-1.4b --json
"""

_CONVERT_EXAMPLES = """\
examples:
  rlt-jax convert ByteDance/Ouro-1.4B checkpoints/ouro-1.4b --verify
  rlt-jax convert ./ouro-1.4b-huggingface checkpoints/ouro-1.4b --dtype bfloat16
"""

_EXPORT_EXAMPLES = """\
examples:
  rlt-jax export checkpoints/ouro-1.4b ./ouro-1.4b-huggingface
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser, options = build_parser(), None
    _open_standard_streams()
    try:
        options = parser.parse_args(arguments)
        options.arguments = list(sys.argv[1:] if arguments is None else arguments)
        if options.command is None:
            parser.print_help()
            return 0
        status = options.command(options)
        sys.stdout.flush()
        return status or 0
    except BrokenPipeError:  # the reader had enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("rlt-jax: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if options is not None and options.debug:
            raise
        print(f"rlt-jax: error: {describe(error)}", file=sys.stderr)
        return 2


def _open_standard_streams() -> None:
    """A closed stream (`>&-`) reads and writes nothing; a narrow encoding loses no answer."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def describe(error: Exception) -> str:
    """The error in one line. Those that are not about the input also say what they are."""
    line = " ".join(str(error).split()) or type(error).__name__
    ours = type(error).__module__.startswith(("builtins", "rlt_jax"))
    if ours and isinstance(error, (ValueError, OSError, ImportError, RuntimeError)):
        return line
    line = textwrap.shorten(f"{type(error).__name__}: {line}", 500)
    return f"{line} (--debug shows the traceback)"


def build_parser() -> Parser:
    parser = Parser(
        prog="rlt-jax",
        usage="rlt-jax COMMAND [options]",
        description="A JAX runtime for recurrent looped transformers.",
        epilog=_EXAMPLES,
    )
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog="rlt-jax")

    def add(
        name: str,
        run: Callable[[argparse.Namespace], int | None],
        help: str,
        examples: str,
        usage: str | None = None,
    ) -> Parser:
        description = inspect.cleandoc(run.__doc__)
        command = commands.add_parser(
            name, help=help, description=description, epilog=examples, usage=usage
        )
        command.set_defaults(command=run)
        return command

    add_generate_flags(add)
    add_chat_flags(add)
    add_bench_flags(add)
    add_trace_flags(add)

    shown = add("inspect", run_inspect, "describe a checkpoint", _INSPECT_EXAMPLES)
    shown.add_argument("path", help="a checkpoint's folder, its hub id, or ouro-tiny")
    shown.add_argument("--json", action="store_true", help="print one JSON object")

    convert = add("convert", run_convert, "Hugging Face checkpoint to Orbax", _CONVERT_EXAMPLES)
    _add_folders(convert)
    convert.add_argument("--dtype", choices=DTYPES, help="cast the weights")
    convert.add_argument("--verify", action="store_true", help="read back and compare each tensor")

    _add_folders(add("export", run_export, "Orbax checkpoint to Hugging Face", _EXPORT_EXAMPLES))

    for command in commands.choices.values():
        general = command.add_general_flags()
        general.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    general = parser.add_general_flags()
    general.add_argument("--version", action=_Version, help="print the version and exit")
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
