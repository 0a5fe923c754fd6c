"""What the tests of the benchmarks share: commands on one tiny checkpoint, run once each."""

import json

import pytest

from rlt_jax.cli import main
from tests.cli.support import SMALL

COMMANDS = {
    "roofline": ["--read-bytes=4194304", "--matmul=64"],
    "decode": ["--batch=1,4", "--context=8", "--tokens=8", "--skip=2", "--kernels=auto,reference"],
    "mixed": ["--batch=4", "--context=8", "--tokens=24", "--skip=2", "--mixed-depths=2,3,4"],
    "prefill": ["--requests=2", "--prompt=8,16", "--repeats=2"],
    "throughput": ["--requests=1,4", "--prompt=8", "--output-tokens=8", "--repeats=2"],
    "closed": ["--requests=2", "--prompt=8", "--output-tokens=8", "--repeats=1", "--closed-loop"],
    "kernels": ["--rows=2", "--context=20", "--prompt=20", "--layers=1", "--synthetic=ouro-tiny"],
}
_NAMES = {"mixed": "decode", "closed": "throughput"}


@pytest.fixture(scope="session")
def measured(tmp_path_factory, checkpoint):
    """name of COMMANDS -> the file that the command wrote, and its exit status."""
    folder = tmp_path_factory.mktemp("bench")
    files = {}

    def run(name):
        if name not in files:
            command = _NAMES.get(name, name)
            file = folder / f"{name}.json"
            arguments = [command, *COMMANDS[name], f"--output={file}"]
            if command in ("decode", "prefill", "throughput"):
                arguments += [f"--model={checkpoint}", *SMALL]
            if command not in ("roofline", "throughput"):
                arguments.append("--no-roofline" if name != "decode" else "--seed=0")
            assert main(["bench", *arguments]) == 0
            files[name] = file
        return files[name]

    return run


@pytest.fixture(scope="session")
def document(measured):
    """name of COMMANDS -> the JSON document that it wrote."""
    return lambda name: json.loads(measured(name).read_text())
