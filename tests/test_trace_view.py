"""What the picture of a recorded run shows: cells, marks, gaps; and what it refuses."""

import re
import sys
import xml.etree.ElementTree

import pytest

from rlt_jax import LLM
from rlt_jax.engine.types import Stage
from rlt_jax.run_trace import TracedBatch, TracedRow, TraceRecorder, read_trace
from rlt_jax.trace_view import (
    Span,
    cells_in,
    cells_of,
    choose,
    draw_trace,
    exits_of,
    idle_gaps,
    over_steps,
    over_time,
    token_marks,
)
from tests.tiny import ADAPTIVE, OPTIONS


def row(depth=0, exit_depth=0, tokens=0, num_tokens=1, generation=0):
    return TracedRow(f"request {generation}", generation, 5, depth, exit_depth, tokens, num_tokens)


def batch(
    sequence=1,
    stage=Stage.RECURRENT,
    submitted=0.0,
    collected=1.0,
    rows=(),
    error=None,
    num_loops=1,
):
    return TracedBatch(sequence, stage, 4, submitted, collected, error, tuple(rows), num_loops)


def write(path, batches, header=None):
    recorder = TraceRecorder(path, header or {})
    for one in batches:
        recorder._write(one)
    recorder.stop()
    return str(path)


@pytest.fixture(scope="module")
def recorded(checkpoint, tmp_path_factory):
    """The trace of a real run: five requests at most four at once, gated, then whole tokens."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    with LLM(checkpoint, **OPTIONS) as llm:
        llm.start_trace(path)
        llm.generate(["a", "bc", "def", "ghij", "k"], ADAPTIVE)
        llm.generate(["a"])
    return str(path)


PLACES = {
    "prefill": (Stage.PREFILL, row(4, tokens=7), [("prefill", 0, 0, 1, "7")], []),
    "a prompt's loop": (Stage.MIXED, row(2, tokens=7), [("chunk", 2, 0, 1, "2")], []),
    "a loop beside prompts": (Stage.MIXED, row(2), [("loop", 2, 0, 1, "2")], []),
    "loop": (Stage.RECURRENT, row(3), [("loop", 3, 0, 1, "3")], []),
    "exit, then a loop": (Stage.BOUNDARY, row(1, 3), [("loop", 1, 0, 1, "1")], [0]),
    "exit alone": (Stage.CODA, row(0, 3), [("coda", 0, 0, 1, "")], [0.5]),
    "a token": (
        Stage.TOKENS,
        row(2, 2),
        [("loop", 1, 0, 0.5, "1"), ("loop", 2, 0.5, 1, "2")],
        [1],
    ),
    "two tokens": (
        Stage.TOKENS,
        row(2, 2, num_tokens=2),
        [("loop", d, x, x + 0.25, str(d)) for d, x in ((1, 0), (2, 0.25), (1, 0.5), (2, 0.75))],
        [0.5, 1],
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_a_row_s_place_shows_what_it_ran_and_where_tokens_come_out(case):
    stage, one, cells, marks = PLACES[case]
    span = Span(batch(stage=stage), 0.0, 1.0)
    found = list(cells_of(span, one, y=3, full_depth=2, exits={}))
    assert [(c.kind, c.depth, c.start, c.end, c.text) for c in found] == cells
    assert {cell.y for cell in found} == {3}
    assert token_marks(span, one) == marks


def test_several_loops_of_a_prompt_lie_one_after_the_other():
    span = Span(batch(stage=Stage.MIXED, num_loops=2), 0.0, 1.0)
    found = list(cells_of(span, row(3, tokens=7), 0, 4, {}))
    assert [(c.kind, c.depth, c.start, c.end) for c in found] == [
        ("chunk", 3, 0, 0.5),
        ("chunk", 4, 0.5, 1),
    ]


def test_decode_rows_and_the_chunks_of_a_prompt_share_a_column():
    """Chunks below each other, the first and deepest one on top."""
    rows = [row(3), *(row(depth, tokens=4, generation=1) for depth in (3, 2, 1))]
    span = Span(batch(stage=Stage.MIXED, rows=rows), 0.0, 1.0)
    found = list(cells_in(span, {0: 0, 1: 1}, 4, {}))
    assert {(cell.start, cell.end) for cell in found} == {(0, 1)}
    assert [(c.kind, c.depth, c.y, c.line, c.lines) for c in found] == [
        ("loop", 3, 0, 0, 1),
        ("chunk", 3, 1, 0, 3),
        ("chunk", 2, 1, 1, 3),
        ("chunk", 1, 1, 2, 3),
    ]


def test_a_loop_after_its_token_had_left_is_shown_as_run_in_vain():
    loops, leaves = [row(depth) for depth in (1, 2, 3)], row(0, exit_depth=2)
    batches = [batch(i, rows=[one]) for i, one in enumerate([*loops, leaves])]
    exits = exits_of(batches)
    kinds = [
        cell.kind
        for one in loops
        for cell in cells_of(Span(batches[0], 0.0, 1.0), one, 0, 4, exits)
    ]
    assert kinds == ["loop", "loop", "vain"]


def test_a_batch_without_results_is_shown_as_such():
    span = Span(batch(collected=None, error="gone"), 0.0, 1.0)
    assert [cell.kind for cell in cells_of(span, row(3, 2), 0, 4, {})] == ["lost"]
    assert token_marks(span, row(3, 2)) == []


def test_over_time_a_batch_begins_when_the_one_before_is_done():
    batches = [
        batch(1, submitted=0.0, collected=1.0),
        batch(2, submitted=0.5, collected=2.0),
        batch(3, submitted=2.0, collected=None),
        batch(4, submitted=None, collected=None),
        batch(5, submitted=2.5, collected=3.0),
    ]
    spans = list(over_time(batches))
    assert [(s.batch.sequence, s.start, s.end) for s in spans] == [
        (1, 0, 1),
        (2, 1, 2),
        (5, 2.5, 3),
    ]
    assert idle_gaps(spans) == [(2, 2.5)]
    assert idle_gaps(list(over_steps(batches))) == []


@pytest.mark.parametrize("time", [False, True])
@pytest.mark.parametrize("suffix, start", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_real_run_can_be_drawn(recorded, tmp_path, suffix, start, time):
    picture = tmp_path / f"run.{suffix}"
    draw_trace(recorded, str(picture), time=time)
    assert picture.read_bytes().startswith(start)


def texts(picture):
    root = xml.etree.ElementTree.parse(picture).getroot()
    return [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_title_legend_and_axes_tell_what_is_seen(recorded, tmp_path):
    steps, time = str(tmp_path / "steps.svg"), str(tmp_path / "time.svg")
    draw_trace(recorded, steps)
    draw_trace(recorded, time, time=True)
    found = texts(steps)
    count = len(read_trace(recorded).batches)
    assert any(re.fullmatch(rf"tiny: 6 requests, batches 1 to {count}, .* each", t) for t in found)
    wanted = {"request", "rows", "batch", "loop 1", "loop 4", "coda alone", "rows padded to"}
    assert wanted | {"prefill (prompt tokens)", "exit: a token comes out"} <= set(found)
    assert "nothing in flight" not in found
    found = texts(time)
    assert any(re.search(r"s, of it nothing in flight \d+\.\d %$", t) for t in found)
    assert {"nothing in flight", "seconds since the trace was started"} <= set(found)


def test_a_mixed_batch_shows_loops_of_prompts_and_no_padded_rows(tmp_path):
    prompts = [row(depth, tokens=4, generation=1) for depth in (2, 1)]
    path = write(tmp_path / "run.jsonl", [batch(stage=Stage.MIXED, rows=[row(3), *prompts])])
    draw_trace(path, str(tmp_path / "x.svg"), width=4)
    found = texts(tmp_path / "x.svg")
    assert {"loop 3", "prompt, loop 1", "prompt, loop 2", "1", "2", "3"} <= set(found)
    drawn = re.findall("#555555", (tmp_path / "x.svg").read_text())
    assert len(drawn) == 1  # the legend's: the bucket is of prompt tokens


def test_the_same_trace_gives_the_same_file(recorded, tmp_path):
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in pictures:
        draw_trace(recorded, str(picture), first=3, last=9, width=5)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_many_requests_and_lost_batches_can_be_drawn(tmp_path):
    batches = [
        batch(
            i,
            submitted=float(i),
            collected=None if i == 7 else i + 0.5,
            error="gone" if i == 7 else None,
            rows=[row(1 + (i + g) % 4, generation=g + i) for g in range(90)],
        )
        for i in range(1, 61)
    ]
    path = write(tmp_path / "run.jsonl", batches)
    draw_trace(path, str(tmp_path / "many.svg"))
    found = texts(tmp_path / "many.svg")
    assert "no results" in found
    assert sum(text.startswith("request ") for text in found) <= 61
    assert (tmp_path / "many.svg").stat().st_size < 1_000_000


def test_any_request_id_and_batches_that_took_no_time_can_be_drawn(tmp_path):
    names = ["$x^$", "\ud800", "two\nlines", "\x1b[0m"]
    rows = [TracedRow(name, i, 5, 9, 0, 0, 1) for i, name in enumerate(names)]
    header = {"model": "$^$", "model_config": {"total_ut_steps": 4}}  # less than a row's depth
    path = write(tmp_path / "run.jsonl", [batch(submitted=1.0, rows=rows)], header)
    for time in (False, True):
        draw_trace(path, str(tmp_path / "x.svg"), time=time)
        assert {"$x^$", "?", "two?lines", "?[0m"} <= set(texts(tmp_path / "x.svg"))


def test_a_range_is_by_the_batches_numbers():
    batches = [batch(i) for i in range(10, 20)]

    def numbers(*limits):
        return [one.sequence for one in choose("run", batches, *limits)]

    assert numbers(None, None) == list(range(10, 20))
    assert numbers(12, 14) == [12, 13, 14]
    assert numbers(None, 11) == [10, 11]
    assert numbers(18, 99) == [18, 19]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"picture": "x.gif"}, "--output = 'x.gif': must end in .png or .svg"),
        ({"picture": "/no/x.svg"}, "--output = '/no/x.svg': must be in a folder that exists"),
        ({"first": 0}, "--first = 0: must be an integer >= 1 and <= "),
        ({"first": 9999}, "--first = 9999: must be an integer >= 1 and <= "),
        ({"last": 0}, "--last = 0: must be an integer >= 1 or None"),
        ({"first": 4, "last": 3}, "--last = 3: must be an integer >= 4 or None"),
        ({"width": 0.5}, "--width = 0.5: must be a finite number > 2 and <= 200"),
        ({"width": float("nan")}, "--width = nan: must be a finite number > 2"),
        ({"path": "/no/run.jsonl"}, "/no/run.jsonl: cannot be read: No such file"),
        ({"path": __file__}, "must be what --trace-output or start_trace() wrote"),
    ],
)
def test_bad_options_name_value_and_rule(recorded, tmp_path, options, message):
    arguments = {"path": recorded, "picture": str(tmp_path / "x.svg"), **options}
    with pytest.raises(ValueError, match=re.escape(message)):
        draw_trace(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_draw_is_an_error(tmp_path):
    picture = str(tmp_path / "x.svg")
    empty = write(tmp_path / "empty.jsonl", [])
    with pytest.raises(ValueError, match=re.escape(f"{empty}: it has no batches")):
        draw_trace(empty, picture)
    lost = write(tmp_path / "lost.jsonl", [batch(collected=None, error="gone", rows=[row(1)])])
    with pytest.raises(ValueError, match=re.escape(f"{lost}: none of these batches")):
        draw_trace(lost, picture, time=True)
    draw_trace(lost, picture)


def test_without_matplotlib_it_says_what_to_install(recorded, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'rlt-jax[bench]'")):
        draw_trace(recorded, str(tmp_path / "x.svg"))
