"""What a profile of an engine shows, and what it refuses."""

import gzip
import json
import re

import jax
import pytest

from rlt_jax import LLM
from rlt_jax.engine.types import Row, Rows, SchedulerOutput, Stage
from rlt_jax.profiling import name_of
from rlt_jax.run_trace import read_trace
from tests.tiny import ADAPTIVE, OPTIONS

PROMPTS = ["Hello", "the quick brown fox"]


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        llm.generate(PROMPTS, ADAPTIVE)
        yield llm


def event_names(folder):
    (path,) = folder.rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def test_every_batch_has_a_name_in_the_profile(llm, tmp_path):
    llm.start_profile(tmp_path / "profile")
    llm.start_trace(tmp_path / "run.jsonl")  # both at once
    llm.generate(PROMPTS, ADAPTIVE)
    llm.stop_profile()
    llm.stop_trace()
    names = event_names(tmp_path / "profile")
    batches = read_trace(tmp_path / "run.jsonl").batches
    for batch in batches:
        name = f"{batch.stage.value} rows={len(batch.rows)}"
        assert any(found.startswith(name) for found in names)
        assert any(found.startswith(f"collect {name}") for found in names)
    submitted = [name for name in names if re.match(r"(prefill|recurrent|boundary|coda) ", name)]
    assert len(submitted) == len(batches)


ROWS = {
    "prefill rows=2 tokens=5": (
        Stage.PREFILL,
        [Row(0, 0, 0, 4, size=3), Row(1, 1, 0, 4, size=2)],
    ),
    "mixed rows=3 tokens=5 depths=1-3": (
        Stage.MIXED,
        [Row(0, 0, 5, 3), Row(1, 1, 0, 2, size=3), Row(1, 1, 3, 1, size=2)],
    ),
    "recurrent rows=3 depths=1-3": (Stage.RECURRENT, [Row(i, i, 5, i + 1) for i in range(3)]),
    "boundary rows=2 depths=1": (Stage.BOUNDARY, [Row(0, 0, 5, 1), Row(1, 1, 5, 0, 3)]),
    "coda rows=1": (Stage.CODA, [Row(0, 0, 5, 0, 3)]),
}


@pytest.mark.parametrize("name", ROWS)
def test_names_say_stage_rows_and_depths(name):
    stage, rows = ROWS[name]
    assert name_of(SchedulerOutput(1, stage, Rows.of(rows))) == name


def test_a_dispatch_of_several_tokens_says_so():
    rows = Rows.of([Row(i, i, 5, 4, 4) for i in range(2)])
    batch = SchedulerOutput(1, Stage.TOKENS, rows, num_tokens=4)
    assert name_of(batch) == "tokens rows=2 depths=4 num_tokens=4"


def test_several_loops_of_prompts_say_so():
    rows = Rows.of([Row(0, 0, 0, 2, size=3)])
    batch = SchedulerOutput(1, Stage.MIXED, rows, num_loops=3)
    assert name_of(batch) == "mixed rows=1 tokens=3 depths=2 num_loops=3"


def test_one_profile_at_a_time(llm, tmp_path):
    with pytest.raises(RuntimeError, match=r"stop_profile: none is running; start_profile\(\)"):
        llm.stop_profile()
    path = str(tmp_path / "a")
    llm.start_profile(path)
    with pytest.raises(RuntimeError, match=re.escape(f"start_profile: one to {path!r} is runn")):
        llm.start_profile(tmp_path / "b")
    llm.stop_profile()
    assert not (tmp_path / "b").exists()


def test_what_else_profiles_the_process_is_left_alone(llm, tmp_path):
    jax.profiler.start_trace(str(tmp_path / "other"))
    with pytest.raises(RuntimeError, match="Only one profile"):
        llm.start_profile(tmp_path / "profile")
    jax.profiler.stop_trace()
    with pytest.raises(RuntimeError, match="stop_profile: none is running"):
        llm.stop_profile()


@pytest.mark.parametrize("path", ["", None, 3, "/no/folder/profile", "a\0b", __file__])
def test_a_bad_folder_starts_nothing(llm, path):
    with pytest.raises(ValueError, match=re.escape(f"directory = {path!r}: must be a folder")):
        llm.start_profile(path)
    with pytest.raises(RuntimeError, match="none is running"):
        llm.stop_profile()


def test_closing_writes_the_profile(checkpoint, tmp_path):
    with LLM(checkpoint, **OPTIONS) as llm:
        llm.start_profile(tmp_path)
        llm.generate("a", ADAPTIVE)
    assert any(name.startswith("prefill rows=1") for name in event_names(tmp_path))
