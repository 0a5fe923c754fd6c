"""bench compare: two documents of one command, row by row."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rlt_jax.bench.report import is_figure, number, read

# By command: what makes two rows the same case, and the figures whose ratios are told.
_SAME = {
    "roofline": (("what",), ("rate",)),
    "decode": (
        ("batch", "context", "depth", "mixed_depths", "layout", "kernels"),
        ("ms_per_step", "tokens_per_s", "ms_per_loop", "fraction", "peak_bytes"),
    ),
    "prefill": (
        ("requests", "prompt", "layout", "kernels"),
        ("seconds", "tokens_per_s", "fraction", "peak_bytes"),
    ),
    "kernels": (("kernel", "case", "kernels"), ("microseconds", "fraction")),
    "throughput": (
        ("requests", "prompt", "output_tokens", "closed_loop", "mixed_depths", "layout", "kernels"),
        (
            "tokens_per_s",
            "ttft_mean",
            "ttft_p50",
            "ttft_p99",
            "tpot_mean",
            "tpot_p99",
            "peak_bytes",
        ),
    ),
    "replay": (
        ("recording", "requests", "width", "mode", "in_flight", "layout", "kernels"),
        ("tokens_per_s", "ideal_tokens_per_s", "fraction", "occupancy", "peak_bytes"),
    ),
}
# A field with one value in each file does not tell rows apart: its values can be compared.
_CHOICES = ("layout", "kernels", "depth", "mixed_depths", "closed_loop")


@dataclasses.dataclass(frozen=True)
class CompareRow:
    """case: what the rows are of; "x -> y" where the files differ. ratios: the second file's
    figure divided by the first's (None where either has none)."""

    case: dict[str, Any]
    before: dict[str, float | None]
    after: dict[str, float | None]
    ratios: dict[str, float | None]


def compare(before: str, after: str) -> tuple[str, list[CompareRow]]:
    """The command, and a row for every case that both files hold.

    Raises ValueError naming the file and the rule.
    """
    documents = [read(before), read(after)]
    command, other = (document.get("command") for document in documents)
    if not isinstance(command, str) or command not in _SAME:
        raise ValueError(f"{before}: command = {command!r}: must be one of {', '.join(_SAME)}")
    if other != command:
        raise ValueError(f"{after}: command = {other!r}: must be {command!r}, that of {before}")
    fields, figures = _SAME[command]
    tables = [document["rows"] for document in documents]
    for path, rows in zip((before, after), tables):
        for row in rows:
            _check(path, row, command, fields, figures)
    apart = [f for f in fields if f not in _CHOICES or any(_varies(t, f) for t in tables)]
    second = {_key(row, apart): row for row in tables[1]}
    rows = [
        _row(row, second[_key(row, apart)], fields, figures)
        for row in tables[0]
        if _key(row, apart) in second
    ]
    if not rows:
        raise ValueError(f"{after}: no row has the same {', '.join(apart)} as one of {before}")
    return command, rows


def _check(path: str, row: Any, command: str, fields: Sequence[str], figures: Sequence[str]):
    if not isinstance(row, dict):
        raise ValueError(f"{path}: a row = {row!r}: must be an object, as {command} rows are")
    for field in (*fields, *figures):
        if field not in row:
            raise ValueError(f"{path}: a row has no {field}: every {command} row has it")
    for figure in figures:
        if row[figure] is not None and not is_figure(row[figure]):
            raise ValueError(f"{path}: {figure} = {row[figure]!r}: must be a finite number or null")


def _varies(rows: Sequence[dict[str, Any]], field: str) -> bool:
    return len({str(row[field]) for row in rows}) > 1


def _key(row: dict[str, Any], fields: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(row[field]) for field in fields)


def _row(before: dict, after: dict, fields: Sequence[str], figures: Sequence[str]) -> CompareRow:
    return CompareRow(
        case={field: _case(before[field], after[field]) for field in fields},
        before={name: before[name] for name in figures},
        after={name: after[name] for name in figures},
        ratios={name: _ratio(before[name], after[name]) for name in figures},
    )


def _case(before: Any, after: Any) -> Any:
    return before if before == after else f"{before} -> {after}"


def _ratio(before: float | None, after: float | None) -> float | None:
    return after / before if before and after is not None else None


def columns(rows: Sequence[CompareRow]) -> list[str]:
    return ["case", *rows[0].ratios]


def table(rows: Sequence[CompareRow]) -> list[list[str]]:
    def case(row: CompareRow) -> str:
        named = {name: value for name, value in row.case.items() if value not in (None, [], False)}
        return ", ".join(f"{name} {value}" for name, value in named.items())

    return [[case(row), *(number(r, 3) for r in row.ratios.values())] for row in rows]
