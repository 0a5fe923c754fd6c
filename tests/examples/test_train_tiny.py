"""The training of ouro-tiny: its tasks, its held-out problems, its dense model, its command."""

import json
import operator
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.train_tiny import model
from examples.train_tiny.batch import (
    BYTE_IDS,
    DECODED,
    END,
    END_ID,
    FIRST_OUTPUT,
    NOTHING,
    joined,
    plain_rows,
    sheet_rows,
    training_batch,
)
from examples.train_tiny.checkpoint import export
from examples.train_tiny.data import (
    SPLITS,
    examination,
    split_of,
    training_problems,
    training_sheets,
)
from examples.train_tiny.settings import model_config
from examples.train_tiny.tasks import FAMILY_WIDTHS, MAX_HOPS, MIN_VARIABLES
from examples.train_tiny.text import fnv1a
from rlt_jax.models.ouro import DTypePolicy

ROOT = Path(__file__).parents[2]
CHARACTERS = {int(token): chr(byte) for byte, token in enumerate(BYTE_IDS)}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}


def follow(lines: str, variable: str) -> tuple[str, int]:
    """(the digit that a variable leads to, in how many hops)"""
    values, hops = dict(line.split("=") for line in lines.split(";") if line), 0
    while not variable.isdigit():
        variable, hops = values[variable], hops + 1
    return variable, hops


def solve(task: str, prompt: str) -> str:
    if task == "lookup":
        lines, _, variable = prompt.rstrip("?").rpartition(";")
        return follow(lines, variable)[0]
    body = prompt.rstrip("=")
    if task == "addition":
        return str(sum(map(int, body.split("+"))))
    if task == "subtraction":
        return str(int(body.split("-")[0]) - int(body.split("-")[1]))
    word = body.split(":")[1]
    if task == "count":
        letter, _, word = word.partition(",")
        return str(word.count(letter))
    return word[::-1] if task == "reverse" else "".join(sorted(word))


@pytest.mark.parametrize("task", examination("test", 1))
def test_answers_are_right_and_begin_with_one_space(task):
    problems = examination("test", 300)[task]
    for prompt, answer in zip(problems.prompts(), problems.answers()):
        assert answer == " " + solve(task, prompt), prompt
    assert problems.length.max() <= FAMILY_WIDTHS[training_family(task)]


def training_family(task: str) -> str:
    if task in ("addition", "subtraction"):
        return "arithmetic"
    return "lookup" if task == "lookup" else "strings"


def test_examined_lookups_have_the_hops_and_variables_that_they_claim():
    problems = examination("test", 300)["lookup"]
    for prompt, level in zip(problems.prompts(), problems.level):
        lines, _, variable = prompt.rstrip("?").rpartition(";")
        assert follow(lines, variable)[1] == level
        assert lines.count("=") >= MIN_VARIABLES
    assert set(problems.level) == set(range(1, MAX_HOPS + 1))


@pytest.mark.parametrize("family", ["arithmetic", "strings"])
def test_training_problems_are_of_the_training_split(family):
    problems = training_problems(family, 2000, np.random.default_rng(0))
    assert len(problems) == 2000
    assert not split_of(fnv1a((problems.text, problems.prompt_length))).any()


def test_examinations_are_disjoint_and_without_repetition():
    papers = {split: examination(split, 200) for split in ("validation", "test")}
    for split, tasks in papers.items():
        for problems in tasks.values():
            found = split_of(fnv1a((problems.text, problems.prompt_length)))
            assert (found == SPLITS.index(split)).all()
            assert len(set(problems.prompts())) == len(problems)


def test_sheets_ask_only_training_questions_and_answer_them_right():
    rows = sheet_rows(training_sheets(200, np.random.default_rng(0), small_share=0.3))
    questions = 0
    for tokens, target, role, position, question in zip(
        rows.tokens, rows.target, rows.role, rows.position, rows.question
    ):
        (ends,) = np.nonzero(role == FIRST_OUTPUT)
        for mark in ends:
            seen = (question[: mark + 1] == 0) | (question[: mark + 1] == question[mark])
            assert position[: mark + 1][seen].tolist() == list(range(seen.sum()))
            prompt = "".join(CHARACTERS[token] for token in tokens[: mark + 1][seen])
            lines, _, variable = prompt.rstrip("?").rpartition(";")
            digit, hops = follow(lines, variable)
            assert 1 <= hops <= MAX_HOPS
            text = np.frombuffer(prompt.encode(), np.uint8)[None]
            assert split_of(fnv1a((text, np.array([text.size]))))[0] == 0
            assert role[mark : mark + 3].tolist() == [FIRST_OUTPUT, DECODED, END]
            assert CHARACTERS[tokens[mark + 1]] == CHARACTERS[target[mark]] == " "
            assert CHARACTERS[tokens[mark + 2]] == CHARACTERS[target[mark + 1]] == digit
            assert target[mark + 2] == END_ID
            questions += 1
    assert questions > 1200
    assert (rows.role == NOTHING).any()


def test_a_batch_is_the_same_for_the_same_step():
    rows = dict.fromkeys(FAMILY_WIDTHS, 8)
    first, again, other = (training_batch(rows, 0, step) for step in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(joined(first).tokens, joined(other).tokens)


def dense_states(config, params, batch, exits):
    """Hidden states [D, t, d] in float32 by the training's model."""
    hidden = model.embed(params, joined(batch).tokens)
    history, states = model.no_history(config, batch, hidden.dtype), []
    for depth in range(1, config.total_ut_steps + 1):
        hidden, history = model.loop(
            config, DTypePolicy("float32"), params, batch, hidden, history, exits < depth
        )
        states.append(hidden)
    return np.stack(states)


def small_model():
    config = model_config(**SMALL)
    params = model.init_params(config, jax.random.key(0))
    return config, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)


@pytest.mark.torch
def test_dense_model_equals_the_reference_with_random_exits(tmp_path):
    ouro_torch = pytest.importorskip("tests.reference.ouro_torch")
    config, params = small_model()
    export(config, params, tmp_path)
    oracle = ouro_torch.IncrementalOracle(ouro_torch.TorchOuro.from_folder(tmp_path))
    papers = examination("test", 3)
    batch = tuple(plain_rows(papers[task]) for task in ("addition", "lookup", "sort"))
    role = joined(batch).role
    random = jax.random.randint(jax.random.key(1), role.shape, 1, config.total_ut_steps + 1)
    exits = jnp.where(role >= DECODED, random, config.total_ut_steps)
    states, start = dense_states(config, params, batch, exits), 0
    for rows in batch:
        for tokens, role in zip(rows.tokens, rows.role):
            first, last = np.flatnonzero(role == FIRST_OUTPUT)[0], np.flatnonzero(role == END)[0]
            depths = np.asarray(exits[start + first : start + last + 1])
            wanted = oracle.generate(
                tokens[: first + 1].tolist(),
                max_tokens=len(depths),
                depths=depths.tolist(),
                min_loops=1,
                force_tokens=[*tokens[first + 1 : last + 1].tolist(), END_ID],
            ).hidden
            given = states[depths - 1, np.arange(start + first, start + last + 1)]
            np.testing.assert_allclose(given, wanted, rtol=0, atol=2e-5)
            start += len(tokens)


def test_a_question_on_a_sheet_is_computed_as_if_it_were_alone():
    config, params = small_model()
    sheet = sheet_rows(training_sheets(4, np.random.default_rng(1), small_share=0.5))
    full = jnp.full(sheet.tokens.size, config.total_ut_steps)
    states = dense_states(config, params, (sheet,), full).reshape(4, *sheet.tokens.shape, -1)
    for row in range(len(sheet.tokens)):
        for mark in np.flatnonzero(sheet.role[row] == FIRST_OUTPUT):
            number = sheet.question[row, mark]
            (alone,) = np.nonzero(np.isin(sheet.question[row], [0, number]))
            one = jax.tree.map(operator.itemgetter((slice(row, row + 1), alone)), sheet)
            wanted = dense_states(config, params, (one,), jnp.full(len(alone), 4))
            np.testing.assert_allclose(states[:, row, alone], wanted, rtol=0, atol=2e-5)


def train(*arguments: str) -> str:
    command = [sys.executable, "-m", "examples.train_tiny.train", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_smoke_run_and_resume(tmp_path):
    out = str(tmp_path / "run")
    assert "stage I has" in train("--out", out, "--smoke")
    progress = json.loads((tmp_path / "run" / "progress.json").read_text())
    assert progress["step"] > 0 and progress["seconds"] >= progress["budget"]
    assert (
        "lookup"
        in json.loads((tmp_path / "run" / "table.json").read_text())["exact_match_by_depth"]
    )
    train("--out", out, "--smoke", "--resume", "--minutes", "0.3")
    resumed = json.loads((tmp_path / "run" / "progress.json").read_text())
    assert resumed["step"] > progress["step"]
    assert resumed["best_score"] >= progress["best_score"] >= 0
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
