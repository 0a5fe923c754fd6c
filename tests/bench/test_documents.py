"""What the commands write: one schema, and figures that agree with each other."""

import math
import subprocess

import pytest

import rlt_jax
from rlt_jax.bench import report
from tests.bench.conftest import COMMANDS

KEYS = {
    "format",
    "command",
    "command_line",
    "time",
    "commit",
    "versions",
    "machine",
    "config",
    "rates",
    "startup",
    "rows",
}
CONFIGS = {"cache_config", "scheduler_config", "exit_config", "execution_config"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_writes_where_it_was_measured(document, name):
    written = document(name)
    assert set(written) == KEYS
    assert written["command_line"][:2] == ["rlt-jax", "bench"]
    assert written["command_line"][2] == written["command"]
    assert set(COMMANDS[name]) <= set(written["command_line"])
    assert written["commit"]["version"] == rlt_jax.__version__
    assert set(written["versions"]) == {"python", "jax", "jaxlib"}
    assert written["machine"]["device_kind"] == "cpu"
    assert written["machine"]["device_count"] >= 1
    assert written["machine"]["cpu"] and written["machine"]["cpu_count"]
    assert written["rows"]


@pytest.mark.parametrize("name", ["decode", "mixed", "prefill", "throughput"])
def test_every_engine_tells_its_configs_and_its_start(document, name):
    written = document(name)
    engines = written["config"]["engines"]
    assert written["config"]["model"]["num_hidden_layers"] == 2
    assert len(engines) == len(written["startup"]) == (2 if name == "decode" else 1)
    for engine, startup in zip(engines, written["startup"]):
        assert set(engine) > CONFIGS
        assert engine["cache_config"]["num_blocks"] == 256
        assert engine["memory_plan"]["num_blocks"] == 256
        assert engine["scheduler_config"]["max_num_seqs"] == 4
        assert startup["load_weights_seconds"] > 0
        assert startup["executables_now"] > 0
        assert startup["compilation_cache"] in ("off", "cold", "mixed", "warm")


def test_decode_rows(document):
    rows = document("decode")["rows"]
    assert [(row["kernels"], row["batch"]) for row in rows] == [
        ("auto", 1),
        ("auto", 4),
        ("reference", 1),
        ("reference", 4),
    ]
    for row in rows:
        # 8 token steps, the first 2 left out: 6 at positions 10 .. 15.
        assert (row["context"], row["depth"], row["steps"]) == (8, 4, 6)
        assert (row["first_position"], row["last_position"]) == (10, 15)
        assert (row["mean_depth"], row["loops"]) == (4, 24)
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms_per_step"])
        assert row["ms_per_loop"] == pytest.approx(row["ms_per_step"] / 4)
        assert row["median_ms_per_step"] > 0 and row["back_to_back_ms"] > 0
        idle = 1 - row["back_to_back_ms"] / row["ms_per_step"]
        assert row["idle_share"] == pytest.approx(idle)
        assert row["fraction"] == pytest.approx(row["limit_ms"] / row["ms_per_step"])
    rates = document("decode")["rates"]
    assert rates["used"] == rates["measured"]
    limit = 1e3 * rows[0]["read_bytes"] / rates["used"]["read_bytes_per_s"]
    assert rows[0]["limit_ms"] >= 0.999 * limit
    kv = 2 * 2 * 2 * 16 * 4  # of a position in one plane: 2 layers, K and V, 2 heads of 16 floats
    assert rows[1]["read_bytes"] - rows[0]["read_bytes"] == 3 * 4 * 13.5 * kv


def test_mixed_depths_are_those_asked_for(document):
    (row,) = document("mixed")["rows"]
    assert (row["depth"], row["mixed_depths"]) == (None, [2, 3, 4])
    assert 2 < row["mean_depth"] < 4
    assert row["loops"] >= 1
    assert row["limit_ms"] is row["fraction"] is None
    assert document("mixed")["rates"] == {"used": None, "measured": None}
    (engine,) = document("mixed")["config"]["engines"]
    assert engine["exit_config"]["mode"] == "trace"


def test_prefill_rows(document):
    rows = document("prefill")["rows"]
    assert [(row["requests"], row["prompt"]) for row in rows] == [(2, 8), (2, 16)]
    for row in rows:
        assert len(row["all_seconds"]) == 2 and row["seconds"] in row["all_seconds"]
        tokens = row["requests"] * row["prompt"]
        assert row["tokens_per_s"] == pytest.approx(tokens / row["seconds"])


def test_throughput_rows(document):
    rows = document("throughput")["rows"]
    assert [(row["requests"], row["finished"]) for row in rows] == [(1, 1), (4, 4)]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(8 * row["finished"] / row["seconds"])
        assert row["total_tokens_per_s"] == pytest.approx(2 * row["tokens_per_s"])
        assert len(row["all_tokens_per_s"]) == 2
        assert row["tokens_per_s"] == min(row["all_tokens_per_s"])  # the lower median of two
        assert 0 < row["ttft_p50"] <= row["ttft_p99"] < row["seconds"]
        assert 0 < row["tpot_p50"] <= row["tpot_p99"] < row["seconds"]
        assert row["mean_depth"] == 4
        assert row["peak_bytes"] > 0


def test_a_closed_loop_runs_twice_the_requests(document):
    (row,) = document("closed")["rows"]
    assert (row["requests"], row["finished"], row["closed_loop"]) == (2, 4, True)


def test_roofline_rows(document):
    rows = {row["what"]: row for row in document("roofline")["rows"]}
    assert set(rows) == {"read", "copy", "matmul"}
    assert rows["read"]["rate"] == pytest.approx(4194304 / rows["read"]["seconds"])
    assert rows["copy"]["rate"] == pytest.approx(2 * 4194304 / rows["copy"]["seconds"])
    assert rows["matmul"]["rate"] == pytest.approx(2 * 64**3 / rows["matmul"]["seconds"])


def test_kernel_rows(document):
    rows = document("kernels")["rows"]
    assert {row["kernel"] for row in rows} == {
        "paged_decode",
        "write_and_decode",
        "paged_prefill",
        "rotate_and_write",
        "residual_norm",
        "finalize_kv",
    }
    assert all(row["microseconds"] > 0 and row["bytes"] > 0 for row in rows)
    assert all(row["implementation"] == "reference" for row in rows)
    decode = rows[0]
    # 2 rows read 20 positions of 4 heads of 64 floats, K and V, and their q; and write as much.
    assert decode["bytes"] == 2 * 20 * 2 * 4 * 64 * 4 + 2 * 2 * 4 * 64 * 4
    assert decode["flops"] == 2 * 20 * 4 * 64 * 4


def test_the_commit_is_the_checkout_s_or_what_the_environment_says(monkeypatch):
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode == 0:
        assert len(report.commit()["git"]) == 40
        assert report.commit()["dirty"] in (True, False)
    monkeypatch.setattr(report, "_git", None)
    monkeypatch.setattr(rlt_jax, "__file__", "/nowhere/rlt_jax/__init__.py")
    monkeypatch.setenv("RLT_JAX_COMMIT", "abc")
    assert report.commit()["git"] == "abc"


def test_infinities_are_not_written(tmp_path):
    with pytest.raises(ValueError):
        report.write({"rate": math.inf}, str(tmp_path / "x.json"))
