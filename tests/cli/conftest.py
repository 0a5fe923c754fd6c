"""What the tests of the command line share: one tiny checkpoint, and ways to run a command."""

import pytest

from examples.make_random_checkpoint import make_random_checkpoint
from rlt_jax import LLM
from rlt_jax.cli import main
from rlt_jax.tokenizer import Tokenizer
from tests.cli.support import ADAPTIVE, PROMPTS, SMALL, Typed
from tests.tiny import ADAPTIVE as ADAPTIVE_PARAMS
from tests.tiny import OPTIONS, TINY


@pytest.fixture(scope="session")
def long_checkpoint(tmp_path_factory):
    """The flags of a checkpoint for commands that run as processes of their own: its context is
    long, and what one of them compiled the others need not."""
    folder = tmp_path_factory.mktemp("long")
    sizes = {**TINY, "layers": 1, "max_positions": 20000, "dtype": "float32"}
    model = make_random_checkpoint(folder / "model", **sizes)
    cache = f"--compilation-cache-dir={folder / 'programs'}"
    return ["--model", str(model), cache, "--max-num-seqs=1", "--max-num-batched-tokens=32"]


@pytest.fixture(scope="session")
def expected(checkpoint):
    """What the Python interface answers to PROMPTS."""
    with LLM(checkpoint, **OPTIONS) as llm:
        return llm.generate(PROMPTS, ADAPTIVE_PARAMS)


@pytest.fixture
def cli(capsys, monkeypatch):
    """Runs a command; returns its exit status, stdout and stderr. Standard input is a terminal
    unless a test puts something else in its place."""
    monkeypatch.setattr("sys.stdin", Typed())

    def run(*arguments):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = stop.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def generate(cli, checkpoint):
    def run(*arguments):
        return cli("generate", "--model", checkpoint, *SMALL, *ADAPTIVE, *arguments)

    return run


@pytest.fixture
def tokenizer(checkpoint):
    return Tokenizer.from_folder(checkpoint)
