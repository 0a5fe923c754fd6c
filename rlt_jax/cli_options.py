"""Command-line flags made from the config dataclasses, and the dataclasses made from flags."""

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rlt_jax.config import CacheConfig, ExecutionConfig, ExitConfig, SchedulerConfig
from rlt_jax.sampling_params import SamplingParams

Config = TypeVar("Config")

# LLM's keyword for each config that an engine takes.
ENGINE_CONFIGS = {
    "cache_config": CacheConfig,
    "scheduler_config": SchedulerConfig,
    "exit_config": ExitConfig,
    "execution_config": ExecutionConfig,
}

# Fields whose own name is another class's flag.
_FLAG_NAMES = {(ExitConfig, "mode"): "--exit-mode"}


class Parser(argparse.ArgumentParser):
    """Flags are never abbreviated; a wrong one is one line on stderr and exit status 2."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"rlt-jax: error: {message}\n")


def flag_name(config: type, field: str) -> str:
    """The flag that sets a config's field."""
    return _FLAG_NAMES.get((config, field), "--" + field.replace("_", "-"))


def add_config_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """One flag for each field, with the help, choices and default that the field has."""
    group = parser.add_argument_group(config.__name__, config.__doc__.splitlines()[0])
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        text = field.metadata["help"].replace("%", "%%")
        if field.default not in (None, ()):
            text += f" (default: {field.default})"
        group.add_argument(
            flag_name(config, field.name),
            dest=_destination(config, field.name),
            default=argparse.SUPPRESS,  # only the flags that were given reach the config
            help=text,
            **_argument(hints[field.name], field.metadata.get("choices")),
        )


def config_from_flags(config: type[Config], arguments: argparse.Namespace) -> Config:
    """The config that the flags given describe; raises its own ValueErrors."""
    values = {}
    for field in dataclasses.fields(config):
        destination = _destination(config, field.name)
        if destination in arguments:
            values[field.name] = getattr(arguments, destination)
    return config(**values)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Everything that LLM takes: the model, how to run it, and the four configs."""
    model = parser.add_argument_group("model")
    model.add_argument("--model", required=True, help="a checkpoint's folder, or its hub id")
    model.add_argument("--tokenizer", help="a folder or hub id of another tokenizer")
    model.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="weights, activations and KV (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    model.add_argument("--device", help="where to run: cpu, gpu, gpu:1, ... (default: JAX's)")
    model.add_argument(
        "--total-ut-steps", type=int, help="run fewer loops than the model has, prompts included"
    )
    for config in ENGINE_CONFIGS.values():
        add_config_flags(parser, config)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """LLM's arguments from the flags of add_engine_flags."""
    options = {
        name: getattr(arguments, name)
        for name in ("model", "tokenizer", "dtype", "device", "total_ut_steps")
    }
    for name, config in ENGINE_CONFIGS.items():
        options[name] = config_from_flags(config, arguments)
    return options


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser, SamplingParams)


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
    if not text.lstrip().startswith("{"):
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
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"{path}: cannot be read: {reason}") from None


def _destination(config: type, field: str) -> str:
    return f"{config.__name__}.{field}"


def _argument(hint: Any, choices: tuple[str, ...] | None) -> dict[str, Any]:
    """How argparse must read a field of this type."""
    if isinstance(hint, types.UnionType):  # X | None: leaving the flag out is None
        (hint,) = set(typing.get_args(hint)) - {types.NoneType}
    origin = typing.get_origin(hint) or hint
    if origin is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin in (int, float, str):
        return {
            "type": origin,
            **({"choices": choices} if choices else {"metavar": origin.__name__.upper()}),
        }
    if origin is tuple:
        return {"type": integers, "action": "extend", "metavar": "INT[,INT...]"}
    if origin is Mapping:
        return {"type": json_object, "metavar": "JSON|FILE"}
    raise TypeError(f"no flag can be made for a field of type {hint}")
