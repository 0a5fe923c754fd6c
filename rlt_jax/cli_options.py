"""Command-line flags made from the config dataclasses, and the dataclasses made from flags."""

import argparse
import dataclasses
import json
import shutil
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rlt_jax.config import DTYPES, CacheConfig, ExecutionConfig, ExitConfig, SchedulerConfig
from rlt_jax.packaged_model import NAME as PACKAGED_MODEL
from rlt_jax.sampling_params import SamplingParams

Config = TypeVar("Config")

# LLM's keyword for each config that an engine takes.
ENGINE_CONFIGS = {
    "cache_config": CacheConfig,
    "scheduler_config": SchedulerConfig,
    "exit_config": ExitConfig,
    "execution_config": ExecutionConfig,
}
_TITLES = {
    CacheConfig: "KV cache",
    SchedulerConfig: "scheduler",
    ExitConfig: "exit policy",
    ExecutionConfig: "execution",
}
_DEPTH_FIELDS = ("exit_threshold", "min_loops", "max_loops")

# Fields whose own name is another class's flag.
_FLAG_NAMES = {(ExitConfig, "mode"): "--exit-mode", (ExitConfig, "seed"): "--lookahead-seed"}


class Parser(argparse.ArgumentParser):
    """Flags are never abbreviated; a wrong one is one line on stderr and exit status 2.

    --help leaves out the flags in `advanced`; --help-all, where there are any, shows them.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, allow_abbrev=False, add_help=False, **kwargs)
        self.advanced: list[argparse.Action] = []

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"rlt-jax: error: {message}\n")

    def add_general_flags(self):
        """Adds the last group (--help and, where it shows more, --help-all) and returns it."""
        group = self.add_argument_group("general")
        group.add_argument("-h", "--help", action="help", help="show this help and exit")
        if self.advanced:
            text = "the same with the options of cache, scheduler, exit policy and execution"
            group.add_argument("--help-all", action=_HelpAll, help=text)
        return group

    def format_help(self, everything: bool = False) -> str:
        texts = [action.help for action in self.advanced]
        try:
            for action in self.advanced:
                action.help = action.help if everything else argparse.SUPPRESS
            # argparse gives the list of commands a line with their metavar.
            return super().format_help().replace("\n  COMMAND\n", "\n")
        finally:
            for action, text in zip(self.advanced, texts):
                action.help = text


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str):
        width = min(shutil.get_terminal_size().columns, 100)
        super().__init__(prog, max_help_position=32, width=width)


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: Parser, *_: object) -> None:
        print(parser.format_help(everything=True), end="")
        parser.exit()


def flag_name(config: type, field: str) -> str:
    """The flag that sets a config's field."""
    return _FLAG_NAMES.get((config, field), "--" + field.replace("_", "-"))


def add_config_flags(
    parser: argparse.ArgumentParser,
    config: type,
    title: str,
    fields: Sequence[str],
    defaults: Mapping[str, str] | None = None,
) -> list[argparse.Action]:
    """A group with a flag for each of the fields, with the help, choices and default it has.

    defaults: what to say of a field's default instead.
    """
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(config)
    described = {field.name: field for field in dataclasses.fields(config)}
    actions = []
    for name in fields:
        field = described[name]
        default = (defaults or {}).get(name, field.default)
        text = field.metadata["help"].replace("(None: ", "(default: ")
        if default is not None and default is not False and default != ():
            text = f"{text[:-1]}; " if text.endswith(")") else f"{text} ("
            text += f"default: {default})"
        actions.append(
            group.add_argument(
                flag_name(config, name),
                dest=_destination(config, name),
                default=argparse.SUPPRESS,  # only the flags that were given reach the config
                help=text.replace("%", "%%"),
                **_argument(name, hints[name], field.metadata.get("choices")),
            )
        )
    return actions


def config_from_flags(
    config: type[Config], arguments: argparse.Namespace, **defaults: Any
) -> Config:
    """The config that the flags given describe; raises its own ValueErrors.

    defaults: of fields whose flags were not given, instead of the config's own.
    """
    values = dict(defaults)
    for field in dataclasses.fields(config):
        destination = _destination(config, field.name)
        if destination in arguments:
            values[field.name] = getattr(arguments, destination)
    return config(**values)


def was_given(config: type, field: str, arguments: argparse.Namespace) -> bool:
    """Whether the field's flag was on the command line."""
    return _destination(config, field) in arguments


def add_engine_flags(parser: Parser, positional: bool = False) -> None:
    """Everything that LLM takes: the model, how to run it, and the four configs (--help-all).

    positional: the model needs no --model before it.
    """
    model = parser.add_argument_group("model")
    model.add_argument(
        *(["model"] if positional else ["--model"]),
        **({"nargs": "?", "metavar": "MODEL"} if positional else {}),
        default=PACKAGED_MODEL,
        help=f"a checkpoint's folder, its hub id, or {PACKAGED_MODEL} (the default), which is"
        " installed with rlt-jax",
    )
    model.add_argument("--tokenizer", metavar="FOLDER", help="another tokenizer (or its hub id)")
    model.add_argument(
        "--dtype",
        choices=DTYPES,
        help="weights and activations (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    model.add_argument("--device", help="where to run: cpu, gpu, gpu:1, ... (default: JAX's)")
    model.add_argument(
        "--total-ut-steps",
        type=int,
        metavar="INT",
        help="run fewer loops than the model has, prompts included",
    )
    for config in ENGINE_CONFIGS.values():
        fields = [field.name for field in dataclasses.fields(config)]
        parser.advanced += add_config_flags(parser, config, _TITLES[config], fields)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """LLM's arguments from the flags of add_engine_flags."""
    options = {
        name: getattr(arguments, name)
        for name in ("model", "tokenizer", "dtype", "device", "total_ut_steps")
    }
    for name, config in ENGINE_CONFIGS.items():
        options[name] = config_from_flags(config, arguments)
    return options


def add_sampling_flags(parser: Parser, defaults: Mapping[str, str] | None = None) -> None:
    """SamplingParams: first how deep, then how sampled. defaults: as for add_config_flags."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    others = [name for name in names if name not in _DEPTH_FIELDS]
    add_config_flags(parser, SamplingParams, "exit depth", _DEPTH_FIELDS, defaults)
    add_config_flags(parser, SamplingParams, "sampling", others, defaults)


def integers(text: str) -> list[int]:
    """ "1,2,3" -> [1, 2, 3]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"invalid value {text!r}: must be integers with commas between"
        ) from None


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, written out or as the path of a file that holds it."""
    source = "the value"
    if not text.lstrip().startswith(("{", "[")):
        source = text
        text = read_text(text)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{source} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{source} must hold a JSON object")
    return value


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"{path}: cannot be read: {reason}") from None


def _destination(config: type, field: str) -> str:
    return f"{config.__name__}.{field}"


def _argument(name: str, hint: Any, choices: tuple[str, ...] | None) -> dict[str, Any]:
    """How argparse must read a field of this name and type."""
    if isinstance(hint, types.UnionType):  # X | None: leaving the flag out is None
        (hint,) = set(typing.get_args(hint)) - {types.NoneType}
    origin = typing.get_origin(hint) or hint
    if origin is bool:
        return {"action": argparse.BooleanOptionalAction}
    if choices:
        return {"type": origin, "choices": choices}
    if origin in (int, float, str):
        metavar = "DIR" if name.endswith("_dir") else origin.__name__.upper()
        return {"type": origin, "metavar": metavar}
    if origin is tuple:
        return {"type": integers, "action": "extend", "metavar": "INT[,INT...]"}
    if origin is Mapping:
        return {"type": json_object, "metavar": "JSON|FILE"}
    raise TypeError(f"no flag can be made for a field of type {hint}")
