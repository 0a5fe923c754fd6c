"""What is shown: pieces of text by token, colours by exit depth, the legend, the summary."""

import dataclasses
import io

import pytest
from rich.console import Console
from rich.text import Text

from examples.make_random_checkpoint import byte_level_tokenizer
from rlt_jax import RequestMetrics, RequestOutput, SamplingParams
from rlt_jax.terminal import (
    AnswerWriter,
    TokenTexts,
    depth_style,
    depth_summary,
    print_summary,
    speed_summary,
    visible,
)
from rlt_jax.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_level_tokenizer())
END = 0


def output(tokens, depths=None, *, finish_reason=None, error=None, text=""):
    depths = depths or [4] * len(tokens)
    return RequestOutput(
        request_id="0",
        prompt_token_ids=(5,),
        token_ids=tuple(tokens),
        text=text,
        exit_depths=tuple(depths),
        logprobs=None,
        finished=finish_reason is not None,
        finish_reason=finish_reason,
        sampling_params=SamplingParams(),
        metrics=RequestMetrics(),
        error=error,
    )


def make_console(**options):
    return Console(file=io.StringIO(), _environ=options.pop("environ", {}), **options)


def coloured_console(**options):
    return make_console(force_terminal=True, color_system="truecolor", width=200, **options)


def shown(console):
    return console.file.getvalue()


def colours(text):
    """(character, its colour) of a text with escape codes."""
    parsed = Text.from_ansi(text)
    styles = [parsed.get_style_at_offset(make_console(), i) for i in range(len(parsed))]
    return [(character, style.color) for character, style in zip(parsed.plain, styles)]


# Pieces


def test_a_character_has_the_depth_of_the_token_that_completes_it():
    tokens = TOKENIZER.encode("aé€")
    assert len(tokens) == 6
    texts = TokenTexts(TOKENIZER)
    assert texts.pieces(output(tokens, [4, 1, 2, 1, 2, 3])) == [("a", 4), ("é", 2), ("€", 3)]


def test_pieces_are_the_same_however_the_tokens_come():
    tokens, depths = TOKENIZER.encode("né€!"), [4, 1, 2, 1, 2, 3, 4]
    at_once = TokenTexts(TOKENIZER).pieces(output(tokens, depths, finish_reason="length"))
    texts, one_by_one = TokenTexts(TOKENIZER), []
    for count in range(1, len(tokens) + 1):
        reason = "length" if count == len(tokens) else None
        one_by_one += texts.pieces(output(tokens[:count], depths[:count], finish_reason=reason))
    assert one_by_one == at_once
    assert "".join(text for text, _ in at_once) == "né€!"


def test_the_token_that_stopped_it_has_no_piece():
    tokens = [*TOKENIZER.encode("ab"), *TOKENIZER.encode("c")]
    pieces = TokenTexts(TOKENIZER).pieces(output(tokens, finish_reason="stop"))
    assert "".join(text for text, _ in pieces) == "ab"


def test_what_was_held_back_comes_at_the_end():
    tokens = TOKENIZER.encode("a€")[:-1]
    texts = TokenTexts(TOKENIZER)
    assert texts.pieces(output(tokens, [4, 1, 2])) == [("a", 4)]
    ended = output(tokens, [4, 1, 2], finish_reason="length")
    assert texts.pieces(ended) == [("\N{REPLACEMENT CHARACTER}", 2)]


def test_special_tokens_have_no_piece():
    tokens = [*TOKENIZER.encode("a"), END, *TOKENIZER.encode("b")]
    assert TokenTexts(TOKENIZER).pieces(output(tokens, [4, 3, 2])) == [("a", 4), ("b", 2)]


def test_an_output_without_tokens_has_no_pieces():
    assert TokenTexts(TOKENIZER).pieces(output([], finish_reason="abort")) == []


def test_without_a_tokenizer_the_ids_are_shown():
    assert TokenTexts(None).pieces(output([7, 300], [4, 2])) == [(" 7", 4), (" 300", 2)]


# Colours


@pytest.mark.parametrize("full_depth", [2, 3, 4, 8, 32])
def test_every_depth_has_its_colour(full_depth):
    styles = [depth_style(depth, full_depth) for depth in range(1, full_depth + 1)]
    assert len({style.color for style in styles}) == full_depth
    assert styles[0] == depth_style(1, 4)
    assert styles[-1] == depth_style(4, 4)


def test_a_model_of_one_loop_has_the_colour_of_full_depth():
    assert depth_style(1, 1) == depth_style(4, 4)


def test_the_colours_of_four_loops_differ_with_16_colours_too():
    console = make_console(force_terminal=True, color_system="standard", width=200)
    AnswerWriter(console, 4, TOKENIZER).legend()
    samples = {colour for character, colour in colours(shown(console)) if character.isdigit()}
    assert len(samples) == 4


def test_the_legend_has_a_sample_of_each_depth():
    console = coloured_console()
    AnswerWriter(console, 4, TOKENIZER).legend()
    samples = [pair for pair in colours(shown(console)) if pair[0].isdigit()]
    assert samples == [(str(depth), depth_style(depth, 4).color) for depth in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"force_terminal": True, "environ": {"NO_COLOR": "1"}},
        {"force_terminal": True, "environ": {"TERM": "dumb"}},
    ],
)
def test_without_colours_there_is_no_legend_and_the_text_is_plain(options):
    console = make_console(**options)
    writer = AnswerWriter(console, 4, TOKENIZER)
    writer.legend()
    writer.begin()
    writer.answer(output(TOKENIZER.encode("42"), [4, 1]))
    assert shown(console) == "42"


def test_tokens_have_the_colour_of_their_depth_and_the_prompt_has_none():
    console = coloured_console()
    writer = AnswerWriter(console, 4, TOKENIZER)
    writer.prompt("1+2=")
    tokens = TOKENIZER.encode("abé")
    writer.answer(output(tokens[:2], [4, 1]))
    writer.answer(output(tokens, [4, 1, 2, 3]))
    writer.end()
    prompt = [(character, None) for character in "1+2="]
    answer = [("a", 4), ("b", 1), ("é", 3)]
    expected = prompt + [(text, depth_style(depth, 4).color) for text, depth in answer]
    assert [(c, o if o and not o.is_default else None) for c, o in colours(shown(console))][
        : len(expected)
    ] == expected
    assert shown(console).endswith("\n\n")


def test_a_pipe_gets_the_text_as_it_is():
    console = make_console(width=20)
    writer = AnswerWriter(console, 4, TOKENIZER)
    prompt, text = "tab\there, [bold]x[/] :smile:  ", "x" * 50 + "  \n\n end\t\n"
    writer.prompt(prompt)
    writer.answer(output(TOKENIZER.encode(text)))
    writer.end()
    assert shown(console) == prompt + text + "\n"


def test_nothing_shown_can_steer_the_terminal():
    console = make_console()
    writer = AnswerWriter(console, 4, TOKENIZER)
    writer.prompt("\x1b[2Jprompt")
    writer.answer(output(TOKENIZER.encode("\x07"), finish_reason="error", error="\x9b1m"))
    assert visible("a\x1b\r\x7f\x85b\t\n") == "a" + 4 * "\N{REPLACEMENT CHARACTER}" + "b\t\n"
    assert shown(console) == visible("\x1b[2Jprompt\x07 [error: \x9b1m]")


def test_token_ids_are_shown_as_prompt_and_answer():
    console = make_console()
    writer = AnswerWriter(console, 4, None)
    writer.prompt([1, 22])
    writer.answer(output([3, 4]))
    assert shown(console) == "1 22 3 4"


def test_a_new_answer_forgets_the_last_ones_bytes():
    console = make_console()
    writer = AnswerWriter(console, 4, TOKENIZER)
    for text in ("one", "three"):
        writer.begin()
        writer.answer(output(TOKENIZER.encode(text)))
    assert shown(console) == "onethree"


# The summary


def test_the_mean_depth_is_over_decoded_tokens_and_leaves_out_what_prompts_gave():
    outputs = [output([5] * 4, [4, 1, 2, 3]), output([5] * 2, [4, 4]), output([5], [4])]
    expected = "mean depth 2.50 of 4 over 4 decoded tokens, 38 % of loops saved"
    assert depth_summary(outputs, 4) == expected
    assert depth_summary([output([5, 5], [2, 1])], 2).endswith(
        "mean depth 1.00 of 2 over 1 decoded token, 50 % of loops saved"
    )
    assert depth_summary([output([5, 5], [4, 4])], 4).endswith(" 0 % of loops saved")


def test_without_decoded_tokens_there_is_no_mean_depth():
    assert depth_summary([output([5])], 4) == ""
    console = make_console()
    print_summary(console, [output([5])], 4, 0.5)
    assert shown(console) == "1 token in 0.50 s, 2.0 tokens/s\n"


def test_compiling_does_not_count_for_the_speed():
    outputs = [output([5] * 600), output([5] * 600)]
    assert speed_summary(outputs, 4.0, 3.0) == (
        "2 prompts, 1,200 tokens in 1.00 s, 1,200.0 tokens/s (compiling: 3.00 s more)"
    )
    assert speed_summary(outputs[:1], 1.0, 0.0) == "600 tokens in 1.00 s, 600.0 tokens/s"


def test_the_summary_is_one_line_unless_a_terminal_is_too_narrow():
    outputs = [dataclasses.replace(output([5, 5], [4, 2]))]
    pipe, wide, narrow = make_console(width=60), coloured_console(), coloured_console()
    narrow.width = 80
    for console in (pipe, wide, narrow):
        print_summary(console, outputs, 4, 1.0)
    assert [shown(console).count("\n") for console in (pipe, wide, narrow)] == [1, 1, 2]
    assert "tokens/s; mean depth 2.00 of 4" in shown(pipe)
