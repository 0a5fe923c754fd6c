"""What answers look like: tokens coloured by exit depth, a legend, a line that sums up."""

import re
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from rlt_jax.outputs import RequestOutput
from rlt_jax.tokenizer import REPLACEMENT, IncrementalDecoder, Tokenizer

# Characters that would steer the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# From the first loop to the last: readable on dark and on light, and apart for the colour-blind.
_RAMP = ((0x1F, 0xA8, 0x8E), (0x3A, 0x86, 0xE0), (0xB8, 0x58, 0xD0), (0xE8, 0x6A, 0x33))


def visible(text: str) -> str:
    """The text with whatever would steer the terminal replaced."""
    return _CONTROL.sub(REPLACEMENT, text)


def depth_style(depth: int, full_depth: int) -> Style:
    """The colour of tokens that left after `depth` of `full_depth` loops (counted from 1)."""
    place = (depth - 1) / max(full_depth - 1, 1) * (len(_RAMP) - 1)
    if full_depth == 1:
        place = len(_RAMP) - 1
    low = min(int(place), len(_RAMP) - 2)
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(_RAMP[low], _RAMP[low + 1]))
    return Style(color="#{:02x}{:02x}{:02x}".format(*mixed))


class AnswerConsole(Console):
    """Where answers go: standard output, as it is now."""

    def __init__(self):
        super().__init__(file=sys.stdout, highlight=False)

    def on_broken_pipe(self) -> None:
        """Called while BrokenPipeError is handled; rich itself would end the process here."""
        raise


class TokenTexts:
    """Splits one request's text by token: (text, exit depth) pieces, which joined are the text.

    A token without text of its own, such as the first bytes of a character, has no piece: its
    text comes with the token that completes it. Without a tokenizer a token's text is its id.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._decoder = None if tokenizer is None else IncrementalDecoder(tokenizer)
        self._taken = 0

    def pieces(self, output: RequestOutput) -> list[tuple[str, int]]:
        """The pieces of the tokens that are new since the last call."""
        # The token that stopped it gives no text.
        end = len(output.token_ids) - (output.finish_reason == "stop")
        new = range(self._taken, end)
        self._taken = max(self._taken, end)
        if self._decoder is None:
            return [(f" {output.token_ids[i]}", output.exit_depths[i]) for i in new]
        pieces = [(self._decoder.push([output.token_ids[i]]), output.exit_depths[i]) for i in new]
        if output.finished and end:
            pieces.append((self._decoder.finish(), output.exit_depths[end - 1]))
        return [(text, depth) for text, depth in pieces if text]


class AnswerWriter:
    """Writes prompts and answers to a console, in colours where it has them.

    Nothing is wrapped, folded or expanded: what a pipe gets is the text.
    """

    def __init__(self, console: Console, full_depth: int, tokenizer: Tokenizer | None):
        self.console = console
        self.full_depth = full_depth
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)

    @property
    def coloured(self) -> bool:
        return self.console.color_system is not None and not self.console.no_color

    def legend(self) -> None:
        """One sample of every depth's colour; nothing where there are no colours."""
        if not self.coloured:
            return
        sample = "#" if self.console.options.ascii_only else "\N{BLACK SQUARE}"
        self._write("exit depth", Style(dim=True))
        for depth in range(1, self.full_depth + 1):
            self._write(f"  {sample} {depth}", depth_style(depth, self.full_depth))
        self._write("\n\n")

    def begin(self) -> None:
        """Before the first token of an answer."""
        self._texts = TokenTexts(self._tokenizer)

    def prompt(self, prompt: str | Sequence[int], end: str = "") -> None:
        """Begins an answer and shows what is answered, dimmed."""
        self.begin()
        text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
        self._write(visible(text) + end, Style(dim=True))

    def answer(self, output: RequestOutput) -> None:
        """The tokens that are new since the last call (or since the answer began)."""
        for text, depth in self._texts.pieces(output):
            self._write(visible(text), depth_style(depth, self.full_depth))
        if output.error is not None:
            self._write(f" [error: {visible(output.error)}]", Style(color="red"))

    def end(self, blank: bool = False) -> None:
        """Ends an answer, on a terminal (or where asked) with an empty line."""
        self._write("\n\n" if blank or self.console.is_terminal else "\n")

    def _write(self, text: str, style: Style | None = None) -> None:
        self.console.print(Segments([Segment(text, style)]), end="", soft_wrap=True)


def print_summary(
    console: Console,
    outputs: Sequence[RequestOutput],
    full_depth: int,
    seconds: float,
    compiling: float = 0.0,
) -> None:
    """A line that tells how fast it was, how deep it went and what leaving early saved."""
    speed, depth = speed_summary(outputs, seconds, compiling), depth_summary(outputs, full_depth)
    line = f"{speed}; {depth}" if depth else speed
    if console.is_terminal and len(line) > console.width:
        line = f"{speed}\n{depth}"
    console.print(Text(line, style="dim"), soft_wrap=not console.is_terminal)


def speed_summary(outputs: Sequence[RequestOutput], seconds: float, compiling: float) -> str:
    """`compiling` of the seconds went into compiling: they do not count for the speed."""
    tokens = sum(len(output.token_ids) for output in outputs)
    seconds = max(seconds - compiling, 1e-9)
    prompts = f"{_count(len(outputs), 'prompt')}, " if len(outputs) > 1 else ""
    more = f" (compiling: {compiling:.2f} s more)" if compiling >= 0.005 else ""
    speed = f"{tokens / seconds:,.1f} tokens/s"
    return f"{prompts}{_count(tokens, 'token')} in {seconds:.2f} s, {speed}{more}"


def depth_summary(outputs: Sequence[RequestOutput], full_depth: int) -> str:
    """The mean depth of decoded tokens: a request's first token comes from its prompt, which
    always runs to full depth. Empty when nothing was decoded."""
    depths = [depth for output in outputs for depth in output.exit_depths[1:]]
    if not depths:
        return ""
    saved = 1 - sum(depths) / (full_depth * len(depths))
    return (
        f"mean depth {sum(depths) / len(depths):.2f} of {full_depth}"
        f" over {_count(len(depths), 'decoded token')}, {100 * saved:.0f} % of loops saved"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
