"""bench plot: the fraction of the limit by batch, throughput or the fraction of the ideal by
concurrency."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlt_jax.bench.report import is_figure, read
from rlt_jax.validation import check_picture, fail


@dataclasses.dataclass(frozen=True)
class _Chart:
    """x, y: fields of the rows, and what to call them. apart: fields that make separate lines."""

    x: str
    y: str
    x_label: str
    y_label: str
    apart: tuple[str, ...]


_CHARTS = {
    "decode": _Chart(
        "batch",
        "fraction",
        "batch (rows)",
        "fraction of the limit",
        ("context", "depth", "mixed_depths", "layout", "kernels"),
    ),
    "throughput": _Chart(
        "requests",
        "tokens_per_s",
        "concurrent requests",
        "output tokens/s",
        ("prompt", "output_tokens", "closed_loop", "mixed_depths", "layout", "kernels"),
    ),
    "replay": _Chart(
        "width",
        "fraction",
        "requests at once",
        "fraction of the ideal",
        ("recording", "mode", "in_flight", "layout", "kernels"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Line:
    label: str
    points: tuple[tuple[float, float], ...]


def plot(
    files: Sequence[str],
    picture: str,
    labels: Sequence[str] | None = None,
    title: str | None = None,
) -> None:
    """Draws all files, of one command, in one chart. Raises ValueError naming file and rule."""
    check_picture("--output", picture)
    if labels is not None and len(labels) != len(files):
        fail("--label", list(labels), f"must be given once for each of the {len(files)} files")
    command, lines = read_lines(files, labels or [Path(file).stem for file in files])
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("bench plot needs matplotlib: pip install 'rlt-jax[bench]'") from None
    chart = _CHARTS[command]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel=chart.x_label, ylabel=chart.y_label)
    for line, marker in zip(lines, "os^Dv<>pP*hX" * len(lines)):
        axes.plot(*zip(*line.points), f"{marker}-", label=line.label)
    axes.set_xscale("log", base=2)
    ticks = sorted({x for line in lines for x, _ in line.points})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    highest = max(y for line in lines for _, y in line.points)
    axes.set_ylim(0, 1 if chart.y == "fraction" and highest <= 1 else 1.08 * highest)
    axes.grid(alpha=0.3)
    axes.legend()
    if title:
        axes.set_title(title)
    figure.savefig(picture, dpi=150)


def read_lines(files: Sequence[str], labels: Sequence[str]) -> tuple[str, list[Line]]:
    """The files' command, and a line for every set of rows that differ in x alone."""
    documents = [read(file) for file in files]
    command = documents[0].get("command")
    lines = []
    for file, label, document in zip(files, labels, documents):
        other = document.get("command")
        if not isinstance(other, str) or other not in _CHARTS:
            raise ValueError(f"{file}: command = {other!r}: must be one of {', '.join(_CHARTS)}")
        if other != command:
            raise ValueError(f"{file}: command = {other!r}: must be {command!r}, as {files[0]}'s")
        lines += _lines(file, label, document["rows"], _CHARTS[command])
    return command, lines


def _lines(file: str, label: str, rows: Sequence[dict[str, Any]], chart: _Chart) -> list[Line]:
    points: dict[tuple, list[tuple[float, float]]] = {}
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{file}: a row = {row!r}: must be an object")
        for field in (chart.x, chart.y, *chart.apart):
            if field not in row:
                raise ValueError(f"{file}: a row has no {field}: it cannot be drawn")
        if row[chart.y] is None:
            raise ValueError(f"{file}: {chart.y} = None: it was measured without a roofline")
        for field in (chart.x, chart.y):
            if not is_figure(row[field]):
                raise ValueError(f"{file}: {field} = {row[field]!r}: must be a finite number")
        key = tuple(_shown(row[field]) for field in chart.apart)
        points.setdefault(key, []).append((row[chart.x], row[chart.y]))
    if not points:
        raise ValueError(f"{file}: it has no rows: there is nothing to draw")
    differ = [i for i in range(len(chart.apart)) if len({key[i] for key in points}) > 1]
    return [
        Line(
            ", ".join([label, *(f"{chart.apart[i]} {key[i]}" for i in differ)]),
            tuple(sorted(line)),
        )
        for key, line in points.items()
    ]


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
