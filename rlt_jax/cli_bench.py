"""rlt-jax bench: measures this machine, the kernels and the engine, each against its limit."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlt_jax.bench.modes import IN_FLIGHT, SCHEDULING, SOAK
from rlt_jax.cli_options import Parser, add_config_flags, integers
from rlt_jax.config import (
    DTYPES,
    KERNELS,
    LAYOUTS,
    CacheConfig,
    ExecutionConfig,
    ExitConfig,
    SchedulerConfig,
)
from rlt_jax.sampling_params import SamplingParams

_EXAMPLES = """\
examples:
  rlt-jax bench roofline
  rlt-jax bench decode --synthetic ouro-1.4b --batch 1,8,32,128 --output decode.json
  rlt-jax bench compare before.json after.json

`rlt-jax bench COMMAND --help` lists a command's options.
"""

# Each command's help, description and examples.
_COMMANDS = {
    "roofline": (
        "what the machine can do",
        "Measures read and copy bandwidth and the rate of a large matrix product.",
        ["--output roofline.json"],
    ),
    "decode": (
        "a token step with every prompt in",
        "Measures a token step once every prompt is in: the mean over a range of steps, what had"
        "\nto move meanwhile, and how long the device was idle.",
        [
            "--batch 1,8,32,128 --context 1024 --kernels auto,reference",
            "--batch 32 --mixed-depths 2,3,4 --output mixed.json",
        ],
    ),
    "prefill": (
        "prompts only",
        "Measures prompts alone: from the first request's submission to the last prompt's end.",
        ["--requests 8 --prompt 1024"],
    ),
    "kernels": (
        "each kernel alone",
        "Measures each kernel alone, called many times in one program, on random data.",
        ["--rows 8,32,128 --context 1024"],
    ),
    "throughput": (
        "whole requests, prefill and drain included",
        "Measures whole requests, all at once or in a closed loop: tokens per second, time to"
        "\nfirst token, time per output token, peak memory.",
        ["--requests 1,8,32,128 --prompt 1024 --output-tokens 128", "--requests 32 --closed-loop"],
    ),
    "replay": (
        "recorded requests in every mode",
        "Replays recorded requests and depths in every mode: refuses other outputs than recorded,"
        "\nand prints throughput against the ideal: that of full depth, were it loops alone that"
        "\ncount. --record FILE makes the recording.",
        [
            "--record r.json --requests 128 --max-num-seqs 64 --depths 2,3,4",
            "r.json --kernels auto,reference --output replay.json",
        ],
    ),
    "preemption": (
        "a slot on its way to the host and back",
        "Saves a running request's slot to host memory and restores it: time and bandwidth, against"
        "\nthat of plain copies.",
        ["--context 1024,4096 --output preemption.json"],
    ),
    "soak": (
        "thousands of short requests, all of which must end",
        "Answers short requests of random lengths, priorities and shared prefixes, and cancels some"
        "\nat any time, with prefix caching, preemption and a tiny KV pool. Exit status 1 when a"
        "\nrequest is lost or fails, a block does not come back, or the memory grows.",
        [
            "--requests 10000 --output soak.json",
            "--mode mixed --async-scheduling --exit-decision device",
        ],
    ),
    "compare": (
        "ratios of two measurements",
        "Prints what B is to A in every matching row: B's figure divided by A's.",
        ["before.json after.json"],
    ),
    "plot": (
        "a chart of measurements",
        "Draws the fraction of the limit by batch (decode), throughput by concurrency, or the"
        "\nfraction of the ideal by concurrency (replay).",
        ["decode.json --output decode.svg"],
    ),
}

_TITLES = {
    CacheConfig: "KV cache",
    SchedulerConfig: "scheduler",
    ExitConfig: "exit policy",
    ExecutionConfig: "execution",
}


def add_bench_flags(add: Callable[..., Parser]) -> None:
    """Adds the command and its own commands; `add` is the one of cli.build_parser."""
    bench = add("bench", run_bench, "measure speed", _EXAMPLES, "rlt-jax bench COMMAND [options]")
    bench.set_defaults(bench_parser=bench)
    commands = bench.add_subparsers(title="commands", metavar="COMMAND", prog="rlt-jax bench")

    fill = {
        "roofline": _add_roofline,
        "decode": _add_decode,
        "prefill": _add_prefill,
        "kernels": _add_kernels,
        "throughput": _add_throughput,
        "replay": _add_replay,
        "preemption": _add_preemption,
        "soak": _add_soak,
        "compare": _add_compare,
        "plot": _add_plot,
    }
    for name, (help, description, arguments) in _COMMANDS.items():
        examples = "".join(f"\n  rlt-jax bench {name} {example}" for example in arguments)
        parser = commands.add_parser(
            name, help=help, description=description, epilog=f"examples:{examples}\n"
        )
        parser.set_defaults(command=_run, bench_command=name)
        fill[name](parser)
    for parser in commands.choices.values():
        general = parser.add_general_flags()
        text = "show tracebacks of errors"
        general.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=text)


def run_bench(options: argparse.Namespace) -> None:
    """Measures this machine, the kernels and the engine, each against its limit."""
    options.bench_parser.print_help()


def _run(options: argparse.Namespace) -> int | None:
    from rlt_jax.bench import commands

    return commands.RUN[options.bench_command](options)


def _add_roofline(parser: Parser) -> None:
    group = parser.add_argument_group("measurement")
    _integer(group, "--read-bytes", "bytes to sum and to copy (default: 3 GiB, on a CPU 256 MiB)")
    _integer(group, "--matmul", "rows and columns of the product (default: 8192, on a CPU 1024)")
    group.add_argument("--device", help="where to run: cpu, gpu, gpu:1, ... (default: JAX's)")
    _add_output(parser)


def _add_decode(parser: Parser) -> None:
    group = parser.add_argument_group("measurement (every combination)")
    _integers(group, "--batch", "rows that decode together", "1,8,32,128", [1, 8, 32, 128])
    _integers(group, "--context", "prompt tokens of each", "1024, on a CPU 64")
    _integer(group, "--tokens", "token steps (default: 128, on a CPU 16)")
    _integer(group, "--skip", "token steps left out at the start (default: 4)", default=4)
    _integers(group, "--depth", "loops of every token", "the model's")
    _integers(group, "--mixed-depths", "draw each token's loops from these instead", None)
    _names(group, "--layout", LAYOUTS, "KV planes", "last_exited", ["last_exited"])
    _names(group, "--kernels", KERNELS, "kernels, each measured", "auto", ["auto"])
    _integer(group, "--seed", "of prompts, weights and depths (default: 0)", default=0)
    _add_engine(parser, {(CacheConfig, "layout"), (ExecutionConfig, "kernels")}, exits=False)
    _add_output(parser, roofline=True)


def _add_prefill(parser: Parser) -> None:
    group = parser.add_argument_group("measurement (every combination)")
    _integers(group, "--requests", "prompts submitted at once", "8", [8])
    _integers(group, "--prompt", "tokens of each", "1024, on a CPU 64")
    _integer(group, "--repeats", "of which the median counts (default: 3)", default=3)
    _integer(group, "--seed", "of prompts and weights (default: 0)", default=0)
    _add_engine(parser, exits=False)
    _add_output(parser, roofline=True)


def _add_kernels(parser: Parser) -> None:
    group = parser.add_argument_group("measurement")
    _integers(group, "--rows", "decode rows", "1,8,32,128, on a CPU 4")
    _integers(group, "--context", "positions that each row reads", "1024,8192, on a CPU 64")
    _integers(group, "--prompt", "tokens of a prompt", "1024, on a CPU 64")
    _integer(group, "--prompts", "prompts in a prefill (default: 8, on a CPU 2)")
    _integer(group, "--layers", "calls in one program (default: the model's layers)")
    _integer(group, "--seed", "of the data (default: 0)", default=0)
    _add_model(parser, checkpoint=False)
    parser.advanced += add_config_flags(
        parser, CacheConfig, _TITLES[CacheConfig], ["block_size", "layout"]
    )
    parser.advanced += add_config_flags(
        parser, ExecutionConfig, _TITLES[ExecutionConfig], ["kernels"]
    )
    _add_output(parser, roofline=True)


def _add_throughput(parser: Parser) -> None:
    group = parser.add_argument_group("measurement")
    _integers(group, "--requests", "requests at once", "1,8,32,128", [1, 8, 32, 128])
    _integer(group, "--prompt", "prompt tokens (default: 1024, on a CPU 64)")
    _integer(group, "--output-tokens", "output tokens (default: 128, on a CPU 16)")
    group.add_argument(
        "--closed-loop",
        action="store_true",
        help="twice as many requests, of which so many run at any time",
    )
    _integers(group, "--mixed-depths", "draw each token's loops from these", None)
    _integer(group, "--repeats", "of which the median counts (default: 3)", default=3)
    _integer(group, "--seed", "of prompts, weights and depths (default: 0)", default=0)
    add_config_flags(
        parser, SamplingParams, "exit depth", ["exit_threshold", "min_loops", "max_loops"]
    )
    parser.advanced += add_config_flags(
        parser, SamplingParams, "sampling", ["temperature", "top_p", "top_k"]
    )
    _add_engine(parser, {(ExitConfig, "depths_by_request")})
    _add_output(parser)


def _add_replay(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", nargs="?", help="the recording to replay")
    group = parser.add_argument_group("replay")
    _names(group, "--modes", tuple(SCHEDULING), "scheduling", "all that the layout allows")
    text = "one batch in flight, or several and loops submitted before signals are read"
    _names(group, "--in-flight", tuple(IN_FLIGHT), text, "both")
    _names(group, "--kernels", KERNELS, "kernels, each measured", "auto")
    _integer(group, "--repeats", "of which the median counts (default: 3)")
    _integer(group, "--first", "replay only so many requests of the recording (default: all)")
    text = "other tokens are an error (default: in float32; in bfloat16 they are counted)"
    group.add_argument("--exact", action="store_true", help=text)
    group = parser.add_argument_group("recording")
    group.add_argument("--record", metavar="FILE", help="answer requests and write what was done")
    _integer(group, "--requests", "in all; --max-num-seqs at once (default: 128, on a CPU 8)")
    _integer(group, "--prompt", "prompt tokens (default: 1024, on a CPU 64)")
    _integer(group, "--output-tokens", "output tokens (default: 128, on a CPU 16)")
    _integers(group, "--depths", "draw each token's loops from these", "2 to the model's")
    text = "let the model's own gate choose the loops (with --exit-threshold)"
    group.add_argument("--adaptive", action="store_true", help=text)
    _integer(group, "--seed", "of prompts, weights, depths and sampling (default: 0)")
    add_config_flags(
        parser, SamplingParams, "exit depth", ["exit_threshold", "min_loops", "max_loops"]
    )
    parser.advanced += add_config_flags(
        parser, SamplingParams, "sampling", ["temperature", "top_p", "top_k"]
    )
    of_the_mode = {
        (SchedulerConfig, "mode"),
        (SchedulerConfig, "wavefront_chunked_prefill"),
        (ExecutionConfig, "kernels"),
        (ExecutionConfig, "max_in_flight"),
        (ExecutionConfig, "async_scheduling"),
    }
    _add_engine(parser, of_the_mode, exits=False)
    _add_output(parser)


def _add_preemption(parser: Parser) -> None:
    group = parser.add_argument_group("measurement")
    _integers(
        group, "--context", "prompt tokens of the request, each measured", "1024, on a CPU 64"
    )
    _integer(group, "--repeats", "of which the median counts (default: 3)", default=3)
    _integer(group, "--seed", "of prompts and weights (default: 0)", default=0)
    chosen = ("max_num_seqs", "policy", "enable_preemption")
    _add_engine(parser, {(SchedulerConfig, name) for name in chosen}, exits=False)
    _add_output(parser)


def _add_soak(parser: Parser) -> None:
    group = parser.add_argument_group("soak")
    _integer(group, "--requests", "in all (default: 10000)", 10000)
    text = "share of the requests that are cancelled, unless they end before (default: 0.2)"
    group.add_argument("--cancel", type=float, metavar="FLOAT", default=0.2, help=text)
    _integer(group, "--max-waiting", "requests that may wait at once (default: 32)", 32)
    text = "MB that the process may grow by after a tenth of the requests (default: 50)"
    _integer(group, "--max-growth", text, 50)
    _integer(group, "--seed", "of requests, cancels and synthetic weights (default: 0)", 0)
    _add_engine(parser, {(ExitConfig, "depths_by_request")}, defaults=SOAK, model="ouro-tiny")
    _add_output(parser)


def _add_compare(parser: Parser) -> None:
    parser.add_argument("before", metavar="A.json", help="what bench wrote before")
    parser.add_argument("after", metavar="B.json", help="what the same command wrote after")
    _add_output(parser)


def _add_plot(parser: Parser) -> None:
    parser.add_argument("files", metavar="FILE.json", nargs="+", help="what bench wrote")
    parser.add_argument(
        "--label",
        dest="labels",
        action="append",
        metavar="TEXT",
        help="what to call a file in the legend, once for each (default: its name)",
    )
    parser.add_argument("--title", metavar="TEXT", help="above the chart")
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="the picture to write: .png or .svg"
    )


def _add_model(parser: Parser, checkpoint: bool = True, default: str | None = None) -> None:
    """default: the checkpoint where none is named (None: random weights)."""
    group = parser.add_argument_group("model")
    synthetic = "random weights of this model's sizes: ouro-1.4b, ouro-2.6b or ouro-tiny"
    model = "a checkpoint's folder or its hub id instead"
    if default is None:
        synthetic += " (default: ouro-1.4b, on a CPU ouro-tiny)"
    else:
        model += f" (default: {default})"
    group.add_argument("--synthetic", metavar="NAME", help=synthetic)
    if checkpoint:
        group.add_argument("--model", help=model)
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="weights and activations (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    group.add_argument("--device", help="where to run: cpu, gpu, gpu:1, ... (default: JAX's)")
    if checkpoint:
        text = "run fewer loops than the model has, prompts included"
        group.add_argument("--total-ut-steps", type=int, metavar="INT", help=text)


def _add_engine(
    parser: Parser,
    left_out: set[tuple[type, str]] = frozenset(),
    exits: bool = True,
    defaults: Mapping[type, Mapping[str, Any]] | None = None,
    model: str | None = None,
) -> None:
    """The model, and a flag for every config field but those left out (--help-all). defaults: of
    fields, in place of the config's own. model: the default one, as for _add_model."""
    _add_model(parser, default=model)
    for config, title in _TITLES.items():
        if config is ExitConfig and not exits:
            continue
        names = [field.name for field in dataclasses.fields(config)]
        names = [name for name in names if (config, name) not in left_out]
        own = (defaults or {}).get(config)
        parser.advanced += add_config_flags(parser, config, title, names, own)


def _add_output(parser: Parser, roofline: bool = False) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--output", metavar="FILE", help="write everything as JSON")
    if roofline:
        group.add_argument(
            "--no-roofline",
            dest="roofline",
            action="store_false",
            help="do not measure what the device can do; limits come from what is known of it",
        )


def _integer(group: Any, flag: str, help: str, default: int | None = None) -> None:
    group.add_argument(flag, type=int, metavar="INT", default=default, help=help)


def _integers(
    group: Any, flag: str, help: str, shown: str | None, default: list[int] | None = None
) -> None:
    text = help if shown is None else f"{help} (default: {shown})"
    group.add_argument(flag, type=integers, metavar="INT[,INT...]", default=default, help=text)


def _names(
    group: Any,
    flag: str,
    choices: Sequence[str],
    help: str,
    shown: str,
    default: list[str] | None = None,
) -> None:
    def names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in choices:
                rule = f"invalid choice: {name!r} (choose from {', '.join(choices)})"
                raise argparse.ArgumentTypeError(rule)
        return text.split(",")

    text = f"{help}: {', '.join(choices)} (default: {shown})"
    group.add_argument(flag, type=names, metavar="NAME[,NAME...]", default=default, help=text)
