"""rlt-jax trace view: a recorded run as a picture, requests down, device steps or time across."""

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlt_jax.engine.types import Stage
from rlt_jax.run_trace import RunTrace, TracedBatch, TracedRow, read_trace
from rlt_jax.terminal import depth_style
from rlt_jax.validation import check_float, check_int, check_picture

_PREFILL, _CODA, _LOST, _IDLE, _LIFE = "#f2c14e", "#7d8998", "#ffffff", "#d8dbdf", "#c3c8ce"
_VAIN, _SAVE, _RESTORE = "#f4f5f6", "#e08e79", "#8fbf9f"
# Hatched: edge colours.
_HATCHED = {"lost": "#c0392b", "vain": "#9aa3ad"}
_DETAILED = 5000  # with more cells than this, an SVG holds them as one image
_NUMBERED = 1500  # and with more than this they have no numbers


@dataclasses.dataclass(frozen=True)
class Span:
    """Where a batch lies on the x axis."""

    batch: TracedBatch
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Cell:
    """A part of a row's place in the picture: prompt tokens, one loop, or the coda alone (kind:
    "prefill", "chunk": one loop of prompt tokens, "loop", "vain": a loop of a token that had left,
    "coda", "save" and "restore": its pages, "lost"). line: of the `lines` below each other that its
    request needs in the batch."""

    kind: str
    depth: int
    start: float
    end: float
    y: int
    text: str = ""
    line: int = 0
    lines: int = 1


def draw_trace(
    path: str,
    picture: str,
    *,
    first: int | None = None,
    last: int | None = None,
    time: bool = False,
    width: float | None = None,
) -> None:
    """Draws the batches from `first` to `last` (their numbers; None: all). time: the x axis shows
    when they ran, else one column for each. width: inches. Raises ValueError naming what and rule.
    """
    check_picture("--output", picture)
    if width is not None:
        check_float("--width", width, "> 2 and <= 200", lambda x: 2 < x <= 200)
    trace = read_trace(path)
    batches = choose(path, trace.batches, first, last)
    spans = list(over_time(batches) if time else over_steps(batches))
    if not spans:
        raise ValueError(f"{path}: none of these batches reached the device: --time shows nothing")
    try:
        import matplotlib
    except ImportError:
        raise ImportError("trace view needs matplotlib: pip install 'rlt-jax[bench]'") from None
    # Text stays text, and the same trace gives the same file.
    style = {"svg.fonttype": "none", "svg.hashsalt": "rlt-jax", "text.parse_math": False}
    with matplotlib.rc_context(style):
        figure = _figure(trace, spans, time, width)
        metadata = {"Date": None} if picture.endswith(".svg") else None
        figure.savefig(picture, dpi=150, metadata=metadata)


def choose(
    path: str, batches: Sequence[TracedBatch], first: int | None, last: int | None
) -> list[TracedBatch]:
    """The batches whose numbers are in [first, last]."""
    if not batches:
        raise ValueError(f"{path}: it has no batches: there is nothing to draw")
    low, high = batches[0].sequence, batches[-1].sequence
    check_int("--first", first, minimum=low, maximum=high, optional=True)
    check_int("--last", last, minimum=low if first is None else first, optional=True)
    chosen = [
        b for b in batches if (first or low) <= b.sequence <= (high if last is None else last)
    ]
    if not chosen:
        raise ValueError(f"{path}: it has no batch from {first or low} to {last}")
    return chosen


def over_steps(batches: Sequence[TracedBatch]) -> Iterator[Span]:
    for batch in batches:
        yield Span(batch, batch.sequence - 0.5, batch.sequence + 0.5)


def over_time(batches: Sequence[TracedBatch]) -> Iterator[Span]:
    """From when it was submitted, or the batch before was done, to when it was collected."""
    done = 0.0
    for batch in batches:
        if batch.submitted is not None and batch.collected is not None:
            yield Span(batch, max(batch.submitted, done), batch.collected)
            done = batch.collected


def idle_gaps(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """When nothing was in flight, between the first batch and the last."""
    pairs = itertools.pairwise(spans)
    return [(one.end, other.start) for one, other in pairs if one.end < other.start]


Exits = dict[tuple[int, int], int]  # (generation, position) of a token -> where it left


def exits_of(batches: Sequence[TracedBatch]) -> Exits:
    return {
        (row.generation, row.position): row.exit_depth
        for batch in batches
        if batch.stage is not Stage.TOKENS
        for row in batch.rows
        if row.exit_depth
    }


def cells_of(span: Span, row: TracedRow, y: int, full_depth: int, exits: Exits) -> Iterator[Cell]:
    """What a row does in its batch, from left to right."""
    batch, start, end = span.batch, span.start, span.end
    if batch.collected is None:
        yield Cell("lost", 0, start, end, y)
    elif batch.stage is Stage.SAVE or batch.stage is Stage.RESTORE:
        yield Cell(batch.stage.value, 0, start, end, y)
    elif batch.stage is Stage.PREFILL:
        yield Cell("prefill", 0, start, end, y, str(row.tokens))
    elif row.tokens:
        depths = range(row.depth, row.depth + batch.num_loops)
        yield from _loops("chunk", depths, start, end, y)
    elif batch.stage is Stage.TOKENS:
        depths = [*range(1, full_depth + 1)] * row.num_tokens
        yield from _loops("loop", depths, start, end, y)
    elif row.depth:
        position = row.position + (row.exit_depth > 0)
        in_vain = row.depth > exits.get((row.generation, position), row.depth)
        kind, depth = ("vain", 0) if in_vain else ("loop", row.depth)
        yield Cell(kind, depth, start, end, y, str(row.depth))
    else:
        yield Cell("coda", 0, start, end, y)


def _loops(kind: str, depths: Sequence[int], start: float, end: float, y: int) -> Iterator[Cell]:
    """One after the other."""
    width = (end - start) / len(depths)
    for i, depth in enumerate(depths):
        yield Cell(kind, depth, start + i * width, start + (i + 1) * width, y, str(depth))


def cells_in(
    span: Span, places: Mapping[int, int], full_depth: int, exits: Exits
) -> Iterator[Cell]:
    """The cells of all rows of a batch. places: each request's y, by generation. The chunks of one
    prompt lie below each other, the first of them on top."""
    rows = span.batch.rows
    lines, line = Counter(row.generation for row in rows), Counter()
    for row in rows:
        one = row.generation
        for cell in cells_of(span, row, places[one], full_depth, exits):
            yield dataclasses.replace(cell, line=line[one], lines=lines[one])
        line[one] += 1


def token_marks(span: Span, row: TracedRow) -> list[float]:
    """Where on the x axis a row's tokens come out."""
    if not row.exit_depth or span.batch.collected is None:
        return []
    if span.batch.stage is Stage.TOKENS:
        width = (span.end - span.start) / row.num_tokens
        return [span.start + (i + 1) * width for i in range(row.num_tokens)]
    return [span.start if row.depth else (span.start + span.end) / 2]


def _figure(trace: RunTrace, spans: Sequence[Span], time: bool, width: float | None) -> Any:
    from matplotlib.figure import Figure

    deepest = max(row.depth for span in spans for row in span.batch.rows)
    full_depth = max((trace.header.get("model_config") or {}).get("total_ut_steps") or 1, deepest)
    requests = list(
        dict.fromkeys((row.generation, row.request) for span in spans for row in span.batch.rows)
    )
    places = {generation: y for y, (generation, _) in enumerate(requests)}
    exits = exits_of(trace.batches)
    cells = [cell for span in spans for cell in cells_in(span, places, full_depth, exits)]
    marks = [
        (x, places[row.generation])
        for span in spans
        for row in span.batch.rows
        for x in token_marks(span, row)
    ]
    if width is None:
        width = 13 if time else min(max(2.5 + 0.22 * len(spans), 8), 24)
    lines = max(cell.lines for cell in cells)
    height = min(max(max(0.24, 0.13 * lines) * len(requests), 1), 12)
    figure = Figure(figsize=(width, height + 2.6), layout="constrained")
    main, load = figure.subplots(
        2, sharex=True, height_ratios=[height, 1], gridspec_kw={"hspace": 0.02}
    )
    depths = range(1, full_depth + 1)
    colours = {("loop", depth): depth_style(depth, full_depth).color.name for depth in depths}
    colours |= {("chunk", depth): _lighter(colours["loop", depth]) for depth in depths}
    colours |= {
        ("prefill", 0): _PREFILL,
        ("coda", 0): _CODA,
        ("save", 0): _SAVE,
        ("restore", 0): _RESTORE,
        ("lost", 0): _LOST,
        ("vain", 0): _VAIN,
    }
    left = spans[0].start
    right = max(left + 1e-6, *(span.end for span in spans))  # also where no time passed
    inch = (width - 1.2) / (right - left)  # about, of one unit of x
    rasterized = len(cells) > _DETAILED
    _draw_lives(main, cells)
    _draw_cells(main, cells, colours, inch, height / len(requests), rasterized)
    column = sorted(span.end - span.start for span in spans)[len(spans) // 2] * inch
    _draw_marks(main, marks, min(height / len(requests), column, 0.2), rasterized)
    _draw_load(load, spans, full_depth, exits, colours, rasterized)
    if time:
        for start, end in idle_gaps(spans):
            for axes in (main, load):
                axes.axvspan(start, end, color=_IDLE, linewidth=0, zorder=0)

    main.set_xlim(left, right)
    main.set_ylim(len(requests) - 0.4, -0.6)
    every = -(-len(requests) // 60)
    main.set_yticks(range(0, len(requests), every), [_short(n) for _, n in requests[::every]])
    main.tick_params(axis="y", length=0, labelsize=8)
    main.tick_params(axis="x", length=0)
    if not time:
        main.xaxis.get_major_locator().set_params(integer=True)
    main.set_ylabel("request")
    load.set_ylabel("rows")
    load.set_xlabel("seconds since the trace was started" if time else "batch")
    for axes in (main, load):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(trace, spans, len(requests), time), fontsize=11)
    kinds = {(cell.kind, cell.depth) for cell in cells}
    _legend(figure, {key: c for key, c in colours.items() if key in kinds}, bool(marks), time)
    return figure


def _draw_lives(axes: Any, cells: Sequence[Cell]) -> None:
    """A thin line from a request's first cell to its last: where it waits, only that is seen."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for cell in cells:
        starts.setdefault(cell.y, cell.start)
        ends[cell.y] = cell.end
    axes.hlines(list(starts), list(starts.values()), list(ends.values()), _LIFE, linewidth=1)


def _draw_cells(
    axes: Any,
    cells: Sequence[Cell],
    colours: dict[tuple[str, int], str],
    inch: float,
    row_inches: float,
    rasterized: bool,
) -> None:
    from matplotlib.collections import PolyCollection

    half = 0.42 if row_inches > 0.1 else 0.5

    def edges(cell: Cell) -> tuple[float, float]:
        """Upper and lower."""
        line = 2 * half / cell.lines
        upper = cell.y - half + cell.line * line
        return upper, upper + line

    by_colour = defaultdict(list)
    for cell in cells:
        by_colour[cell.kind, cell.depth].append(cell)
    for key, same in by_colour.items():
        corners = [
            [(c.start, upper), (c.end, upper), (c.end, lower), (c.start, lower)]
            for c in same
            for upper, lower in [edges(c)]
        ]
        axes.add_collection(
            PolyCollection(
                corners,
                facecolor=colours[key],
                edgecolor=_HATCHED.get(key[0], "white"),
                linewidth=[min(0.8, 5 * (c.end - c.start) * inch) for c in same],
                hatch="////" if key[0] in _HATCHED else None,
                zorder=2,
                rasterized=rasterized,
            )
        )
    if len(cells) > _NUMBERED:
        return
    for cell in cells:
        size = min(0.55 * row_inches / cell.lines * 72, 8)
        wide = (cell.end - cell.start) * inch * 72 > 0.75 * size * len(cell.text)
        if wide and size >= 4.5:
            colour = "white" if cell.kind == "loop" else "#333333"
            place = ((cell.start + cell.end) / 2, sum(edges(cell)) / 2)
            axes.text(
                *place,
                cell.text,
                color=colour,
                fontsize=size,
                ha="center",
                va="center_baseline",
                zorder=3,
            )


def _draw_marks(
    axes: Any, marks: Sequence[tuple[float, float]], cell_inches: float, rasterized: bool
) -> None:
    if marks:
        size = max(0.22 * cell_inches * 72, 1.6) ** 2
        x, y = zip(*marks)
        style = {"color": "black", "edgecolor": "white", "linewidth": 0.4, "clip_on": False}
        axes.scatter(x, y, s=size, zorder=4, rasterized=rasterized, **style)


def _draw_load(
    axes: Any,
    spans: Sequence[Span],
    full_depth: int,
    exits: Exits,
    colours: dict[tuple[str, int], str],
    rasterized: bool,
) -> None:
    """How many rows each batch has, of which kind, and how many it was padded to."""
    bars = defaultdict(list)
    for span in spans:
        counts = defaultdict(float)
        for row in span.batch.rows:
            cells = list(cells_of(span, row, 0, full_depth, exits))
            for cell in cells:
                counts[cell.kind, cell.depth] += 1 / len(cells)
        bottom = 0.0
        for key in colours:
            if counts[key]:
                bars[key].append((span, counts[key], bottom))
                bottom += counts[key]
    for key, parts in bars.items():
        chosen, heights, bottoms = zip(*parts)
        axes.bar(
            [span.start for span in chosen],
            heights,
            [span.end - span.start for span in chosen],
            bottoms,
            align="edge",
            color=colours[key],
            rasterized=rasterized,
        )
    of_prompts = (Stage.PREFILL, Stage.MIXED)
    padded = [s for s in spans if s.batch.bucket and s.batch.stage not in of_prompts]
    sizes = [span.batch.bucket for span in padded]
    starts, ends = [span.start for span in padded], [span.end for span in padded]
    axes.hlines(sizes, starts, ends, "#555555", linewidth=1, rasterized=rasterized)
    axes.yaxis.get_major_locator().set_params(integer=True)


def _legend(figure: Any, colours: dict[tuple[str, int], str], marks: bool, time: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = {
        "loop": "loop {}",
        "chunk": "prompt, loop {}",
        "prefill": "prefill (prompt tokens)",
        "coda": "coda alone",
        "save": "pages to the host",
        "restore": "pages back",
        "lost": "no results",
        "vain": "loop run in vain",
    }
    handles = []
    for (kind, depth), colour in colours.items():
        edge, hatch = _HATCHED.get(kind), "////" if kind in _HATCHED else None
        label = names[kind].format(depth)
        handles.append(Patch(facecolor=colour, edgecolor=edge, hatch=hatch, label=label))
    if marks:
        dot = {"marker": "o", "linestyle": "none", "color": "black", "markersize": 4}
        handles.append(Line2D([], [], label="exit: a token comes out", **dot))
    handles.append(Line2D([], [], color="#555555", linewidth=1, label="rows padded to"))
    if time:
        handles.append(Patch(color=_IDLE, label="nothing in flight"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), int(figure.get_figwidth() / 1.3)),
        fontsize=8,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.4,
    )


def _title(trace: RunTrace, spans: Sequence[Span], requests: int, time: bool) -> str:
    model = _short(Path(str(trace.header.get("model", "an engine"))).name)
    mean = sum(len(span.batch.rows) for span in spans) / len(spans)
    numbers = f"{spans[0].batch.sequence} to {spans[-1].batch.sequence}"
    title = f"{model}: {requests} requests, batches {numbers}, {mean:.1f} rows in each"
    if time:
        seconds = spans[-1].end - spans[0].start
        idle = sum(end - start for start, end in idle_gaps(spans)) / max(seconds, 1e-9)
        title += f"; {seconds:,.3f} s, of it nothing in flight {100 * idle:.1f} %"
    return title


def _lighter(colour: str) -> str:
    """Half way to white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{(part + 255) // 2:02x}" for part in parts)


def _short(name: str) -> str:
    """Names are the user's: what cannot be drawn shows as a question mark."""
    name = "".join(c if c.isprintable() else "?" for c in name)
    return name if len(name) <= 16 else f"{name[:15]}…"
