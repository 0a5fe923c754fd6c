"""A conversion that is interrupted, at any point, leaves nothing that loads."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlt_jax.checkpoints_convert import CheckpointError, convert, open_checkpoint

# Stops (prints "here" and sleeps) when the named function has run the given number of times.
STOPPER = """
import sys, time
from rlt_jax.checkpoints_convert import convert, export
action, module, function, times = sys.argv[3:]
module = sys.modules["rlt_jax.checkpoints_convert." + module]
original, calls = getattr(module, function), 0
def stop(*args, **kwargs):
    global calls
    result = original(*args, **kwargs)
    calls += 1
    if calls == int(times):
        print("here", flush=True)
        time.sleep(600)
    return result
setattr(module, function, stop)
{"convert": convert, "export": export}[action](sys.argv[1], sys.argv[2], force=True)
"""

POINTS = [
    ("convert", "to_orbax", "copy_side_files", "1"),
    ("convert", "to_orbax", "write_item", "2"),
    ("convert", "to_orbax", "converter_version", "1"),  # all but the manifest is there
    ("convert", "new_folder", "_flush", "1"),  # complete, not yet renamed
    ("export", "to_huggingface", "save_file", "4"),
    ("export", "new_folder", "_flush", "1"),
]


def interrupt(number, source, destination, point):
    """Runs to the point in a process of its own, sends it the signal, and returns its stderr."""
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPER, str(source), str(destination), *point],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        line = process.stdout.readline()
        assert line == "here\n", process.stderr.read()
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    return errors


def assert_nothing_loads(folder: Path):
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            with pytest.raises(CheckpointError):
                open_checkpoint(path)


@pytest.mark.parametrize("point", POINTS, ids="-".join)
def test_killed_conversion_leaves_nothing_that_loads(tiny_source, tiny_converted, tmp_path, point):
    source = tiny_source if point[0] == "convert" else tiny_converted
    interrupt(signal.SIGKILL, source, tmp_path / "out", point)
    assert not (tmp_path / "out").exists()
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1 and left[0].startswith(".out.tmp-")  # it was indeed under way
    assert_nothing_loads(tmp_path)
    if point[0] == "convert":  # what is left does not stand in the way
        assert convert(source, tmp_path / "out").tensors


@pytest.mark.parametrize("point", [POINTS[1], POINTS[4]], ids="-".join)
def test_ctrl_c_removes_the_temporary_folder(tiny_source, tiny_converted, tmp_path, point):
    source = tiny_source if point[0] == "convert" else tiny_converted
    errors = interrupt(signal.SIGINT, source, tmp_path / "out", point)
    assert "KeyboardInterrupt" in errors
    assert list(tmp_path.iterdir()) == []


def test_killed_force_keeps_the_old_checkpoint(tiny_source, converted):
    interrupt(signal.SIGKILL, tiny_source, converted, POINTS[3])
    assert open_checkpoint(converted).read_tensor("model.norm.weight").shape == (32,)
