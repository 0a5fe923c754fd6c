"""bench soak: every request is accounted for, every block comes back, and what does not add up is
seen."""

import itertools
import json

import numpy as np
import pytest

from rlt_jax.bench import soak
from rlt_jax.cli import main
from rlt_jax.engine.core import EngineCore
from rlt_jax.engine.kv_accounting import KVAccounting
from rlt_jax.engine.preemption import HostMemory
from rlt_jax.engine.scheduler import Scheduler
from rlt_jax.engine.types import DeviceLostError
from rlt_jax.runtime.runner import Runner

# Few programs: the sizes of batches are not what is tested.
SIZES = ["--max-num-batched-tokens=64", "--min-row-bucket=8", "--min-prefill-bucket=64"]
MEASURED = {"seconds", "requests_per_s", "rss_after_warm_up", "rss_at_end", "rss_growth"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a soak; returns its exit status and its row."""
    folder, numbers = tmp_path_factory.mktemp("soak"), itertools.count()

    def run(*flags):
        file = folder / f"{next(numbers)}.json"
        status = main(["bench", "soak", *SIZES, *flags, f"--output={file}"])
        (row,) = json.loads(file.read_text())["rows"]
        return status, row

    return run


@pytest.fixture(scope="module")
def short(run, checkpoint):
    """A soak of few requests on a tiny random checkpoint; what it needs is compiled."""

    def short(*flags):
        return run(f"--model={checkpoint}", "--requests=60", *flags)

    assert short()[0] == 0
    return short


def test_500_requests_on_ouro_tiny_are_all_accounted_for(run):
    status, row = run("--requests=500")
    assert (status, row["problems"]) == (0, [])
    ends = [row[reason] for reason in ("length", "stop", "abort", "error")]
    assert sum(ends) == row["requests"] == 500
    assert min(ends[:3]) > 0 and row["error"] == 0
    assert row["free_blocks"] + row["cached_blocks"] == row["total_blocks"]
    assert row["most_used_blocks"] == row["total_blocks"] == 64
    assert row["hits"] > 50 and 0 < row["cached_prompt_tokens"] < row["prompt_tokens"]
    assert row["preemptions"] > 50 and row["most_host_blocks"] > 0
    assert 8 < row["most_waiting"] <= 32 + row["preemptions"]
    assert 1 < row["mean_depth"] < 4
    assert row["warm_up_requests"] == 50 and row["waves"] > 2
    assert row["rss_growth"] == row["rss_at_end"] - row["rss_after_warm_up"] < 50e6
    assert row["compiled_meanwhile"] == 0


def test_the_seed_decides_what_happens(short):
    def told(row):
        return {name: value for name, value in row.items() if name not in MEASURED}

    first, again, other = (short(f"--seed={seed}")[1] for seed in (1, 1, 2))
    assert told(first) == told(again)
    assert first["output_tokens"] != other["output_tokens"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--layout=shared"],
        ["--mode=mixed", "--exit-decision=device", "--async-scheduling", "--max-in-flight=3"],
        ["--exit-mode=weighted", "--no-enable-preemption"],
    ],
    ids=str,
)
def test_other_options_are_soaked_as_well(short, flags):
    status, row = short("--no-compile-ahead", "--max-growth=500", *flags)
    assert (status, row["problems"]) == (0, [])
    assert (row["hits"] > 0) == ("--layout=shared" not in flags)
    assert (row["preemptions"] > 0) == ("--no-enable-preemption" not in flags)


def test_without_cancels_none_is_aborted_and_with_all_cancelled_some_are_too_late(short):
    assert short("--cancel=0")[1]["abort"] == 0
    row = short("--cancel=1")[1]
    assert 0 < row["length"] < row["abort"] < 60


# -- what is planted is seen -----------------------------------------------------------------------


def lose_an_output(monkeypatch):
    step = EngineCore.step

    def forgetful(core, **how):
        return [output for output in step(core, **how) if output.request_id != "9"]

    monkeypatch.setattr(EngineCore, "step", forgetful)


def tell_an_output_twice(monkeypatch):
    step = EngineCore.step
    monkeypatch.setattr(EngineCore, "step", lambda core, **how: 2 * step(core, **how))


def lose_a_page(monkeypatch):
    release = KVAccounting.release

    def forgetful(kv, owner):
        release(kv, owner)
        if owner == 9:
            kv._free.pop()

    monkeypatch.setattr(KVAccounting, "release", forgetful)


def keep_host_memory(monkeypatch):
    monkeypatch.setattr(HostMemory, "forget", lambda *_: None)


def miscount(monkeypatch):
    totals = Scheduler.totals
    monkeypatch.setattr(Scheduler, "totals", lambda one: totals(one) | {"output_tokens": 1})


def ignore_cancels(monkeypatch):
    monkeypatch.setattr(EngineCore, "abort_request", lambda *_: True)


def lose_the_device(monkeypatch):
    collect, calls = Runner.collect, itertools.count()

    def lost(runner, ticket):
        if next(calls) == 50:
            raise DeviceLostError("the device fell over")
        return collect(runner, ticket)

    monkeypatch.setattr(Runner, "collect", lost)


def grow(monkeypatch):
    step, kept = EngineCore.step, []

    def greedy(core, **how):
        kept.append(np.ones(2**18))  # 2 MB, written to
        return step(core, **how)

    monkeypatch.setattr(EngineCore, "step", greedy)


@pytest.mark.parametrize(
    ("plant", "problem"),
    [
        (lose_an_output, "1 requests never ended: ['9']"),
        (tell_an_output_twice, "ended (length), but it was not running"),
        (lose_a_page, "cached blocks: must be 64 in all"),
        (keep_host_memory, "nothing runs, and there is still {'host_blocks': "),
        (miscount, "output_tokens = 1: the requests report "),
        (ignore_cancels, "ended (length): it was cancelled"),
        (lose_the_device, "failed: the device fell over"),
        (grow, "the process has grown by "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_goes_wrong_is_a_problem_and_exit_status_1(short, plant, problem, monkeypatch, capsys):
    plant(monkeypatch)
    status, row = short()
    captured = capsys.readouterr()
    assert status == 1
    assert any(problem in one for one in row["problems"]), row["problems"]
    for one in row["problems"]:
        assert f"rlt-jax: soak: {one}\n" in captured.err
    assert "│      no │" in captured.out


def test_a_soak_that_comes_to_a_standstill_ends_with_what_the_engine_stands_at(
    checkpoint, monkeypatch, capsys
):
    monkeypatch.setattr(soak, "_STUCK_STEPS", 100)
    monkeypatch.setattr(EngineCore, "step", lambda *_, **__: [])
    assert main(["bench", "soak", f"--model={checkpoint}", "--requests=60", *SIZES]) == 2
    error = capsys.readouterr().err
    assert "rlt-jax: error: no request has ended in 100 steps: {'running': 0, 'waiting': " in error


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--requests=0", "--requests = 0: must be an integer >= 1"),
        ("--cancel=1.5", "--cancel = 1.5: must be a finite number in [0, 1]"),
        ("--cancel=nan", "--cancel = nan: must be a finite number in [0, 1]"),
        ("--max-waiting=0", "--max-waiting = 0: must be an integer >= 1"),
        ("--max-growth=-1", "--max-growth = -1: must be an integer >= 0"),
        ("--seed=-1", "--seed = -1: must be an integer >= 0"),
        ("--block-size=0", "CacheConfig.block_size = 0: must be an integer >= 1"),
        ("--num-blocks=15", "--num-blocks = 15: must be an integer >= 16"),
        ("--kv-cache-memory-bytes=2097151", "= 2097151: must be an integer >= 2097152"),
        ("--synthetic=gpt", "--synthetic = 'gpt': must be one of ouro-1.4b"),
        ("--exit-mode=trace", "ExitConfig.depths_by_request = None: must be given"),
        ("--depths-by-request={}", "unrecognized arguments: --depths-by-request"),
        ("--output=/no/file.json", "--output = '/no/file.json': must be a file in"),
    ],
)
def test_wrong_flags_name_the_flag_the_value_and_the_rule(flag, message, capsys):
    try:
        status = main(["bench", "soak", "--requests=1", flag])
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("rlt-jax: error: ") and message in error


def test_a_model_whose_context_is_too_short_is_refused(monkeypatch, checkpoint, capsys):
    monkeypatch.setattr(soak, "_MOST_POSITIONS", 65)
    assert main(["bench", "soak", f"--model={checkpoint}"]) == 2
    assert "max_position_embeddings = 64: must be >= 65" in capsys.readouterr().err
