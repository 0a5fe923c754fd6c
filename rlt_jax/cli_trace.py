"""rlt-jax trace view: draws a recorded run; rlt-jax profile: lets jax.profiler record steps."""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlt_jax.cli_generate import add_prompt_flags, prompts_of
from rlt_jax.cli_options import (
    Parser,
    add_engine_flags,
    add_sampling_flags,
    config_from_flags,
)
from rlt_jax.cli_run import loaded_llm
from rlt_jax.llm import LLM
from rlt_jax.sampling_params import SamplingParams
from rlt_jax.validation import check_int, fail

if TYPE_CHECKING:
    from rich.console import Console

    from rlt_jax.llm_engine import LLMEngine

_TRACE_EXAMPLES = """\
examples:
  rlt-jax generate --prompt-file prompts.txt --trace-output run.jsonl
  rlt-jax trace view run.jsonl --output run.svg

`rlt-jax trace view --help` lists its options.
"""

_VIEW_EXAMPLES = """\
examples:
  rlt-jax trace view run.jsonl --output run.svg
  rlt-jax trace view run.jsonl --output run.png --time --first 100 --last 160
"""

_PROFILE_EXAMPLES = """\
examples:
  rlt-jax profile ouro-tiny --prompt "17+25=" --output profile
  rlt-jax profile checkpoints/ouro-1.4b --prompt-file prompts.txt --output profile --skip 40
"""


def add_trace_flags(add: Callable[..., Parser]) -> None:
    """Adds both commands; `add` is the one of cli.build_parser."""
    usage = "rlt-jax trace COMMAND [options]"
    trace = add("trace", run_trace, "draw a recorded run", _TRACE_EXAMPLES, usage)
    trace.set_defaults(trace_parser=trace)
    commands = trace.add_subparsers(title="commands", metavar="COMMAND", prog="rlt-jax trace")
    view = commands.add_parser(
        "view", help="a picture of it", description=run_view.__doc__, epilog=_VIEW_EXAMPLES
    )
    view.set_defaults(command=run_view)
    view.add_argument("trace", metavar="FILE", help="what --trace-output or start_trace() wrote")
    view.add_argument(
        "--output", required=True, metavar="FILE", help="the picture to write: .png or .svg"
    )
    view.add_argument(
        "--time",
        action="store_true",
        help="across: when batches ran, with the gaps in which nothing was in flight (default: one"
        " column per batch)",
    )
    view.add_argument("--first", type=int, metavar="INT", help="the first batch to draw")
    view.add_argument("--last", type=int, metavar="INT", help="the last batch to draw")
    view.add_argument(
        "--width", type=float, metavar="FLOAT", help="inches (default: by the number of batches)"
    )
    general = view.add_general_flags()
    text = "show tracebacks of errors"
    general.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=text)

    usage = "rlt-jax profile [MODEL] --output DIR --prompt TEXT [options]"
    profile = add("profile", run_profile, "profile steps", _PROFILE_EXAMPLES, usage)
    profile.set_defaults(verbose=False)
    window = profile.add_argument_group("profile")
    window.add_argument(
        "--output", required=True, metavar="DIR", help="the folder to write it under"
    )
    window.add_argument(
        "--skip", type=int, default=0, metavar="INT", help="steps before it begins (default: 0)"
    )
    window.add_argument(
        "--steps", type=int, default=20, metavar="INT", help="steps in it (default: 20)"
    )
    add_prompt_flags(profile)
    add_sampling_flags(profile)
    add_engine_flags(profile, positional=True)


def run_trace(options: argparse.Namespace) -> None:
    """Shows what an engine did, as recorded by `rlt-jax generate --trace-output`."""
    options.trace_parser.print_help()


def run_view(options: argparse.Namespace) -> None:
    """Draws a recorded run: requests down, batches across, coloured by loop."""
    from rlt_jax.trace_view import draw_trace

    draw_trace(
        options.trace,
        options.output,
        first=options.first,
        last=options.last,
        time=options.time,
        width=options.width,
    )
    print(f"wrote {options.output}")


def run_profile(options: argparse.Namespace, notes: "Console | None" = None) -> None:
    """Lets jax.profiler record some steps of answering prompts, each under a name of its own.

    The same steps run once before, so that everything is compiled.
    """
    from rich.console import Console

    from rlt_jax.profiling import check_profile_directory

    prompts = prompts_of(options)
    check_int("--steps", options.steps, minimum=1)
    check_int("--skip", options.skip, minimum=0)
    check_profile_directory("--output", options.output)
    params = config_from_flags(SamplingParams, options)
    with loaded_llm(options, notes or Console(stderr=True)) as llm:
        tokens = [_encode(llm, prompt, options) for prompt in prompts]
        last = options.skip + options.steps
        ran = _run_steps(llm.engine, tokens, params, last)
        if ran <= options.skip:
            fail("--skip", options.skip, f"must be less than {ran}, the steps of these prompts")
        ran = _run_steps(llm.engine, tokens, params, last, options.skip, options.output)
    print(f"wrote {options.output}: steps {options.skip + 1} to {ran}")


def _encode(llm: LLM, prompt: str | list[int], options: argparse.Namespace) -> Sequence[int]:
    if not options.chat:
        return llm.engine.encode(prompt)
    message = {"role": "user", "content": prompt}
    return llm.encode_chat([message], enable_thinking=options.enable_thinking)


def _run_steps(
    engine: "LLMEngine",
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    last: int,
    skip: int = 0,
    directory: str | None = None,
) -> int:
    """Answers the prompts for at most `last` steps and drops them; how many steps there were.

    directory: for the profile of all but the first `skip` of them.
    """
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    step = 0
    while step < last and engine.has_unfinished_requests():
        if step == skip and directory is not None:
            engine.start_profile(directory)
        for output in engine.step(only_finished=True):
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
        step += 1
    if step > skip and directory is not None:
        engine.stop_profile()
    for i in range(len(prompts)):
        engine.abort_request(str(i))
    while engine.has_unfinished_requests():
        engine.step(only_finished=True)
    return step
