"""bench preemption: what it saves, counts and refuses."""

import json

import pytest

from rlt_jax.cli import main
from tests.cli.support import SMALL

FLAGS = [flag for flag in SMALL if "seqs" not in flag]


@pytest.mark.parametrize("layout, planes", [("last_exited", 4), ("shared", 1)])
def test_a_slot_is_saved_and_restored_alone_and_beside_another(
    checkpoint, tmp_path, layout, planes
):
    file = tmp_path / "preemption.json"
    arguments = [f"--model={checkpoint}", f"--layout={layout}", "--context=20", "--repeats=1"]
    assert main(["bench", "preemption", *FLAGS, *arguments, f"--output={file}"]) == 0
    document = json.loads(file.read_text())
    (row,) = document["rows"]
    plan = document["config"]["engines"][0]["memory_plan"]
    pages = -(-(20 + 16 - 1) // plan["block_size"])  # allocated at once
    assert row["kv_bytes"] == pages * planes * plan["bytes_per_block"]
    assert row["moved_bytes"] >= row["kv_bytes"] and row["transfers"] >= 1
    times = ("save_seconds", "restore_seconds", "beside_save_seconds", "beside_restore_seconds")
    assert all(row[name] > 0 for name in (*times, "copy_out_gb_per_s", "copy_in_gb_per_s"))
    assert row["tokens_meanwhile"] > 0


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--context=0"], "--context = 0: must be an integer >= 1"),
        (["--context=50"], "--context = 50: must be an integer >= 1 and <= 49"),
        (["--repeats=0"], "--repeats = 0: must be an integer >= 1"),
        (["--host-memory-bytes=0"], "the request was not preempted: is there host memory for it?"),
        (["--policy=fcfs"], "unrecognized arguments: --policy=fcfs"),
    ],
)
def test_what_cannot_be_measured_is_refused(checkpoint, capsys, flags, message):
    arguments = ["bench", "preemption", *FLAGS, f"--model={checkpoint}", "--context=20", *flags]
    try:
        assert main(arguments) != 0
    except SystemExit as exit:
        assert exit.code == 2
    assert message in capsys.readouterr().err
