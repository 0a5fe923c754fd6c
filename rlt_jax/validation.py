"""Checks shared by every config dataclass: each error names the field, the value and the rule."""

import contextlib
import dataclasses
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable
from pathlib import Path


def option(default, help: str, **metadata):
    """A dataclass field with a default and the one-line help that the command line shows."""
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


def fail(field: str, value: object, rule: str) -> None:
    """Raises the ValueError; a long value is shown shortened."""
    try:
        shown = repr(value)
        shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    except ValueError:  # Python refuses to write out integers of thousands of digits
        shown = f"an integer of {value.bit_length()} bits"
    raise ValueError(f"{field} = {shown}: {rule}")


def plain_number(value: object) -> object:
    """NumPy's and other libraries' numbers as Python's own, arrays of rank 0 included; anything
    else as it is."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        with contextlib.suppress(TypeError):
            return operator.index(value) if getattr(value, "ndim", None) == 0 else value
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def plain_numbers(config: object) -> None:
    """plain_number for every field of a frozen dataclass."""
    for field in dataclasses.fields(config):
        object.__setattr__(config, field.name, plain_number(getattr(config, field.name)))


def check_int(
    field: str,
    value: object,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    optional: bool = False,
) -> None:
    """Refuses anything but a true int (bool is not one) within [minimum, maximum]."""
    if value is None and optional:
        return
    rule = "must be an integer"
    if minimum is not None:
        rule += f" >= {minimum}"
    if maximum is not None:
        rule += f"{' and' if minimum is not None else ''} <= {maximum}"
    if optional:
        rule += " or None"
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or (minimum is not None and value < minimum)
        or (maximum is not None and value > maximum)
    ):
        fail(field, value, rule)


def check_float(field: str, value: object, rule: str, holds: Callable[[float], bool]) -> None:
    """Refuses anything but a finite int or float for which `holds` is true."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or abs(value) > 1e308 or not math.isfinite(value) or not holds(value):
        fail(field, value, f"must be a finite number {rule}")


def check_bool(field: str, value: object) -> None:
    if not isinstance(value, bool):
        fail(field, value, "must be True or False")


def check_choice(field: str, value: object, choices: Iterable[str]) -> None:
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        fail(field, value, "must be one of " + ", ".join(repr(choice) for choice in choices))


def check_path(field: str, value: object, rule: str) -> None:
    """Refuses what can be no file's name."""
    name = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name or "\0" in name:
        fail(field, value, rule)


def check_picture(field: str, path: str) -> None:
    """Refuses what matplotlib is not asked to write here, or could not."""
    if Path(path).suffix not in (".png", ".svg"):
        fail(field, path, "must end in .png or .svg")
    if not Path(path).absolute().parent.is_dir():
        fail(field, path, "must be in a folder that exists")
