"""What a recorded run says, whatever happens to its requests and batches."""

import itertools
import json
import os
import re

import pytest

from rlt_jax import (
    LLM,
    ExecutionConfig,
    ExitConfig,
    LLMEngine,
    SamplingParams,
    SchedulerConfig,
)
from rlt_jax.engine.types import (
    BatchError,
    DeviceLostError,
    Row,
    Rows,
    SchedulerOutput,
    Stage,
)
from rlt_jax.run_trace import TraceRecorder, read_trace
from tests.engine.fake_device import FakeDevice, fake_engine, run
from tests.tiny import ADAPTIVE, OPTIONS

PROMPTS = ["Hello", "the quick brown fox", "é", "a b", "one more"]


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def recorded(llm, tmp_path_factory):
    """A trace of PROMPTS on the real engine, and their outputs."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    llm.start_trace(path)
    outputs = llm.generate(PROMPTS, ADAPTIVE)
    llm.stop_trace()
    llm.generate("not in the trace", ADAPTIVE)
    return read_trace(path), outputs


def rows_of(trace, request):
    return [
        (batch, row)
        for batch in trace.batches
        for row in batch.rows
        if row.request == request and batch.collected is not None
    ]


def test_the_header_says_what_ran(recorded, checkpoint):
    header = recorded[0].header
    assert (header["format"], header["version"]) == ("rlt-jax run trace", 1)
    assert set(header["versions"]) == {"python", "rlt-jax", "jax", "jaxlib"}
    assert (header["model"], header["dtype"]) == (checkpoint, "float32")
    assert header["model_config"]["total_ut_steps"] == 4
    assert header["cache_config"]["layout"] == "last_exited"
    assert header["scheduler_config"]["max_num_seqs"] == 4
    assert header["execution_config"]["max_in_flight"] == 2


def test_rows_tell_how_every_token_was_made(recorded):
    trace, outputs = recorded
    for output in outputs:
        rows = rows_of(trace, output.request_id)
        assert sum(row.tokens for _, row in rows) == len(output.prompt_token_ids)
        exits = [row.exit_depth for _, row in rows if row.exit_depth]
        assert exits == list(output.exit_depths)
        loops = [r.depth for b, r in rows if r.depth and b.stage is not Stage.PREFILL]
        assert loops == [d + 1 for depth in output.exit_depths[1:] for d in range(depth)]


def test_requests_take_the_places_of_others(recorded):
    trace, _ = recorded
    assert max(len(batch.rows) for batch in trace.batches) == 4
    first = {i: rows_of(trace, str(i))[0][0].sequence for i in range(5)}
    last = min(rows_of(trace, str(i))[-1][0].sequence for i in range(4))
    assert first[4] > last


def test_times_and_sequences_grow_and_buckets_hold_their_rows(recorded):
    batches = recorded[0].batches
    for one, other in itertools.pairwise(batches):
        assert other.sequence == one.sequence + 1
        assert 0 <= one.submitted <= other.submitted
        assert one.collected <= other.collected
    for batch in batches:
        assert batch.submitted <= batch.collected
        count = sum(row.tokens for row in batch.rows) or len(batch.rows)
        assert count <= batch.bucket
        assert batch.bucket == (128 if batch.stage is Stage.PREFILL else 4)


def test_whole_tokens_say_how_many(tmp_path):
    core, _ = fake_engine(tokens_per_dispatch=2)
    trace = record(core, tmp_path, ["a"], SamplingParams(max_tokens=9))
    rows = [row for _, row in rows_of(trace, "a") if row.exit_depth]
    assert sum(row.num_tokens for row in rows) == 9
    assert max(row.num_tokens for row in rows) == 2


@pytest.mark.parametrize("mode", ["mixed", "refill"])
def test_a_wavefront_s_chunks_are_recorded_at_every_depth(tmp_path, mode):
    core, _ = fake_engine(
        mode=mode, wavefront_chunked_prefill=True, prefill_chunk_size=2, max_num_batched_tokens=8
    )
    prompt = tuple(range(7))
    trace = record(core, tmp_path, "ab", GATED, lambda core: core.add_request("c", prompt, GATED))
    chunks = [(b, r) for b, r in rows_of(trace, "c") if b.stage is Stage.MIXED and r.tokens]
    assert {(row.position, row.tokens) for _, row in chunks} == {(0, 2), (2, 2), (4, 2), (6, 1)}
    for position in (0, 2, 4, 6):
        loops = [row.depth for _, row in chunks if row.position == position]
        assert loops == [1, 2, 3, 4]
    beside = {batch.sequence for batch, row in chunks if any(not r.tokens for r in batch.rows)}
    assert bool(beside) == (mode == "mixed")


def test_loops_in_one_submission_are_recorded(tmp_path):
    """A prompt that was begun beside a decode row goes on alone when that has ended."""
    core, _ = fake_engine(mode="mixed", max_num_batched_tokens=8)
    short = SamplingParams(max_tokens=3, max_loops=2)

    def more(core):
        core.add_request("b", tuple(range(7)), GATED)

    trace = record(core, tmp_path, "a", short, more)
    loops = [(row.depth, b.num_loops) for b, row in rows_of(trace, "b") if b.stage is Stage.MIXED]
    assert loops == [(1, 1), (2, 1), (3, 2)]


def test_a_mixed_batch_s_bucket_is_of_its_prompt_tokens(checkpoint):
    scheduler = SchedulerConfig(4, 32, mode="mixed")
    execution = ExecutionConfig(min_row_bucket=4, min_prefill_bucket=8)
    options = {**OPTIONS, "scheduler_config": scheduler, "execution_config": execution}
    engine = LLMEngine(checkpoint, **options)
    chunks = [Row(1, 1, 0, 2, size=5), Row(1, 1, 5, 1, size=4, tokens=(1, 2, 3, 4))]
    for rows, bucket in ((chunks[1:], 8), ([Row(0, 0, 5, 3), *chunks], 32)):
        assert engine._bucket_of(SchedulerOutput(1, Stage.MIXED, Rows.of(rows))) == bucket


def record(core, tmp_path, requests, params, during=lambda core: None):
    """Runs these requests on a fake engine, `during` after the second step; reads the trace."""
    path = tmp_path / "run.jsonl"
    recorder = TraceRecorder(path, {})
    core.observers = (recorder,)
    for request in requests:
        core.add_request(request, (1, 2, 3), params)
    core.step()
    core.step()
    during(core)
    run(core)
    recorder.stop()
    return read_trace(path)


GATED = SamplingParams(max_tokens=5, exit_threshold=0.7)


def test_a_cancelled_request_ends_and_the_others_go_on(tmp_path):
    core, device = fake_engine()
    trace = record(core, tmp_path, "ab", GATED, lambda core: core.abort_request("a"))
    assert len(trace.batches) == len(device.batches)
    assert all(batch.collected is not None for batch in trace.batches)
    assert len([row for _, row in rows_of(trace, "b") if row.exit_depth]) == 5
    assert rows_of(trace, "a")[-1][0].sequence < rows_of(trace, "b")[-1][0].sequence


def test_an_id_used_again_is_another_request(tmp_path):
    core, _ = fake_engine()

    def again(core):
        core.abort_request("a")
        core.add_request("a", (1, 2), GATED)

    trace = record(core, tmp_path, "a", GATED, again)
    assert {row.generation for _, row in rows_of(trace, "a")} == {0, 1}


class Failing(FakeDevice):
    """A device whose batch number `at` fails at submit or at collect."""

    def __init__(self, at, on, error):
        super().__init__()
        self.at, self.on, self.error = at, on, error

    def submit(self, batch):
        if self.on == "submit" and batch.sequence == self.at:
            raise self.error
        return super().submit(batch)

    def collect(self, output):
        if self.on == "collect" and output.sequence == self.at:
            raise self.error
        return super().collect(output)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize(
    "on, error",
    [
        ("submit", BatchError("it does not fit")),
        ("submit", DeviceLostError("the device is gone")),
        ("collect", DeviceLostError("the device is gone")),
    ],
    ids=["refused", "lost at submit", "lost at collect"],
)
def test_a_failed_batch_has_no_results_and_says_why(tmp_path, on, error, max_in_flight):
    device = Failing(4, on, error)
    core, _ = fake_engine(device, max_in_flight=max_in_flight, max_num_seqs=1)
    fixed = SamplingParams(max_tokens=5)
    trace = record(core, tmp_path, "abc", fixed)
    assert [b.sequence for b in trace.batches] == list(range(1, len(trace.batches) + 1))
    (failed,) = [batch for batch in trace.batches if batch.sequence == 4]
    assert (failed.collected, failed.error) == (None, str(error))
    assert (failed.submitted is None) == (on == "submit")
    ended = [batch for batch in trace.batches if batch.collected is None]
    assert len(ended) <= max_in_flight
    assert len([row for _, row in rows_of(trace, "c") if row.exit_depth]) == 5


def test_an_interruption_is_recorded_and_goes_on(tmp_path):
    core, _ = fake_engine(Failing(2, "collect", KeyboardInterrupt()))
    recorder = TraceRecorder(tmp_path / "run.jsonl", {})
    core.observers = (recorder,)
    core.add_request("a", (1, 2, 3), GATED)
    with pytest.raises(KeyboardInterrupt):
        run(core)
    recorder.stop()
    batch = read_trace(tmp_path / "run.jsonl").batches[1]
    assert (batch.sequence, batch.collected, batch.error) == (2, None, "KeyboardInterrupt")


def test_a_trace_may_begin_and_end_while_batches_are_in_flight(tmp_path):
    core, device = fake_engine(exit_config=ExitConfig())
    core.add_request("a", (1, 2, 3), SamplingParams(max_tokens=20))
    core.step()
    assert device.in_flight
    recorder = TraceRecorder(tmp_path / "run.jsonl", {})
    core.observers = (recorder,)
    for _ in range(3):
        core.step()
    assert device.in_flight
    recorder.stop()
    first, *_, last = read_trace(tmp_path / "run.jsonl").batches
    assert first.sequence == 3
    assert (last.collected, last.error) == (None, "in flight when the trace was stopped")


@pytest.mark.parametrize("end", ["close", "stop_trace"])
def test_a_stream_cut_short_leaves_complete_lines(checkpoint, tmp_path, end):
    path = tmp_path / "run.jsonl"
    with LLM(checkpoint, **OPTIONS) as llm:
        llm.start_trace(path)
        stream = llm.stream(PROMPTS, ADAPTIVE)
        next(stream)
        getattr(llm, end)()
    text = path.read_text()
    assert text.endswith("\n")
    assert (
        len([json.loads(line) for line in text.splitlines()]) == len(read_trace(path).batches) + 1
    )


def test_answers_are_the_same_with_a_trace(recorded, llm):
    def tokens(outputs):
        return [(output.token_ids, output.exit_depths) for output in outputs]

    assert tokens(llm.generate(PROMPTS, ADAPTIVE)) == tokens(recorded[1])


def test_one_trace_at_a_time(llm, tmp_path):
    with pytest.raises(RuntimeError, match=r"stop_trace: none is running; start_trace\(\) first"):
        llm.stop_trace()
    path = str(tmp_path / "a")
    llm.start_trace(path)
    with pytest.raises(RuntimeError, match=re.escape(f"start_trace: one to {path!r} is running")):
        llm.start_trace(tmp_path / "b")
    llm.stop_trace()
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("path", ["", None, 3, ".", "/no/folder/run.jsonl", "a\0b"])
def test_a_bad_path_starts_nothing(llm, path):
    with pytest.raises(ValueError, match=re.escape(f"path = {path!r}: must be a file")):
        llm.start_trace(path)
    with pytest.raises(RuntimeError, match="none is running"):
        llm.stop_trace()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_trace_and_no_request(tmp_path, caplog):
    with pytest.raises(ValueError, match="path = '/dev/full': must be a file that can be written"):
        TraceRecorder("/dev/full", {})
    path = tmp_path / "run.jsonl"
    core, _ = fake_engine()
    recorder = TraceRecorder(path, {})
    core.observers = (recorder,)
    core.add_request("a", (1, 2, 3), GATED)
    core.step()
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), recorder._file.fileno())
    assert run(core)["a"].finish_reason == "length"
    with pytest.raises(OSError, match=r"the trace is not complete: .*No space left"):
        recorder.stop()
    assert len(read_trace(path).batches) == 1
    assert len(caplog.messages) == 1


HEADER = '{"format": "rlt-jax run trace", "version": 1}\n'


@pytest.mark.parametrize(
    "text, rule",
    [
        ("", "must be what --trace-output or start_trace() wrote"),
        ("hello\n", "must be what --trace-output or start_trace() wrote"),
        ('{"rows": []}\n', "must be what --trace-output or start_trace() wrote"),
        ("[1]\n", "must be what --trace-output or start_trace() wrote"),
        (HEADER.replace("1}", "2}"), "version = 2: must be 1"),
        (HEADER + "{}\n", "line 2: must be a batch of a run trace"),
        (HEADER + "3\n", "line 2: must be a batch of a run trace"),
        (HEADER + "[" * 100_000 + "\n", "line 2: must be a batch of a run trace"),
        (HEADER[:-2] + ', "model_config": 4}\n', "line 1: must be the header of a run trace"),
        (
            HEADER[:-2] + ', "model_config": {"total_ut_steps": 0}}\n',
            "line 1: must be the header of a run trace: model_config.total_ut_steps = 0: must be",
        ),
    ],
)
def test_another_file_is_refused(tmp_path, text, rule):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {rule}")):
        read_trace(path)


ROW = {"request": "a", "generation": 0, "position": 3, "depth": 1, "exit_depth": 0}
ROW |= {"tokens": 0, "num_tokens": 1}
BATCH = {"sequence": 1, "stage": "recurrent", "bucket": 4, "submitted": 0.1, "collected": 0.2}
BATCH |= {"error": None, "rows": [ROW]}


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"sequence": "x"}, "sequence = 'x': must be an integer"),
        ({"bucket": "4"}, "bucket = '4': must be an integer"),
        ({"submitted": float("nan")}, "submitted = nan: must be a finite number"),
        ({"collected": 0.05}, "collected = 0.05: must be >= submitted = 0.1"),
        ({"num_loops": 0}, "num_loops = 0: must be an integer >= 1"),
        ({"rows": []}, "rows = []: must be at least one"),
        ({"rows": [{**ROW, "request": 5}]}, "request = 5: must be a string"),
        ({"rows": [{**ROW, "depth": -1}]}, "depth = -1: must be an integer >= 0"),
        ({"rows": [{**ROW, "num_tokens": 0}]}, "num_tokens = 0: must be an integer >= 1"),
        ({"rows": [{**ROW, "num_tokens": 10**400}]}, "num_tokens = 1000"),
    ],
)
def test_a_changed_line_is_refused_naming_field_value_and_rule(tmp_path, change, rule):
    path = tmp_path / "run.jsonl"
    path.write_text(HEADER + json.dumps(BATCH) + "\n" + json.dumps({**BATCH, **change}) + "\n")
    message = f"{path}: line 3: must be a batch of a run trace: {rule}"
    with pytest.raises(ValueError, match=re.escape(message)):
        read_trace(path)


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none.jsonl: cannot be read: No such file"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match="binary: must be what"):
        read_trace(tmp_path / "binary")


def test_a_last_line_cut_short_is_left_out(tmp_path):
    core, _ = fake_engine()
    trace = record(core, tmp_path, "a", GATED)
    path = tmp_path / "run.jsonl"
    path.write_text(path.read_text()[:-20])
    assert read_trace(path).batches == trace.batches[:-1]
