"""Every example runs, on a random checkpoint; what it says of itself is true."""

import re
import types
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest

from examples import adaptive_depth, convert_checkpoint, generate, stream, terminal_picture
from examples.make_random_checkpoint import make_random_checkpoint

FOLDER = Path(__file__).parents[2] / "examples"
SHORT = sorted({path.stem for path in FOLDER.glob("*.py")} - {"make_random_checkpoint"})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    sizes = {"hidden": 32, "layers": 1, "heads": 2, "head_dim": 16, "intermediate": 48}
    folder = tmp_path_factory.mktemp("examples") / "random"
    return str(make_random_checkpoint(folder, max_positions=64, dtype="float32", **sizes))


@pytest.mark.parametrize("name", SHORT)
def test_an_example_is_short_and_says_how_to_run_it(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert text.count("\n") < 60
    assert f"    python examples/{name}.py" in text.split('"""')[1]


def test_generate_shows_answers_and_depths(model, capsys):
    generate.main(["--model", model, "17+25=", "1+1=", "--max-tokens=4"])
    depths = re.findall(
        r"    depths \((\d, \d, \d, \d)\), ended by length", capsys.readouterr().out
    )
    assert len(depths) == 2
    assert all(one.startswith("4,") for one in depths)


def test_stream_shows_every_token_of_both_requests_and_their_texts(model, capsys):
    stream.main(["--model", model, "17+25=", "1+1=", "--max-tokens=4"])
    lines = capsys.readouterr().out.splitlines()
    for prompt in ("17+25=", "1+1="):
        own = [line for line in lines if line.startswith(prompt)]
        assert [bool(re.search(r" loop [1-4]$", line)) for line in own] == [True] * 4 + [False]
        assert " -> " in own[-1]


def test_convert_checkpoint_comes_back_to_the_same_answers(model, tmp_path, capsys):
    convert_checkpoint.main([model, str(tmp_path)])
    *folders, verdict = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in folders] == ["huggingface", "orbax", "huggingface"]
    assert verdict == "the answers are the same"


def test_adaptive_depth_draws_fixed_and_adaptive_depths(model, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "depth.png"
    adaptive_depth.main(["--model", model, "--sums=2", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert out.count("% right") == 4 + len(adaptive_depth.THRESHOLDS)
    assert [f"depth {loops}.00: 0.0% right" in out for loops in (1, 2, 3, 4)] == [True] * 4


def test_adaptive_depth_counts_right_answers_and_decoded_depths():
    texts, depths = [" 42", " 7"], [(4, 1, 3), (4, 2)]
    outputs = [types.SimpleNamespace(text=t, exit_depths=d) for t, d in zip(texts, depths)]
    asked = []
    llm = types.SimpleNamespace(generate=lambda *call: asked.append(call) or outputs)
    pairs = np.array([[17, 25], [3, 5]])
    assert adaptive_depth.measure(llm, pairs, exit_threshold=0.3, min_loops=1) == (2.0, 0.5)
    ((prompts, params),) = asked
    assert prompts == ["17+25=", "3+5="]
    assert (params.exit_threshold, params.min_loops) == (0.3, 1)


def test_terminal_picture_shows_the_command_its_answers_and_nothing_else(model, tmp_path):
    picture = tmp_path / "new" / "picture.svg"
    prompts = ["--prompt=17+25=", "--prompt", "rev:stone=", "--exit-threshold", "0.6"]
    terminal_picture.main([str(picture), *prompts, "--model", model])
    root = xml.etree.ElementTree.parse(picture).getroot()
    text = "".join(root.itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert "$ rlt-jax generate --prompt=17+25= --prompt rev:stone= --exit-threshold 0.6" in text
    for part in ("exit depth", "17+25=", "rev:stone=", "2 prompts, ", "% of loops saved"):
        assert part in text
    assert "compiling" not in text
    assert "loading" not in text and "answering" not in text
