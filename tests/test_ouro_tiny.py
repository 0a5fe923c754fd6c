"""What the packaged model must be able to do, on held-out problems and through the public API."""

import json
from pathlib import Path

import pytest

import rlt_jax
from examples.train_tiny.data import examination
from examples.train_tiny.evaluate import BATCHING, measure
from rlt_jax import LLM, ExecutionConfig

FOLDER = Path(rlt_jax.__file__).parent / "assets" / "ouro-tiny"
DOCUMENTED_THRESHOLD = 0.7
PER_TASK = 334  # six tasks: 2,004 problems


def ouro_tiny(**options) -> LLM:
    programs = ExecutionConfig(min_row_bucket=16, min_prefill_bucket=64)  # few, so less compiling
    return LLM("ouro-tiny", scheduler_config=BATCHING, execution_config=programs, **options)


@pytest.fixture(scope="module")
def papers():
    return examination("test", PER_TASK)


@pytest.fixture(scope="module")
def full_depth_llm():
    with ouro_tiny() as llm:
        yield llm


@pytest.fixture(scope="module")
def full_depth(full_depth_llm, papers):
    return measure(full_depth_llm, papers)


@pytest.mark.once
def test_97_percent_of_every_task_is_right_at_full_depth(full_depth):
    assert full_depth["mean"] >= 97
    assert min(full_depth["exact_match"].values()) >= 97
    assert set(full_depth["depths"]) == {4}


@pytest.mark.once
def test_early_exit_saves_a_loop_at_no_more_than_a_point(full_depth_llm, papers):
    """On a quarter of the problems, for the test's time; evaluate.py takes them all."""
    some = {name: problems[::4] for name, problems in papers.items()}
    early = measure(full_depth_llm, some, DOCUMENTED_THRESHOLD)
    assert early["mean_depth"] <= 3.0
    assert early["mean"] >= measure(full_depth_llm, some)["mean"] - 1
    assert len(early["depths"]) >= 2


@pytest.mark.once
def test_one_loop_cannot_follow_assignments(full_depth, papers):
    with ouro_tiny(total_ut_steps=1) as llm:
        shallow = measure(llm, {"lookup": papers["lookup"]})
    assert shallow["mean"] <= full_depth["exact_match"]["lookup"] - 25


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("17+25=", " 42"),
        ("85-17=", " 68"),
        ("a=c;c=f;f=7;a?", " 7"),
        ("rev:stone=", " enots"),
        ("sort:hello=", " ehllo"),
        ("count:l,hello=", " 2"),
    ],
)
def test_the_card_s_examples(full_depth_llm, prompt, answer):
    (output,) = full_depth_llm.generate(prompt)
    assert (output.text, output.finish_reason) == (answer, "stop")


def test_it_is_small_and_complete():
    files = {file.name for file in FOLDER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8 * 2**20
    assert json.loads((FOLDER / "config.json").read_text())["total_ut_steps"] == 4
