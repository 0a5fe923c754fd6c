"""Draws what `rlt-jax generate` shows in a terminal as an SVG, from a real run.

    python examples/terminal_picture.py docs/images/generate.svg --prompt "17+25=" \\
        --prompt "rev:stone=" --exit-threshold 0.5

Everything after the file's name goes to `rlt-jax generate`, and stands in the picture's first
line. The run happens twice: the picture is of the second, in which nothing is compiled.
"""

import io
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlt_jax.cli import build_parser
from rlt_jax.cli_generate import run_generate

WIDTH = 92


def main(arguments: list[str] | None = None) -> None:
    picture, *flags = sys.argv[1:] if arguments is None else arguments
    options = build_parser().parse_args(["generate", *flags])
    for _ in range(2):
        terminal = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True)
        notes = Console(file=io.StringIO())  # not a terminal: no spinner gets into the picture
        terminal.print(Text(command_line(flags)))
        run_generate(options, terminal, notes)
        terminal.print(Text(notes.file.getvalue().replace("; ", "\n").rstrip(), style="dim"))
    Path(picture).parent.mkdir(parents=True, exist_ok=True)
    terminal.save_svg(picture, title="rlt-jax generate")


def command_line(flags: list[str]) -> str:
    """The command as typed, broken before a flag where a line would become too long."""
    lines = ["$ rlt-jax generate"]
    for flag in f" {shlex.join(flags)}".split(" --")[1:]:
        if len(f"{lines[-1]} --{flag} \\") > WIDTH:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" --{flag}"
    return "\n".join(lines)


if __name__ == "__main__":
    main()
